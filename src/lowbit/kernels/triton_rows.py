"""Rows to codes and back on a GPU, for kernels to inline."""

from __future__ import annotations

import triton
import triton.language as tl

from lowbit.kernels.triton_formulas import (
    code_of,
    codes_of_rows,
    gradient_of,
    inverse_of,
    narrowed,
    quotient_of,
    rounded,
    widened,
)


@triton.jit
def code_tile(
    q_ptr, s_ptr, sums_ptr, v_ptr, x_ptr, tile, rows, columns, quant_min, quant_max,
    even: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr, fused: tl.constexpr,
):  # fmt: skip
    """Of whole rows of x: codes and scales of each row's own range; as far as there are pointers, sums and values"""
    first = tile * block_rows
    down, across = tl.arange(0, block_rows)[:, None], tl.arange(0, block_columns)[None, :]
    known, inside = down < rows - first, (down < rows - first) & (across < columns)
    base, offsets = first.to(tl.int64) * columns, down * columns + across
    x = widened(tl.load(x_ptr + base + offsets, None if even else inside), tl.float32)
    x = x if even else tl.where(inside, x, 0.0)
    s, q = codes_of_rows(x, inside, even, block_rows, quant_min, quant_max, fused)
    tl.store(s_ptr + first + down, s, known)
    tl.store(q_ptr + base + offsets, q, None if even else inside)
    if sums_ptr is not None:
        tl.store(sums_ptr + first + down, tl.sum(q.to(tl.int32), 1, keep_dims=True), known)
    if v_ptr is not None:
        v = narrowed(q.to(tl.float32) * s, v_ptr.dtype.element_ty)
        tl.store(v_ptr + base + offsets, v, None if even else inside)


@triton.jit
def code_row(
    q_ptr, bits_ptr, marked_ptr, zero_ptr, x_ptr, s_ptr, z_ptr, row, group, shift,
    octets, block: tl.constexpr, steps: tl.constexpr, rule: tl.constexpr,
    quant_min, quant_max, double: tl.constexpr, fused: tl.constexpr,
):  # fmt: skip
    """Of a row of x: the codes by a scale and zero point that are given, a bit for each, whether the rule passes a
    gradient, and the scale, NaN where the row holds one: in one read. The zero point is less by ``shift``; zero_ptr is
    where it goes, from row 0.
    """
    math: tl.constexpr = tl.float64 if double else tl.float32
    first, place = tl.arange(0, block)[:, None], tl.arange(0, 8)[None, :]
    start, one = row.to(tl.int64) * octets, tl.zeros((1, 1), tl.int32)
    # A row that is one tile asks for its data before the scale, whose arithmetic would hold them up.
    ahead: tl.constexpr = steps == 1
    if ahead:
        raw = tl.load(x_ptr + start * 8 + first * 8 + place, mask=(first < octets) & (place < 8), other=0.0)
    given = tl.load(s_ptr + group + one)
    shifted = (one if z_ptr is None else tl.load(z_ptr + group + one).to(tl.int32)) - shift
    s, z = given.to(math), shifted.to(math)
    low, high, inverse = quant_min - z, quant_max - z, inverse_of(s, fused)
    lost = tl.zeros((block, 8), tl.int32)
    for step in range(steps):
        index = step * block + first
        known, offsets = index < octets, index * 8 + place
        inside = known & (place < 8)
        if not ahead:
            raw = tl.load(x_ptr + start * 8 + offsets, mask=inside, other=0.0)
        x = widened(raw, math).to(math)
        lost |= (x != x).to(tl.int32)
        v = tl.where(x == x, quotient_of(x, s, inverse, low, high, fused), 0.0)
        q = rounded(v, True).to(tl.int32).to(tl.int8) if double else code_of(v)
        tl.store(q_ptr + start * 8 + offsets, q + shifted.to(tl.int8), mask=inside)  # either may wrap, and the sum fits
        if bits_ptr is not None:
            passed = gradient_of(tl.full(x.shape, 1.0, math), x, s, inverse, low, high, rule, double, fused) != 0
            bits = tl.sum((passed & inside).to(tl.int32) << place, 1, keep_dims=True)
            tl.store(bits_ptr + start + index, bits.to(tl.uint8), mask=known)
    held = tl.max(tl.max(lost, 1, keep_dims=True), 0, keep_dims=True)
    tl.store(marked_ptr + row + one, tl.where(held == 0, given, float("nan")))
    if zero_ptr is not None:
        tl.store(zero_ptr + one, shifted, mask=one + row == 0)


@triton.jit
def decode_tile(
    v_ptr, q_ptr, s_ptr, z_ptr, tile, rows, columns, tiles, block_rows: tl.constexpr, block_columns: tl.constexpr
):  # fmt: skip
    """v = (q - z) * s, with a scale for each row, and one z if there is one"""
    first, start = tile // tiles * block_rows, tile % tiles * block_columns
    down, across = tl.arange(0, block_rows)[:, None], tl.arange(0, block_columns)[None, :]
    known, inside = down < rows - first, (down < rows - first) & (across < columns - start)
    base, offsets = first.to(tl.int64) * columns + start, down * columns + across
    v = tl.load(q_ptr + base + offsets, inside).to(tl.float32)
    if z_ptr is not None:
        v -= tl.load(z_ptr).to(tl.float32)
    v *= tl.load(s_ptr + first + down, known)
    tl.store(v_ptr + base + offsets, narrowed(v, v_ptr.dtype.element_ty), inside)
