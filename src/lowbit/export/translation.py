"""Translation: our ops as ONNX nodes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import onnxscript
import torch

from lowbit.export.metadata import QUANTIZER

op: Any = onnxscript.opset21  # the lowest that we write; the exporter's version is its own affair

_RANGES = {
    ir.DataType.INT8: (-128, 127),
    ir.DataType.UINT8: (0, 255),
    ir.DataType.INT16: (-(2**15), 2**15 - 1),
    ir.DataType.UINT16: (0, 2**16 - 1),
}

# Of an EmbeddingBag, as torch numbers them.
_MEAN, _MAX = 1, 2


def _code_type(quant_min: int, quant_max: int) -> ir.DataType:
    """The smallest type that holds the grid, signed as the grid is."""
    fits = [dtype for dtype, (_, high) in _RANGES.items() if dtype.is_signed() == (quant_min < 0) and quant_max <= high]
    return fits[0]


def _attributes(axis: int | None, block: int) -> dict[str, int]:
    if axis is None:
        return {}
    return {"axis": axis, "block_size": block} if block else {"axis": axis}


def _float32(x: Any) -> Any:
    return x if x.dtype == ir.DataType.FLOAT else op.Cast(x, to=ir.DataType.FLOAT)


def _quantize_nodes(
    x: Any,
    scale: Any,
    zero_point: Any,
    quant_min: int,
    quant_max: int,
    axis: int | None,
    block: int,
    clips: bool,
    name: str,
) -> tuple[Any, Any]:
    """The codes, and their zero point as they are typed"""
    dtype = _code_type(quant_min, quant_max)
    needs_clip = clips and (quant_min, quant_max) != _RANGES[dtype]
    x = _float32(x)
    if needs_clip and not block:
        x = _clip(x, scale, zero_point, quant_min, quant_max, axis)
    typed = None if zero_point is None else op.Cast(zero_point, to=dtype)
    if typed is None:
        typed = _zeros(scale, dtype)
    q = op.QuantizeLinear(x, scale, typed, **_attributes(axis, block))
    if needs_clip and block:
        q = _clip_codes(q, quant_min, quant_max, dtype)
    q.producer().metadata_props[QUANTIZER] = name
    return q, typed


def _clip(x: Any, scale: Any, zero_point: Any, quant_min: int, quant_max: int, axis: int | None) -> Any:
    """min(max(x, (quant_min - z) * s), (quant_max - z) * s): the codes are then in the grid"""
    ends = []
    for end in (quant_min, quant_max):
        steps = _constant(float(end), ir.DataType.FLOAT)
        if zero_point is not None:
            steps = op.Sub(steps, op.Cast(zero_point, to=ir.DataType.FLOAT))
        limit = op.Mul(steps, scale)
        if axis is not None:
            shape = [-1 if i == axis else 1 for i in range(len(x.shape))]
            limit = op.Reshape(limit, op.Constant(value_ints=shape))
        ends.append(limit)
    return op.Clip(x, *ends) if axis is None else op.Min(op.Max(x, ends[0]), ends[1])


def _clip_codes(q: Any, quant_min: int, quant_max: int, dtype: ir.DataType) -> Any:
    """min(max(q, quant_min), quant_max), of 16 bits by way of int32, since ONNX Runtime clips no int16 or uint16"""
    if dtype.bitwidth == 8:
        return op.Clip(q, _constant(quant_min, dtype), _constant(quant_max, dtype))
    wide = ir.DataType.INT32
    return op.Cast(op.Clip(op.Cast(q, to=wide), _constant(quant_min, wide), _constant(quant_max, wide)), to=dtype)


def _constant(value: float, dtype: ir.DataType) -> Any:
    return op.Constant(value=ir.tensor(value, dtype=dtype))


def _zeros(scale: Any, dtype: ir.DataType) -> Any:
    """Zero points of the scale's shape, which tell the type of the codes."""
    if len(scale.shape) == 0:
        return _constant(0, dtype)
    zeros = op.ConstantOfShape(op.Shape(scale), value=ir.tensor([0], dtype=ir.DataType.INT32))
    return op.Cast(zeros, to=dtype)


def fake_quantize(x: Any, scale: Any, zero_point: Any = None, *grid: Any) -> Any:
    """y = (q - z) * s,  q = clamp(round(x / s) + z, quant_min, quant_max)"""
    axis, block = grid[2], grid[3]
    q, typed = _quantize_nodes(x, scale, zero_point, *grid)
    # A zero point that needs none keeps ONNX Runtime 1.31, optimising, from running the file, and gains nothing.
    y = op.DequantizeLinear(q, scale, None if zero_point is None else typed, **_attributes(axis, block))
    if block and zero_point is not None:
        y = op.Max(y)  # else it takes a product of this for one of integers with one zero point, and stops
    return y if x.dtype == ir.DataType.FLOAT else op.Cast(y, to=x.dtype)


def quantize(x: Any, scale: Any, zero_point: Any = None, *grid: Any) -> Any:
    """q = clamp(round(x / s) + z, quant_min, quant_max)"""
    return _quantize_nodes(x, scale, zero_point, *grid)[0]


def dequantize(q: Any, scale: Any, zero_point: Any, axis: int | None, block: int, dtype: int) -> Any:
    """y = (q - z) * s"""
    typed = None if zero_point is None else op.Cast(zero_point, to=q.dtype)
    y = op.DequantizeLinear(q, scale, typed, **_attributes(axis, block))
    return y if ir.DataType(dtype) == ir.DataType.FLOAT else op.Cast(y, to=ir.DataType(dtype))


def integer_matmul(q: Any, zero_point: Any, w: Any, weight_zero_point: Any) -> Any:
    """sum_k (q[..., k] - z) * (w[k, n] - z_w[n])"""
    typed = None if weight_zero_point is None else op.Cast(weight_zero_point, to=w.dtype)
    if zero_point is None or len(zero_point.shape) == 0:
        return op.MatMulInteger(q, w, None if zero_point is None else op.Cast(zero_point, to=q.dtype), typed)
    # ONNX Runtime takes one zero point for all rows: sum (q - z) v = sum q v - z sum v
    total = op.MatMulInteger(q, w, None, typed)
    columns = op.Cast(w, to=ir.DataType.INT32)
    if weight_zero_point is not None:
        columns = op.Sub(columns, weight_zero_point)
    return op.Sub(total, op.Mul(zero_point, _sum_rows(columns)))


def integer_matmul_by_groups(q: Any, zero_point: Any, w: Any) -> Any:
    """sum_k (q[g, ..., k] - z) * w[g, k, n]"""
    if zero_point is None or len(zero_point.shape) == 0:
        return op.MatMulInteger(q, w, None if zero_point is None else op.Cast(zero_point, to=q.dtype))
    sums = _sum_rows(op.Cast(w, to=ir.DataType.INT32))
    return op.Sub(op.MatMulInteger(q, w), op.Mul(zero_point, sums))


def _sum_rows(w: Any) -> Any:
    return op.ReduceSum(w, op.Constant(value_ints=[-2]), keepdims=1)


def integer_conv(q: Any, zero_point: Any, w: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Any:
    """sum (q - z) * w over the window of each output"""
    typed = None if zero_point is None else op.Cast(zero_point, to=q.dtype)
    pads = [*padding[-2::-2], *padding[-1::-2]]  # every begin, then every end; ours come last axis first
    return op.ConvInteger(q, w, typed, strides=list(stride), pads=pads, dilations=list(dilation), group=groups)


def convolve(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = (1,),
    padding: Any = (0,),
    dilation: Any = (1,),
    groups: int = 1,
) -> Any:
    """conv(x, w) + b; torch's own writes zeros in the place of no bias, those of a conv3d in a shape that is none"""
    dims = len(weight.shape) - 2
    stride, padding, dilation = (list(each) * (dims // len(each)) for each in (stride, padding, dilation))
    options = {"strides": stride, "pads": padding * 2, "dilations": dilation, "group": groups}
    return _in_batch(x, dims, lambda batch: op.Conv(batch, weight, bias, **options))


def _in_batch(x: Any, dims: int, function: Callable[[Any], Any]) -> Any:
    """function(x), which takes a batch; x may be a single sample"""
    if len(x.shape) > dims + 1:
        return function(x)
    first = op.Constant(value_ints=[0])
    return op.Squeeze(function(op.Unsqueeze(x, first)), first)


def average(
    x: Any,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    """y = sum of a window / its size, or divisor_override, which torch's own leaves out"""
    kernel, dims = list(kernel_size), len(kernel_size)
    count, divisor = math.prod(kernel), divisor_override
    if divisor is not None and ceil_mode:
        raise NotImplementedError("AveragePool has no divisor_override, and with ceil_mode its windows differ in size")
    x, options = _windows(x, kernel, stride, padding, [1] * dims, ceil_mode)
    options["count_include_pad"] = int(count_include_pad or divisor is not None)
    y = _in_batch(x, dims, lambda batch: op.AveragePool(batch, **options))
    return y if divisor is None else op.Mul(y, op.CastLike(_constant(count / divisor, ir.DataType.FLOAT), y))


def largest(
    x: Any,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = (0,),
    dilation: Any = (1,),
    ceil_mode: bool = False,
) -> Any:
    """y = max of a window"""
    dims = len(kernel_size)
    gaps = list(dilation) * (dims // len(dilation))
    x, options = _windows(x, list(kernel_size), stride, padding, gaps, ceil_mode)
    return _in_batch(x, dims, lambda batch: op.MaxPool(batch, dilations=gaps, **options)[0])


def _windows(
    x: Any, kernel: list[int], stride: Any, padding: Any, dilation: list[int], ceil_mode: bool
) -> tuple[Any, dict[str, Any]]:
    """What a pooling operator is to take, and its windows

    With ceil_mode torch leaves out a window that would begin in the padding behind, and ONNX does not: the padding, or
    the input where there is none, is made shorter by what only such a window would take.
    """
    dims, step = len(kernel), list(stride) or kernel
    begins, steps = (list(each) * (dims // len(each)) for each in (padding, step))
    ends, sizes = list(begins), x.shape[-dims:]
    for axis in range(dims if ceil_mode else 0):
        size, begin, gap = sizes[axis], begins[axis], steps[axis]
        count, rest = divmod(size + 2 * begin - dilation[axis] * (kernel[axis] - 1) - 1, gap)
        if rest and (count + 1) * gap >= size + begin:
            ends[axis] = max(begin - rest, 0)
            if rest > begin:
                x = _first(x, size + begin - rest, len(x.shape) - dims + axis)
    return x, {"kernel_shape": kernel, "strides": steps, "pads": [*begins, *ends], "ceil_mode": int(ceil_mode)}


def _first(x: Any, count: int, axis: int) -> Any:
    """So many of an axis; the exporter works out neither the shape nor the type of it"""
    y = op.Slice(x, *(op.Constant(value_ints=[place]) for place in (0, count, axis)))
    y.shape, y.dtype = ir.Shape([count if i == axis else size for i, size in enumerate(x.shape)]), x.dtype
    return y


def average_to_size(x: Any, output_size: Any) -> Any:
    """As many means as asked for along each axis, which torch's own has for one and two axes only"""
    sizes = x.shape[-len(output_size) :]
    if any(size % want for size, want in zip(sizes, output_size, strict=True)):
        raise NotImplementedError(
            f"ONNX has no pooling of windows that differ in size, as those from {tuple(sizes)} to {tuple(output_size)}"
        )
    return average(x, [size // want for size, want in zip(sizes, output_size, strict=True)])


def look_up_bags(
    weight: Any,
    indices: Any,
    offsets: Any,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[Any, ...]:
    """y[b] = the sum, mean or maximum of weight[i] over the indices i of bag b; zeros for an empty bag

    As products with a matrix of bags and indices: torch's own is a loop that few runtimes take.
    """
    last, end = op.Constant(value_ints=[-1]), op.Constant(value_ints=[2**62])
    rows, ends = op.Gather(weight, indices), op.Slice(offsets, op.Constant(value_ints=[1]), end)
    if include_last_offset:
        offsets = op.Slice(offsets, op.Constant(value_ints=[0]), last)
    else:
        ends = op.Concat(ends, op.Shape(indices), axis=0)
    places = op.Range(_constant(0, ir.DataType.INT64), op.Size(indices), _constant(1, ir.DataType.INT64))
    starts, ends = op.Unsqueeze(offsets, last), op.Unsqueeze(ends, last)
    inside = op.And(op.GreaterOrEqual(places, starts), op.Less(places, ends))
    if padding_idx is not None:
        padding_idx = padding_idx if padding_idx >= 0 else weight.shape[0] + padding_idx
        inside = op.And(inside, op.Not(op.Equal(indices, _constant(padding_idx, indices.dtype))))
    taken = op.CastLike(inside, weight)
    count = op.ReduceSum(taken, last, keepdims=1)
    if mode == _MAX:
        lowest = op.CastLike(_constant(-math.inf, ir.DataType.FLOAT), weight)
        y = op.ReduceMax(op.Where(op.Unsqueeze(inside, last), rows, lowest), op.Constant(value_ints=[1]), keepdims=0)
        y = op.Where(op.Equal(count, op.CastLike(_constant(0.0, ir.DataType.FLOAT), weight)), op.Sub(count, count), y)
    else:
        if per_sample_weights is not None:
            rows = op.Mul(rows, op.Unsqueeze(per_sample_weights, last))
        y = op.MatMul(taken, rows)
        if mode == _MEAN:
            y = op.Div(y, op.Max(count, op.CastLike(_constant(1.0, ir.DataType.FLOAT), weight)))
    return y, offsets, offsets, offsets  # the rest is for the gradient


_OURS = (fake_quantize, quantize, dequantize, integer_matmul, integer_matmul_by_groups, integer_conv)
_ATEN = torch.ops.aten
TABLE: dict[Callable[..., Any], Callable[..., Any]] = {
    getattr(torch.ops.lowbit, function.__name__).default: function for function in _OURS
} | {
    **dict.fromkeys((_ATEN.conv1d.default, _ATEN.conv2d.default, _ATEN.conv3d.default), convolve),
    **dict.fromkeys((_ATEN.avg_pool1d.default, _ATEN.avg_pool2d.default, _ATEN.avg_pool3d.default), average),
    **dict.fromkeys((_ATEN.max_pool1d.default, _ATEN.max_pool2d.default, _ATEN.max_pool3d.default), largest),
    _ATEN._adaptive_avg_pool3d.default: average_to_size,  # noqa: SLF001
    _ATEN.embedding_bag.padding_idx: look_up_bags,
}
