"""Fused CUDA kernels: each reads its tensors once and writes its results once.

A program takes a tile of the dense memory whose scale follows from its row or from its column (see Tiling), so that
what depends on the scale alone is computed once and broadcast. Nothing is contracted (``enable_fp_fusion=False``),
nothing is atomic, nothing waits for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.grid import Grid
from lowbit.kernels import triton_launch
from lowbit.kernels.signature import Signature
from lowbit.kernels.triton_formulas import (
    by_own_params,
    codes_of_rows,
    collapsed,
    divided,
    ends_of,
    gradient_of,
    inverse_of,
    is_in_range,
    narrowed,
    params_of,
    quotient_of,
    rounded,
    row_params,
    slope_of,
    widened,
)
from lowbit.kernels.triton_rows import code_row
from lowbit.ste import SteKind

ACCUMULATOR: torch.dtype | None = None


# The backend (see plan.py).

absence, refusal, workspace_size = triton_launch.absence, triton_launch.refusal, triton_launch.workspace_size


def kernel(signature: Signature) -> Callable[..., Any]:
    """The op's function for tensors of this signature."""
    return triton_launch.kernel(signature, _KERNELS)


# The walk over memory. ``geometry`` is Tiling.arguments().


@triton.jit
def _place(
    rows, units, chunks, tiles, period, channels, inner,
    by_row: tl.constexpr, single: tl.constexpr, plain: tl.constexpr, ordered: tl.constexpr, wide: tl.constexpr,
    unit: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr, steps: tl.constexpr,
):  # fmt: skip
    """Where this program's strip lies

    Its first element and the way to the next tile; a tile's offsets, row and column indices, and how many rows and
    columns are left; for each of its rows, or columns, the scale group and the slot of the partial result.
    """
    pid = tl.program_id(0)
    if wide:
        pid = pid.to(tl.int64)
    columns = units * unit
    down, across = tl.arange(0, block_rows)[:, None], tl.arange(0, block_columns)[None, :]
    if by_row:
        # A single row: said so that the compiler sees the alignment of what follows.
        chunk = pid if single else pid % chunks
        row = 0 * pid if single else pid // chunks * block_rows
        column = chunk * (steps * block_columns)
        base = column if single else row * columns + column
        stride = block_columns
        if plain:
            group = row + down
        elif ordered:
            group = row // period * channels + row % channels + down
        else:
            group = (row + down) // period * channels + (row + down) % channels
        slot = (row + down) * chunks + chunk
    else:
        strip = pid // tiles
        row, column = strip % chunks * (steps * block_rows), pid % tiles * block_columns
        outer = strip // chunks
        base = (outer * rows + row) * columns + column
        stride = block_rows * columns
        group = outer * channels + (column + across) // inner % channels
        slot = strip * columns + column + across
    offsets = across if block_rows == 1 else down * columns + across
    return base, stride, offsets, down, across, rows - row, columns - column, group, slot


@triton.jit
def _load(ptr, inside, other, even: tl.constexpr):
    return tl.load(ptr) if even else tl.load(ptr, mask=inside, other=other)


@triton.jit
def _store(ptr, value, inside, even: tl.constexpr):
    value = narrowed(value, ptr.dtype.element_ty)
    if even:
        tl.store(ptr, value)
    else:
        tl.store(ptr, value, mask=inside)


@triton.jit
def _map(
    y_ptr, g_ptr, x_ptr, s_ptr, z_ptr, ds_ptr, dz_ptr,
    rows, units, chunks, tiles, period, channels, inner,
    by_row: tl.constexpr, single: tl.constexpr, plain: tl.constexpr, ordered: tl.constexpr, wide: tl.constexpr,
    unit: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr, steps: tl.constexpr,
    even: tl.constexpr, op: tl.constexpr, rule: tl.constexpr,
    quant_min, quant_max, double: tl.constexpr, fused: tl.constexpr,
):  # fmt: skip
    """y = the formula of ``op``, element by element; ds and dz, where asked for, summed over the program's strip"""
    math: tl.constexpr = tl.float64 if double else tl.float32
    learned: tl.constexpr = op == "lsq" or op == "pact"
    base, stride, offsets, down, across, rows_left, columns_left, group, slot = _place(
        rows, units, chunks, tiles, period, channels, inner,
        by_row, single, plain, ordered, wide, unit, block_rows, block_columns, steps,
    )  # fmt: skip
    known = down < rows_left if by_row else across < columns_left
    # A strip of one tile asks for its data before the scale, whose arithmetic would hold them up.
    ahead: tl.constexpr = steps == 1
    inside = (down < rows_left) & (across < columns_left)
    if ahead:
        raw = _load(x_ptr + base + offsets, inside, 0, even)
        g = None if g_ptr is None else _load(g_ptr + base + offsets, inside, 0, even)
    s = _load(s_ptr + group, known, 1.0, even).to(math)
    z = tl.zeros_like(s) if z_ptr is None else _load(z_ptr + group, known, 0, even).to(math)
    low, high, inverse = quant_min - z, quant_max - z, inverse_of(s, fused)
    if learned:
        ds, dz = tl.zeros((block_rows, block_columns), math), tl.zeros((block_rows, block_columns), math)
    for _ in range(steps):
        if not ahead:
            inside = (down < rows_left) & (across < columns_left)
            raw = _load(x_ptr + base + offsets, inside, 0, even)
            g = None if g_ptr is None else _load(g_ptr + base + offsets, inside, 0, even)
        x = widened(raw, math).to(math)
        if op == "fake_quantize":
            y = rounded(quotient_of(x, s, inverse, low, high, fused), double) * s
        elif op == "quantize":
            y = rounded(quotient_of(x, s, inverse, low, high, fused), double)
            if y_ptr.dtype.element_ty.is_int():
                y = tl.where(x == x, y, 0.0)
            y = y + z
            if y_ptr.dtype.element_ty.is_int():
                y = y.to(tl.int32)
        elif op == "dequantize":
            y = (x - z) * s
        elif op == "dequantize_backward":
            y = x * s
        elif op == "quantize_backward":
            y = tl.where(is_in_range(x, s, inverse, low, high, double, fused), divided(widened(g, math), s), 0.0)
        else:
            y = gradient_of(g, x, s, inverse, low, high, rule, double, fused)
        _store(y_ptr + base + offsets, y, inside, even)
        if learned:
            slope, outside = slope_of(x, s, inverse, low, high, op, double, fused)
            ds = tl.fma(widened(g, math).to(math), slope, ds)
            dz += tl.where(outside, widened(g, math).to(math), 0.0)
        base += stride
        if by_row:
            columns_left -= block_columns
        else:
            rows_left -= block_rows
    if learned:
        _store(ds_ptr + slot, tl.sum(ds, 1 if by_row else 0, keep_dims=True), known, even)
        _store(dz_ptr + slot, -s * tl.sum(dz, 1 if by_row else 0, keep_dims=True), known, even)


@triton.jit
def _join(a, b, c, d, kind: tl.constexpr):
    """The reduction of ``kind``, of two pairs"""
    if kind == "sum":
        a, b = a + c, b + d
    elif kind == "abs_max" or kind == "symmetric":
        a = tl.maximum(a, c)
    else:
        a, b = tl.minimum(a, c), tl.maximum(b, d)
    return a, b


@triton.jit
def _reduce(
    x_ptr, a_ptr, b_ptr,
    rows, units, chunks, tiles, period, channels, inner,
    by_row: tl.constexpr, single: tl.constexpr, plain: tl.constexpr, ordered: tl.constexpr, wide: tl.constexpr,
    unit: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr, steps: tl.constexpr,
    even: tl.constexpr, kind: tl.constexpr, last: tl.constexpr,
    quant_min, quant_max, double: tl.constexpr, fused: tl.constexpr,
):  # fmt: skip
    """The statistics of the program's strip; where no other program shares its groups, the results themselves"""
    math: tl.constexpr = tl.float64 if double else tl.float32
    base, stride, offsets, down, across, rows_left, columns_left, _, slot = _place(
        rows, units, chunks, tiles, period, channels, inner,
        by_row, single, plain, ordered, wide, unit, block_rows, block_columns, steps,
    )  # fmt: skip
    known = down < rows_left if by_row else across < columns_left
    a, b = ends_of(tl.full((block_rows, block_columns), float("nan"), math), known, kind, True)
    for _ in range(steps):
        inside = (down < rows_left) & (across < columns_left)
        c, d = ends_of(widened(_load(x_ptr + base + offsets, inside, 0, even), math), inside, kind, even)
        a, b = _join(a, b, c, d, kind)
        base += stride
        if by_row:
            columns_left -= block_columns
        else:
            rows_left -= block_rows
    a, b = collapsed(a, b, 1 if by_row else 0, kind)
    if last:
        a, b = params_of(a, b, kind, quant_min, quant_max, double)
    _store(a_ptr + slot, a, known, even)
    if b_ptr is not None:
        _store(b_ptr + slot, b, known, even)


@triton.jit
def _gather(
    a_ptr, b_ptr, groups, repeats, channels, inner,
    kind: tl.constexpr, block: tl.constexpr, block_groups: tl.constexpr, rounds: tl.constexpr, wide: tl.constexpr,
    double: tl.constexpr,
):  # fmt: skip
    """This program's groups, which of them there are, and what the reduction of ``kind`` makes of their partial results
    [outer, repeats, channels, inner]
    """
    math: tl.constexpr = tl.float64 if double else tl.float32
    group = tl.program_id(0) * block_groups + tl.arange(0, block_groups)[None, :]
    known = group < groups
    if wide:
        group = group.to(tl.int64)
    first = group // channels * (repeats * channels * inner) + group % channels * inner
    if kind == "sum":
        a, b = tl.zeros((block, block_groups), math), tl.zeros((block, block_groups), math)
    else:
        a, b = ends_of(tl.full((block, block_groups), float("nan"), math), known, kind, True)
    for turn in range(rounds):
        index = turn * block + tl.arange(0, block)[:, None]
        offsets = first + index // inner * (channels * inner) + index % inner
        inside = known & (index < repeats * inner)
        if kind == "sum" or kind == "abs_max" or kind == "symmetric":
            c = tl.load(a_ptr + offsets, mask=inside, other=0.0)
            d = c if b_ptr is None else tl.load(b_ptr + offsets, mask=inside, other=0.0)
        else:
            c = tl.load(a_ptr + offsets, mask=inside, other=float("inf"))
            d = tl.load(b_ptr + offsets, mask=inside, other=float("-inf"))
        a, b = _join(a, b, c, d, kind)
    a, b = collapsed(a, b, 0, kind)
    return group, known, a, b


@triton.jit
def _finish(
    y_ptr, z_ptr, a_ptr, b_ptr, groups, repeats, channels, inner,
    kind: tl.constexpr, block: tl.constexpr, block_groups: tl.constexpr, rounds: tl.constexpr, wide: tl.constexpr,
    double: tl.constexpr, quant_min, quant_max,
):  # fmt: skip
    """The results of each group, from its partial results"""
    group, known, a, b = _gather(
        a_ptr, b_ptr, groups, repeats, channels, inner, kind, block, block_groups, rounds, wide, double
    )  # fmt: skip
    a, b = params_of(a, b, kind, quant_min, quant_max, double)
    _store(y_ptr + group, a, known, False)
    if z_ptr is not None:
        _store(z_ptr + group, b, known, False)


@triton.jit
def _quantize_rows(
    y_ptr, x_ptr, s_ptr, z_ptr,
    rows, units, chunks, tiles, period, channels, inner,
    by_row: tl.constexpr, single: tl.constexpr, plain: tl.constexpr, ordered: tl.constexpr, wide: tl.constexpr,
    unit: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr, steps: tl.constexpr,
    even: tl.constexpr, kind: tl.constexpr, clips: tl.constexpr,
    strided: tl.constexpr, middle, last, x_first, x_middle, x_last, y_first, y_middle, y_last,
    quant_min, quant_max, double: tl.constexpr, fused: tl.constexpr,
):  # fmt: skip
    """s, z from the range of each row, and y = fake_quantize(x, s, z), or the codes, in one read of x

    ``clips``: whether a finite x may lie beyond the codes, as below 0 it does beyond unsigned ones. ``strided``: the
    rows lie apart, along three axes of which two have ``middle`` and ``last`` indices, with these strides.
    """
    math: tl.constexpr = tl.float64 if double else tl.float32
    base, _, offsets, down, across, rows_left, columns_left, group, _ = _place(
        rows, units, chunks, tiles, period, channels, inner,
        by_row, single, plain, ordered, wide, unit, block_rows, block_columns, steps,
    )  # fmt: skip
    known, inside = down < rows_left, (down < rows_left) & (across < columns_left)
    if strided:
        i, j, k = group // (middle * last), group // last % middle, group % last
        x_ptr += i * x_first + j * x_middle + k * x_last + across
        y_ptr += i * y_first + j * y_middle + k * y_last + across
    else:
        x_ptr += base + offsets
        y_ptr += base + offsets
    codes: tl.constexpr = y_ptr.dtype.element_ty.is_int()
    x = widened(_load(x_ptr, inside, 0, even), math)
    s, z, most, plainly = row_params(x, inside, kind, even, block_rows, quant_min, quant_max, double)
    # Codes know no NaN, which must be seen.
    _store(s_ptr + group, tl.where(most == most, s, float("nan")) if codes else s, known, even)
    if z_ptr is None:
        z = tl.zeros_like(s)
    else:
        _store(z_ptr + group, z, known, even)
    _store(y_ptr, by_own_params(x, s, z, plainly, codes, clips, quant_min, quant_max, double, fused), inside, even)


@triton.jit
def _code_weights(
    table_ptr, q_ptr, s_ptr, x_ptr, rows,
    block: tl.constexpr, aligned: tl.constexpr, quant_min, quant_max, fused: tl.constexpr,
):  # fmt: skip
    """What _quantize_rows does, of many tensors: the table has each row's way from x_ptr, its place in q, its length"""
    row = tl.program_id(0)
    table_ptr += row
    way, place, length = tl.load(table_ptr), tl.load(table_ptr + rows), tl.load(table_ptr + 2 * rows)
    across = tl.arange(0, block)[None, :]
    inside = across < tl.multiple_of(length, aligned)
    x = widened(tl.load(x_ptr + tl.multiple_of(way, aligned) + across, mask=inside, other=0.0), tl.float32)
    s, q = codes_of_rows(x, inside, False, 1, quant_min, quant_max, fused)
    tl.store(s_ptr + row + tl.zeros((1, 1), tl.int32), s)
    tl.store(q_ptr + tl.multiple_of(place, aligned) + across, q, mask=inside)


@triton.jit
def _bit_places(block: tl.constexpr, wide: tl.constexpr):
    """The bytes of this program, the eight places in each, and the elements whose bits lie there"""
    byte = tl.program_id(0) * block + tl.arange(0, block)[:, None]
    if wide:
        byte = byte.to(tl.int64)
    place = tl.arange(0, 8)[None, :]
    return byte, place, byte * 8 + place


@triton.jit
def _gradient_bits(
    bits_ptr, x_ptr, s_ptr, z_ptr,
    elements, period, channels, inner,
    single: tl.constexpr, wide: tl.constexpr, block: tl.constexpr, rule: tl.constexpr,
    quant_min, quant_max, double: tl.constexpr,
):  # fmt: skip
    """A bit for each x: whether the rule, one that only clips, passes a gradient to it"""
    math: tl.constexpr = tl.float64 if double else tl.float32
    byte, place, index = _bit_places(block, wide)
    inside = index < elements
    group = tl.zeros_like(index) if single else index // period * channels + index // inner % channels
    x = widened(tl.load(x_ptr + index, mask=inside, other=0.0), math)
    s = tl.load(s_ptr + group, mask=inside, other=1.0).to(math)
    z = tl.zeros_like(s) if z_ptr is None else tl.load(z_ptr + group, mask=inside, other=0).to(math)
    low, high = quant_min - z, quant_max - z
    passed = gradient_of(tl.full(x.shape, 1.0, math), x, s, inverse_of(s, False), low, high, rule, double, False) != 0
    bits = tl.sum((passed & inside).to(tl.int32) << place, 1, keep_dims=True)
    tl.store(bits_ptr + byte, bits.to(tl.uint8), mask=byte * 8 < elements)


@triton.jit
def _code_row(
    q_ptr, bits_ptr, marked_ptr, x_ptr, s_ptr, z_ptr,
    octets, single: tl.constexpr, block: tl.constexpr, steps: tl.constexpr, rule: tl.constexpr,
    quant_min, quant_max, double: tl.constexpr, fused: tl.constexpr,
):  # fmt: skip
    """The codes of a row, and what goes with them, by one scale or by the row's own"""
    row = tl.program_id(0)
    code_row(
        q_ptr, bits_ptr, marked_ptr, None, x_ptr, s_ptr, z_ptr, row, 0 if single else row, 0,
        octets, block, steps, rule, quant_min, quant_max, double, fused,
    )  # fmt: skip


@triton.jit
def _select(y_ptr, g_ptr, bits_ptr, elements, wide: tl.constexpr, block: tl.constexpr):
    """y = g where its bit is set, else 0"""
    byte, place, index = _bit_places(block, wide)
    inside = index < elements
    bits = tl.load(bits_ptr + byte, mask=byte * 8 < elements, other=0).to(tl.int32)
    g = tl.load(g_ptr + index, mask=inside, other=0)
    tl.store(y_ptr + index, tl.where((bits >> place) & 1 != 0, g, tl.zeros_like(g)), mask=inside)


@triton.jit
def _ema(
    a_ptr, b_ptr, low_ptr, high_ptr, s_ptr, z_ptr, started_ptr,
    new_low_ptr, new_high_ptr, new_s_ptr, new_z_ptr, new_started_ptr,
    groups, repeats, channels, inner,
    kind: tl.constexpr, block: tl.constexpr, block_groups: tl.constexpr, rounds: tl.constexpr, wide: tl.constexpr,
    double: tl.constexpr, quant_min, quant_max, decay, rest,
):  # fmt: skip
    """state = decay * state + rest * batch where the batch has data; the first is copied in (see the reference)

    a and b are the batch's partial results.
    """
    group, known, a, b = _gather(
        a_ptr, b_ptr, groups, repeats, channels, inner, kind, block, block_groups, rounds, wide, double
    )  # fmt: skip
    a, b = params_of(a, b, kind, quant_min, quant_max, double)
    started = tl.load(started_ptr + group, mask=known, other=0) != 0
    s = tl.load(s_ptr + group, mask=known, other=1.0)
    if kind == "abs_max":
        has_data = a > 0
        batch, _ = params_of(a, a, "symmetric", quant_min, quant_max, double)
        s = tl.where(has_data, tl.where(started, decay * s + rest * batch, batch), s)
    else:
        has_data = (a != 0) | (b != 0)
        low, high = tl.load(low_ptr + group, mask=known, other=0.0), tl.load(high_ptr + group, mask=known, other=0.0)
        low = tl.where(has_data, tl.where(started, decay * low + rest * a, a), low)
        high = tl.where(has_data, tl.where(started, decay * high + rest * b, b), high)
        new_s, new_z = params_of(low, high, "affine", quant_min, quant_max, double)
        z = tl.load(z_ptr + group, mask=known, other=0)
        tl.store(new_low_ptr + group, low, mask=known)
        tl.store(new_high_ptr + group, high, mask=known)
        tl.store(new_z_ptr + group, tl.where(started | has_data, new_z.to(tl.int32), z), mask=known)
        s = tl.where(started | has_data, new_s, s)
    tl.store(new_s_ptr + group, s, mask=known)
    tl.store(new_started_ptr + group, (started | has_data).to(tl.uint8), mask=known)


_KERNELS = triton_launch.Kernels(_map, _reduce, _finish, _quantize_rows, _ema, _gradient_bits)


def follow(signature: Signature, x: Tensor, state: Sequence[Tensor], decay: float) -> None:
    """What ema_scale or ema_range makes of the state and of x's abs_max or min_max, in the state's own memory"""
    triton_launch.follow_launches(signature, _KERNELS, decay)(x, state)


def select(grad_output: Tensor, bits: Tensor) -> Tensor:
    """grad_output, contiguous, where its bit is set, else 0"""
    g = grad_output.contiguous()
    y = torch.empty_like(g)
    triton_launch.bits_launch(_select, g.numel(), (), g.device)(y, g, bits.contiguous())
    return y


def code_rows(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, grid: Grid, ste: SteKind | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The codes of x, contiguous, by one scale or one for each row; the bits of a rule; and a scale for each row"""
    q, columns = torch.empty_like(x, dtype=torch.int8), x.shape[-1]
    bits = None if ste is None else torch.empty(x.numel() // 8, dtype=torch.uint8, device=x.device)
    marked = torch.empty(x.shape[:-1], dtype=scale.dtype, device=x.device)
    launch = triton_launch.row_launch(
        _code_row, marked.numel(), columns, scale.numel() == 1, grid, ste, x.dtype == torch.float64, x.device
    )
    launch(q, bits, marked, x, scale.contiguous(), None if zero_point is None else zero_point.contiguous())
    return q, bits, marked


def code_weights(weights: Sequence[Tensor], grid: Grid) -> list[tuple[Tensor, Tensor]]:
    """The codes of weights, contiguous and of one dtype, and a scale for each row: one launch for all of them"""
    device, dtype = weights[0].device, weights[0].dtype
    places = tuple((weight.data_ptr(), *weight.shape) for weight in weights)
    table, launch = triton_launch.weights_launch(_code_weights, places, dtype, grid, device)
    q = torch.empty(sum(weight.numel() for weight in weights), dtype=torch.int8, device=device)
    scales = torch.empty(table.shape[1], dtype=torch.float32, device=device)
    launch(table, q, scales, weights[0])
    codes = q.split([weight.numel() for weight in weights])
    parts = zip(codes, scales.split([len(weight) for weight in weights]), weights, strict=True)
    return [(code.view(weight.shape), scale) for code, scale, weight in parts]
