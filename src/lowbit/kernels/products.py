"""Products of codes: sums in int32, which are exact, and then scales and bias in one order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from lowbit.granularity import Granularity, PerChannel, PerGroup, PerTensor, PerToken
from lowbit.grid import Grid
from lowbit.kernels import float_products, native_products, plan
from lowbit.kernels.linear_codes import LEAST_GROUP, LEAST_GROUP_WITH_ZERO, LinearCodes
from lowbit.kernels.nan import mark_nan, may_hold_nan
from lowbit.kernels.precision import math_dtype
from lowbit.packing import unpack
from lowbit.ste import SteKind
from lowbit.tracing import at_trace_time, opaque

if TYPE_CHECKING:
    from lowbit.kernels.triton_linear import LinearStep


def int_mm(x: Tensor, w: Tensor) -> Tensor:
    """x @ w in int32"""
    if 0 in (*x.shape, w.shape[1]):
        return torch.zeros(x.shape[0], w.shape[1], dtype=torch.int32, device=x.device)
    if x.is_cuda:
        return _int_mm_on_gpu(x, w)
    if is_exact():
        return _int_mm(x, w)
    return 2 * _int_mm(x, w >> 1) + _int_mm(x, w & 1)  # weights of 7 bits and of 1, which do not saturate


@cache
def is_exact() -> bool:
    """Whether torch's product is, on this CPU: without VNNI, oneDNN adds two products in 16 bits, which saturate"""
    ends, at = torch.tensor([-128, 127], dtype=torch.int8, device="cpu"), torch.arange(64 * 32, device="cpu")
    x, w = ends[at // 3 % 2].view(32, 64), ends[at // 5 % 2].view(64, 32)
    return torch.equal(_int_mm(x, w).long(), x.long() @ w.long())


@at_trace_time
def refusal(device: str, index: int | None, inner: int) -> str:
    """Why a device has no product of rows of codes that is faster than one of floats; "" where it has"""
    if device == "cpu":
        return "" if _is_fast_on_cpu() else "oneDNN's product of int8 is not exact on this CPU, or switched off"
    if device != "cuda" or plan.absence("triton"):
        return plan.absence("triton") if device == "cuda" else f"there is no product of codes on {device}"
    from lowbit.kernels import triton_products  # half a second, which only users of a GPU should spend

    return triton_products.device_refusal(index) or triton_products.row_refusal(inner)


def _is_fast_on_cpu() -> bool:
    return torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled) and is_exact()


def _int_mm(x: Tensor, w: Tensor) -> Tensor:
    by_columns = w.t().is_contiguous() and 1 not in w.shape
    return torch._int_mm(_by_rows(x), w if by_columns else _by_rows(w))  # noqa: SLF001


def _int_mm_on_gpu(x: Tensor, w: Tensor) -> Tensor:
    """Its kernel wants more than 16 rows, multiples of 8, and w column by column."""
    (rows, inner), columns = x.shape, w.shape[1]
    x = functional.pad(x, (0, -inner % 8, 0, max(24 - rows, -rows % 8)))
    w = functional.pad(w.t(), (0, -inner % 8, 0, -columns % 8))
    return torch._int_mm(_by_rows(x), _by_rows(w).t())[:rows, :columns]  # noqa: SLF001


def _row_sums(q: Tensor) -> Tensor:
    """sum_k q[n, k] in int32; torch would make a copy in int32 first on a GPU"""
    if plan.runs("triton", q):
        from lowbit.kernels import triton_products  # half a second, which only users of a GPU should spend

        return triton_products.row_sums(q)
    return q.sum(1, dtype=torch.int32)


def _by_rows(x: Tensor) -> Tensor:
    """x, row by row: torch's CPU kernel writes nothing where an axis of one has a stride that is not the usual one"""
    return x.contiguous().view(-1).view(x.shape)


def to_sums(values: Tensor) -> Tensor:
    """Sums of integers that were added up as float64, in int32; a GPU may come near to them by a transform"""
    return values.round().to(torch.int32)


def scaled_product(
    q_x: Tensor,
    q_w: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    zero_point: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """y[m, n] = float(sum_k (q_x[m, k] - z[m]) * q_w[n, k]) * (s_x[m] * s_w[n]) + b[n]

    int8 codes; scales and zero points are one number, or one for each row. Each float step is rounded once, in float32
    (float64 for float64), as ``lowbit.nn.products`` has it. With a scale for each group g of w's rows, it is
    y[m, n] = (sum_g float(sum_k (q_x[m, k] - z[m]) * q_w[n, k]) * s_w[n, g]) * s_x[m] + b[n], or the product of values,
    where groups are so short that this is faster.
    """
    wide = math_dtype(dtype)
    inner = group = q_w.shape[1]
    if w_scale.dim() == 2:
        group = inner // w_scale.shape[1]
        if not multiplies_groups(q_w.device.type, inner, group, zero_point is not None):
            return _product_of_values(q_x, q_w, x_scale, w_scale, zero_point, bias, dtype)
        w_scale = w_scale.squeeze(1)  # of groups that are whole rows
    columns = None if zero_point is None else _row_sums(q_w.view(-1, group))
    bias = None if bias is None else bias.contiguous()
    scales = x_scale.to(wide), w_scale.to(wide)
    if plan.runs("triton", q_x):
        from lowbit.kernels import triton_products  # half a second, which only users of a GPU should spend

        if not triton_products.refusal(q_x, q_w, scales[1]):
            return triton_products.scaled_product(q_x, q_w, *scales, zero_point, columns, bias, dtype)
    if w_scale.dim() == 2:
        return _product_of_groups(q_x, q_w, *scales, zero_point, bias, dtype)
    sums, bias = int_mm(q_x, q_w.t()), None if bias is None else bias.to(wide)
    if plan.runs("native", sums):
        return native_products.scale_sums(sums, *scales, zero_point, columns, bias, dtype)
    if zero_point is not None and columns is not None:
        sums = sums - (zero_point.view(-1, 1) if zero_point.dim() else zero_point).to(torch.int32) * columns
    x_scale, w_scale = scales
    y = sums.to(wide) * ((x_scale.view(-1, 1) if x_scale.dim() else x_scale) * w_scale)
    return (y if bias is None else y + bias).to(dtype)


def _product_of_values(
    q_x: Tensor,
    q_w: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    zero_point: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """y = x @ w^T + b of the values of both, in this dtype"""
    per: Granularity = PerToken() if x_scale.dim() else PerTensor()
    zero_point = None if zero_point is None else zero_point.expand(x_scale.shape)
    x = plan.run("dequantize", q_x, q_x, x_scale, zero_point, per=per, dtype=dtype)
    groups = PerGroup(q_w.shape[1] // w_scale.shape[1])
    w = plan.run("dequantize", q_w, q_w, w_scale, None, per=groups, dtype=dtype)
    return float_products.linear(x, w, None if bias is None else bias.to(dtype))


def _product_of_groups(
    q_x: Tensor,
    q_w: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    zero_point: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """The product of each group, and their sum"""
    wide, one = w_scale.dtype, torch.ones((), dtype=w_scale.dtype, device=q_x.device)
    groups = zip(*(codes.chunk(w_scale.shape[1], 1) for codes in (q_x, q_w)), w_scale.unbind(1), strict=True)
    y = torch.zeros((), dtype=wide, device=q_x.device)
    for x_part, w_part, scale in groups:
        part = scaled_product(x_part, w_part.contiguous(), one, scale.contiguous(), zero_point, dtype=wide)
        y = part.add_(y)
    y *= x_scale.view(-1, 1) if x_scale.dim() else x_scale
    return (y if bias is None else y.add_(bias)).to(dtype)


def _fake_scaled_product(q_x: Tensor, q_w: Tensor, *_: Any, dtype: torch.dtype) -> Tensor:
    return q_x.new_empty((q_x.shape[0], q_w.shape[0]), dtype=dtype)


opaque("scaled_product", scaled_product, _fake_scaled_product)


def column_sums(g: Tensor, dtype: torch.dtype) -> Tensor:
    """sum_m g[m, n] in this dtype, added up in float32 (float64 for float64)"""
    plain = not (plan.is_traced(g) or torch.is_grad_enabled()) and g.dtype != torch.float64
    if plain and plan.runs("triton", g):
        from lowbit.kernels import triton_linear  # half a second, which only users of a GPU should spend

        if g.shape[1] <= triton_linear.WIDEST:
            return triton_linear.column_sums(g, dtype)
    if torch.compiler.is_compiling() and g.device.type == "cpu" and plan.is_plain(g) and plan.can_be_opaque("native"):
        return torch.ops.lowbit.column_sums(g, dtype)  # a compiler would go down one column after another
    return _sum_columns(g, dtype)


def _sum_columns(g: Tensor, dtype: torch.dtype) -> Tensor:
    return g.sum(0, dtype=math_dtype(g.dtype)).to(dtype)


def _fake_sum_columns(g: Tensor, dtype: torch.dtype) -> Tensor:
    return g.new_empty(g.shape[1], dtype=dtype)


opaque("column_sums", _sum_columns, _fake_sum_columns)


def linear_step(
    x: Tensor,
    w: Tensor,
    x_grid: Grid,
    w_grid: Grid | None,
    dtype: torch.dtype,
    *,
    group: int | None = None,
    ste: SteKind | None = None,
) -> LinearStep | None:
    """The step for x and w with scales of their own rows, or of groups of w's; w is coded before where it has no grid

    With a rule for x, that has one scale, which is kept, and w has no groups. None where no backend has such a step.
    """
    outputs, inner = w.shape
    if not plan.runs("triton", x) or not (w.is_contiguous() and w.numel()) or torch.float64 in (x.dtype, w.dtype):
        return None
    if x.shape[-1] != inner or (group is not None and (inner % group or ste is not None)):
        return None
    from lowbit.kernels import triton_linear  # half a second, which only users of a GPU should spend

    if triton_linear.refusal(inner, outputs, x.device):
        return None
    sizes = x.numel() // inner, outputs, inner, group
    return triton_linear.linear_step(*sizes, x_grid, w_grid, ste, dtype, x.device)


@at_trace_time
def has_linear_step(device: str, index: int | None, inner: int, outputs: int) -> bool:
    """Whether there is a step for rows this long, also as an op of code that is being compiled"""
    if device != "cuda" or not plan.can_be_opaque("triton"):
        return False
    from lowbit.kernels import triton_linear  # half a second, which only users of a GPU should spend

    return not triton_linear.refusal(inner, outputs, torch.device(device if index is None else f"{device}:{index}"))


@at_trace_time
def multiplies_groups(device: str, inner: int, group: int, has_zero: bool) -> bool:
    """Whether codes with a scale for each group of w's rows, of ``inner`` codes, are multiplied faster than values"""
    if group == inner or device != "cuda":
        return group >= min(inner, LEAST_GROUP)
    if group < (LEAST_GROUP_WITH_ZERO if has_zero else LEAST_GROUP) or plan.absence("triton"):
        return False
    from lowbit.kernels import triton_products  # half a second, which only users of a GPU should spend

    return triton_products.has_groups(group)


def _opaque_linear_step(
    x: Tensor, w: Tensor, bias: Tensor | None, x_grid: Sequence[int], w_grid: Sequence[int], dtype: torch.dtype
) -> list[Tensor]:
    w = w.contiguous()
    step = linear_step(x, w, plan.decode_grid(x_grid), plan.decode_grid(w_grid), dtype)
    assert step is not None
    y, codes = step.forward(x.contiguous(), w, None if bias is None else bias.contiguous())
    return [y, *(code for code in codes if code is not None)]


def _fake_linear_step(
    x: Tensor, w: Tensor, _bias: Tensor | None, _x_grid: Sequence[int], _w_grid: Sequence[int], dtype: torch.dtype
) -> list[Tensor]:
    (outputs, inner), rows = w.shape, x.numel() // x.shape[-1]
    results = [x.new_empty((*x.shape[:-1], outputs), dtype=dtype)]
    for size in (rows, outputs):
        results += [x.new_empty((size, inner), dtype=torch.int8), x.new_empty(size, dtype=torch.float32)]
    return results


opaque("linear_step", _opaque_linear_step, _fake_linear_step)


def _opaque_linear_values(
    g: Tensor, codes: Sequence[Tensor], of_x: bool, of_w: bool, bias: torch.dtype | None
) -> list[Tensor]:
    from lowbit.kernels import triton_linear

    (rows, outputs), inner = g.shape, codes[0].shape[1]
    step = triton_linear.linear_step(rows, outputs, inner, None, Grid(8), None, None, g.dtype, g.device)
    found = step.decode(g.contiguous(), LinearCodes(*codes), of_x, of_w, bias)
    return [tensor for tensor in found if tensor is not None]


def _fake_linear_values(
    g: Tensor, codes: Sequence[Tensor], of_x: bool, of_w: bool, bias: torch.dtype | None
) -> list[Tensor]:
    asked = [q for q, wanted in ((codes[0], of_x), (codes[2], of_w)) if wanted]
    results = [torch.empty_like(q, dtype=g.dtype) for q in asked]
    return results if bias is None else [*results, g.new_empty(g.shape[1], dtype=bias)]


opaque("linear_values", _opaque_linear_values, _fake_linear_values)


def code_rows(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, *, grid: Grid, per: Granularity, ste: SteKind | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The codes of x, contiguous; a bit for each that the rule, if given, passes a gradient to; and, unless x holds no
    NaN, which codes do not know, the scales, NaN for those that have one: one scale for all becomes one for each row.
    """
    traced = plan.is_traced(x)
    if traced and x.numel() and plan.is_opaque("quantize", x):  # else each of the kernels below would have a copy of x
        encoded = plan.encode(grid, per, ste or SteKind.IDENTITY)
        q, marked, *bits = torch.ops.lowbit.code_rows(x, scale, zero_point, *encoded)
        return q, bits[0] if bits else None, marked
    by_row = per in (PerTensor(), PerToken()) or (per == PerChannel(0) and x.dim() == 2)
    if not traced and by_row and plan.runs("triton", x) and x.shape[-1] % 8 == 0:
        from lowbit.kernels import triton  # half a second, which only users of a GPU should spend

        return triton.code_rows(x, scale, zero_point, grid, ste)
    params = x, x, scale, zero_point
    q = plan.run("quantize", *params, grid=grid, per=per, dtype=torch.int8)
    bits = None if ste is None else plan.run("gradient_bits", *params, grid=grid, per=per, ste=ste)
    marked = None
    if x.numel() and (x.is_cuda or traced or may_hold_nan(x)):
        if per == PerTensor():
            scale, per = scale.expand(x.shape[:-1]), PerToken()
        marked = mark_nan(scale, x, per=per)
    return q, bits, marked


def _opaque_code_rows(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, numbers: Sequence[int], per: str, ste: str
) -> list[Tensor]:
    grid, by, rule = plan.decode(tuple(numbers), per, ste)
    clips = rule is not SteKind.IDENTITY
    q, bits, marked = code_rows(x, scale, zero_point, grid=grid, per=by, ste=rule if clips else None)
    if marked is None:
        marked = (scale.expand(x.shape[:-1]) if by == PerTensor() else scale).clone()
    return [q, marked] if bits is None else [q, marked, bits]


def _fake_code_rows(
    x: Tensor, scale: Tensor, _zero_point: Tensor | None, _numbers: Sequence[int], per: str, ste: str
) -> list[Tensor]:
    rows = x.shape[:-1] if per == PerTensor.__name__ else scale.shape
    results = [torch.empty_like(x, dtype=torch.int8), scale.new_empty(rows)]
    bits = [] if ste == SteKind.IDENTITY.value else [x.new_empty(-(-x.numel() // 8), dtype=torch.uint8)]
    return results + bits


opaque("code_rows", _opaque_code_rows, _fake_code_rows)


def code_weights(weights: Sequence[Tensor], grid: Grid) -> list[tuple[Tensor, Tensor]]:
    """Of each weight the codes by the range of its rows, and their scales; on a GPU, one launch for all

    Weights are contiguous matrices of one dtype.
    """
    if plan.runs("triton", weights[0]):
        from lowbit.kernels import triton, triton_launch  # half a second, which only users of a GPU should spend

        if max(weight.shape[1] for weight in weights) <= triton_launch.ONE_READ:
            return triton.code_weights(weights, grid)
    runs = (plan.run("quantize_per_batch", w, w, grid=grid, per=PerChannel(0), symmetric=True) for w in weights)
    return [(q, scale) for q, scale, _ in runs]


def select(grad_output: Tensor, bits: Tensor) -> Tensor:
    """grad_output where its bit is set, else 0"""
    if not (torch.is_grad_enabled() or plan.is_traced(grad_output)):
        if plan.runs("native", grad_output):
            return native_products.select(grad_output, bits)
        if plan.runs("triton", grad_output):
            from lowbit.kernels import triton

            return triton.select(grad_output, bits)
    if plan.is_opaque("fake_quantize_backward", grad_output):
        return torch.ops.lowbit.select(grad_output, bits)
    return torch.where(unpack(bits, 1, torch.uint8, grad_output.shape).to(torch.bool), grad_output, 0.0)


def selected_product(g: Tensor, w: Tensor, bits: Tensor) -> Tensor:
    """g @ w where its bit is set, else 0; nothing is traced"""
    if plan.runs("triton", g):
        from lowbit.kernels import triton_products

        if triton_products.selects(g, w):
            return triton_products.selected_product(g, w, bits)
    return select(g @ w, bits)


def _fake_select(grad_output: Tensor, _bits: Tensor) -> Tensor:
    return torch.empty_like(grad_output, memory_format=torch.contiguous_format)


opaque("select", select, _fake_select)
