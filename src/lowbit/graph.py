"""Ops that stay whole in an exported graph, where an exporter finds them: each is one formula of ``functional``.

Scales are those of ``Granularity.blocks``: of ``axis`` (None: one for all), along it one for each ``block`` elements
(0: one for each index).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import lowbit.functional as F  # noqa: N812
from lowbit.granularity import Granularity, PerChannel, PerGroup, PerTensor
from lowbit.grid import Grid
from lowbit.kernels import plan
from lowbit.kernels.products import int_mm, to_sums

_LIBRARY = torch.library.Library("lowbit", "DEF")


def _define(schema: str, run: Any, fake: Any) -> Any:
    """An op: what it computes, and of what shape and dtype."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"lowbit::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.lowbit, name).default


def _per(axis: int | None, block: int) -> Granularity:
    if axis is None:
        return PerTensor()
    return PerGroup(block) if block else PerChannel(axis)


def _grid(quant_min: int, quant_max: int) -> Grid:
    """The grid with these ends."""
    if quant_min == 0:
        return Grid(quant_max.bit_length(), signed=False)
    return Grid(quant_max.bit_length() + 1, narrow=quant_min == -quant_max)


def _code_dtype(quant_min: int, quant_max: int) -> torch.dtype:
    if quant_max > 255:
        return torch.int32
    return torch.int8 if quant_min < 0 else torch.uint8


def _fake_quantize(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    quant_min: int,
    quant_max: int,
    axis: int | None,
    block: int,
    clips: bool,
    name: str,
) -> Tensor:
    return F.fake_quantize(x, scale, zero_point, grid=_grid(quant_min, quant_max), per=_per(axis, block))


def _quantize(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    quant_min: int,
    quant_max: int,
    axis: int | None,
    block: int,
    clips: bool,
    name: str,
) -> Tensor:
    grid, dtype = _grid(quant_min, quant_max), _code_dtype(quant_min, quant_max)
    return F.quantize(x, scale, zero_point, grid=grid, per=_per(axis, block), dtype=dtype)


def _dequantize(
    q: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int | None, block: int, dtype: torch.dtype
) -> Tensor:
    # Unlike F.dequantize, this takes the scale 0 of a binary weight that is all zeros.
    return plan.run("dequantize", q, q, scale, zero_point, per=_per(axis, block), dtype=dtype)


def _like_x(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x)


def _codes_of_x(x: Tensor, scale: Tensor, zero_point: Tensor | None, low: int, high: int, *rest: Any) -> Tensor:
    return torch.empty_like(x, dtype=_code_dtype(low, high))


def _values_of_q(
    q: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int | None, block: int, dtype: torch.dtype
) -> Tensor:
    return torch.empty_like(q, dtype=dtype)


_QUANTIZER = (
    "(Tensor x, Tensor scale, Tensor? zero_point, int quant_min, int quant_max, int? axis, int block, bool clips, "
    "str name) -> Tensor"
)

# y = (q - z) * s,  q = clamp(round(x / s) + z, quant_min, quant_max);  ``clips``: whether the clamp may change anything
fake_quantize = _define(f"fake_quantize{_QUANTIZER}", _fake_quantize, _like_x)

# q = clamp(round(x / s) + z, quant_min, quant_max), as int8, uint8 or int32
quantize = _define(f"quantize{_QUANTIZER}", _quantize, _codes_of_x)

# y = (q - z) * s, in ``dtype``
dequantize = _define(
    "dequantize(Tensor q, Tensor scale, Tensor? zero_point, int? axis, int block, ScalarType dtype) -> Tensor",
    _dequantize,
    _values_of_q,
)


def _shifted(q: Tensor) -> tuple[Tensor, int]:
    """q as int8, and what to add to it: q itself, or what is left of a uint8 after 128"""
    return (q, 0) if q.dtype == torch.int8 else ((q.to(torch.int16) - 128).to(torch.int8), 128)


def _matmul(q: Tensor, zero_point: Tensor | None, w: Tensor, weight_zero_point: Tensor | None) -> Tensor:
    rows, columns = q.shape[-1], w.shape[-1]
    x, x_offset = _shifted(q.reshape(-1, rows))
    v, w_offset = _shifted(w)
    total = int_mm(x, v)
    # sum (x + a) (v + b) = sum x v + a sum v + b sum x + K a b,  a = offset - z of the rows, b = that of the columns
    a = torch.full((), x_offset, dtype=torch.int32, device=q.device)
    if zero_point is not None:
        a = a - (zero_point.reshape(-1, 1) if zero_point.dim() else zero_point)
    b = torch.full((), w_offset, dtype=torch.int32, device=q.device)
    if weight_zero_point is not None:
        b = b - weight_zero_point
    total = total + a * v.sum(0, dtype=torch.int32) + b * x.sum(1, dtype=torch.int32, keepdim=True) + rows * a * b
    return total.to(torch.int32).view(*q.shape[:-1], columns)


def _matmul_fake(q: Tensor, zero_point: Tensor | None, w: Tensor, weight_zero_point: Tensor | None = None) -> Tensor:
    return q.new_empty((*q.shape[:-1], w.shape[-1]), dtype=torch.int32)


# sum_k (q[..., k] - z) * (w[k, n] - z_w[n]), in int32;  z is one number, or one for each row
integer_matmul = _define(
    "integer_matmul(Tensor q, Tensor? zero_point, Tensor w, Tensor? weight_zero_point) -> Tensor",
    _matmul,
    _matmul_fake,
)


def _matmul_by_groups(q: Tensor, zero_point: Tensor | None, w: Tensor) -> Tensor:
    return torch.stack([_matmul(part, zero_point, matrix, None) for part, matrix in zip(q, w, strict=True)])


# sum_k (q[g, ..., k] - z) * w[g, k, n], in int32, for each group g
integer_matmul_by_groups = _define(
    "integer_matmul_by_groups(Tensor q, Tensor? zero_point, Tensor w) -> Tensor",
    _matmul_by_groups,
    _matmul_fake,
)


def _windows(q: Tensor, kernel: list[int], stride: list[int], dilation: list[int]) -> Tensor:
    """(batch, channels, positions of the kernel, positions of the result)"""
    sizes = _outputs(q.shape[2:], kernel, stride, dilation)
    parts = []
    for place in torch.cartesian_prod(*(torch.arange(k) for k in kernel)).view(-1, len(kernel)).tolist():
        window = q
        for axis, (at, step, gap, size) in enumerate(zip(place, stride, dilation, sizes, strict=True), 2):
            window = window[(slice(None),) * axis + (slice(at * gap, at * gap + step * (size - 1) + 1, step),)]
        parts.append(window)
    return torch.stack(parts, 2).flatten(3)


def _outputs(shape: Any, kernel: list[int], stride: list[int], dilation: list[int]) -> list[Any]:
    sizes = zip(shape, kernel, stride, dilation, strict=True)
    return [(size - gap * (k - 1) - 1) // step + 1 for size, k, step, gap in sizes]


def _conv(
    q: Tensor,
    zero_point: Tensor | None,
    w: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    """Zeros around x are codes z around q."""
    kernel = list(w.shape[2:])
    if groups > 1:
        return _conv_double(q, zero_point, w, stride, padding, dilation, groups)
    q = functional.pad(q, padding, value=0 if zero_point is None else int(zero_point)) if any(padding) else q
    windows = _windows(q, kernel, stride, dilation)  # (batch, channels, kernel, out)
    flat = windows.permute(0, 3, 1, 2).flatten(2)
    total = _matmul(flat, zero_point, w.flatten(1).t(), None).transpose(1, 2).contiguous()
    return total.view(q.shape[0], w.shape[0], *_outputs(q.shape[2:], kernel, stride, dilation))


def _conv_double(
    q: Tensor,
    zero_point: Tensor | None,
    w: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    """The same in float64, which holds every sum of products of codes exactly."""
    x = q.double()
    if zero_point is not None:
        x = x - zero_point
    convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[q.dim() - 3]
    options: Any = {"stride": stride, "dilation": dilation, "groups": groups}
    return to_sums(convolve(functional.pad(x, padding), w.double(), **options)).contiguous()


def _conv_fake(
    q: Tensor,
    zero_point: Tensor | None,
    w: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    pairs = list(zip(padding[::2], padding[1::2], strict=True))[::-1]
    padded = [size + before + after for size, (before, after) in zip(q.shape[2:], pairs, strict=True)]
    sizes = _outputs(padded, list(w.shape[2:]), stride, dilation)
    return q.new_empty((q.shape[0], w.shape[0], *sizes), dtype=torch.int32)


# sum (q - z) * w over the window of each output, in int32;  ``padding`` as functional.pad takes it, of zeros
integer_conv = _define(
    "integer_conv(Tensor q, Tensor? zero_point, Tensor w, int[] stride, int[] padding, int[] dilation, int groups)"
    " -> Tensor",
    _conv,
    _conv_fake,
)
