"""Fused CUDA kernels: each reads its tensors once and writes its results once.

A program takes a tile of the dense memory whose scale follows from its row or from its column (see Tiling), so that
what depends on the scale alone is computed once and broadcast. Nothing is contracted (``enable_fp_fusion=False``),
nothing is atomic, nothing waits for the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

from lowbit.kernels import triton_launch
from lowbit.kernels.signature import Signature
from lowbit.scale import SCALE_FLOOR

ACCUMULATOR: torch.dtype | None = None

_SCALE_FLOOR = tl.constexpr(SCALE_FLOOR)
_INTERPRETED = tl.constexpr(knobs.runtime.interpret)


# The backend (see plan.py).

absence, refusal, workspace_size = triton_launch.absence, triton_launch.refusal, triton_launch.workspace_size


def kernel(signature: Signature) -> Callable[..., Any]:
    """The op's function for tensors of this signature."""
    return triton_launch.kernel(signature, _KERNELS)


# The formulas.


@triton.jit
def _clamp(x, low, high):
    """min(max(x, low), high), NaN kept"""
    keep: tl.constexpr = tl.PropagateNan.ALL
    return tl.minimum(tl.maximum(x, low, propagate_nan=keep), high, propagate_nan=keep)


@triton.jit
def _divide(a, b):
    """a / b, correctly rounded"""
    return a / b if a.dtype == tl.float64 or b.dtype == tl.float64 else tl.div_rn(a, b)


@triton.jit
def _widen(x, math: tl.constexpr):
    """Narrower dtypes in that of the arithmetic; float64 as it is"""
    if _INTERPRETED and x.dtype == tl.bfloat16:  # the interpreter would lose subnormal numbers
        x = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x if x.dtype == tl.float64 else x.to(math)


@triton.jit
def _round(v, double: tl.constexpr):
    """round(v), half to even, of abs(v) < 2^22; -0 becomes 0"""
    # 1.5 * 2^23 (float64: 1.5 * 2^52): from here on, the dtype's numbers are the integers.
    shift: tl.constexpr = 6755399441055744.0 if double else 12582912.0
    return (v + shift) - shift


@triton.jit
def _inverse(s, fused: tl.constexpr):
    """p, -d, zh, zl: d = s * p between 2^-65 and 2^64, p a power of two, and zh + zl = 1 / d to about 2^-48"""
    if fused:
        p = tl.where(s < 5.421010862427522e-20, 1.9342813113834067e25, 1.0)  # 2^-64, 2^84
        p = tl.where(s > 1.8446744073709552e19, 5.169878828456423e-26, p)  # 2^64, 2^-84
        minus_d = s * -p
        zh = tl.div_rn(tl.full(s.shape, 1.0, tl.float32), s * p)
        zl = tl.fma(zh, minus_d, 1.0) * zh
    else:
        p, minus_d, zh, zl = s, s, s, s
    return p, minus_d, zh, zl


@triton.jit
def _quotient(x, s, inverse, low, high, fused: tl.constexpr):
    """v = x / s, correctly rounded, where low <= v <= high; outside, a v with round(v) = low or high

    Where ``fused``, with x and d both p times what they were: q = zh * x + zl * x errs by less than 1 ulp. So x - q * d
    is exact, and q + zh * (x - q * d) is x / d correctly rounded (Markstein 1990), as long as nothing underflows: p
    keeps d far from the ends, and an x / d so small that something does underflow rounds to 0 either way. Clamping x
    instead of v keeps out infinities; low * d / d may be an ulp off low, which rounding takes away.
    """
    if fused:
        p, minus_d, zh, zl = inverse
        x = _clamp(x * p, low * (s * p), high * (s * p))
        q = tl.fma(x, zh, x * zl)
        v = tl.fma(tl.fma(q, minus_d, x), zh, q)
    else:
        v = _clamp(_divide(x, s), low, high)
    return v


@triton.jit
def _exp(a, double: tl.constexpr):
    """2^64 * e^a for -128 <= a <= 0 (float64: e^a), to about 1 ulp: e^a itself may lie below the normal numbers"""
    if double:
        e = tl.exp(a)
    else:
        # e^a = 2^n e^f. tl.exp takes 2^(a log2 e), where the rounding of a log2 e is many ulp. The sum with 1.5 * 2^23
        # has n + 64 in its last bits, which go into the exponent.
        total = tl.fma(a, 1.4426950408889634, 12582976.0)
        n = total - 12582976.0
        f = tl.fma(n, 2.12194440e-4, tl.fma(n, -0.693359375, a))
        e = tl.fma(f, 0.0013936, 0.008333361)
        e = tl.fma(tl.fma(tl.fma(f, e, 0.041666463), f, 0.16666667), f, 0.5)
        e = tl.fma(tl.fma(e, f, 1.0), f, 1.0)
        bits = e.to(tl.int32, bitcast=True) + (total.to(tl.int32, bitcast=True) << 23)
        e = bits.to(tl.float32, bitcast=True)
    return e


@triton.jit
def _gradient(g, x, s, inverse, low, high, rule: tl.constexpr, double: tl.constexpr, fused: tl.constexpr):
    """dx = the rule of ``ste``; low, high = quant_min - z, quant_max - z"""
    if rule == "identity":
        dx = g
    elif rule == "clipped_identity":
        dx = tl.where((x >= low * s) & (x <= high * s), g, 0.0)
    elif rule == "in_range":
        dx = tl.where(_in_range(x, s, inverse, low, high, double, fused), g, 0.0)
    elif rule == "tanh":
        # 1 - tanh(v)^2 = 4 e / (1 + e)^2 with e = exp(-2 |v|), which is 0 from the bounds on.
        most: tl.constexpr = 400.0 if double else 64.0
        unit: tl.constexpr = 1.0 if double else 5.421010862427522e-20  # 2^-64
        e = _exp(-2.0 * tl.abs(_quotient(x, s, inverse, -most, most, fused)), double)
        t = (1.0 + e * unit) * (1.0 + e * unit)
        if not double and not _INTERPRETED:
            # As good as a division, in fewer steps.
            inverse_t = 1.0 / t
            slope = 4.0 * e * inverse_t
            slope = tl.fma(tl.fma(slope, -t, 4.0 * e), inverse_t, slope)
        else:
            slope = _divide(4.0 * e, t)
        slope *= unit  # only here may it become subnormal, and round
        dx = tl.where(tl.abs(x) < float("inf"), g * slope, 0.0)
    else:
        tl.static_assert(rule == "hard_tanh", "a rule without a formula")
        bound = tl.where(x >= 0, high * s, -(low * s))
        inside = tl.abs(x) < bound
        dx = tl.where(inside, g * (1.0 - _divide(tl.abs(x), tl.where(inside, bound, 1.0))), 0.0)
    return dx


@triton.jit
def _in_range(x, s, inverse, low, high, double: tl.constexpr, fused: tl.constexpr):
    """quant_min <= round(x / s) + z <= quant_max"""
    r = _round(_quotient(x, s, inverse, low - 1.0, high + 1.0, fused), double)
    return (r >= low) & (r <= high)


@triton.jit
def _slope(x, s, inverse, low, high, method: tl.constexpr, double: tl.constexpr, fused: tl.constexpr):
    """t and whether x lies outside the range: ds = sum(g * t), dz = -s * sum(g where outside) (see the reference)"""
    if method == "pact":
        inside = (x > low * s) & (x < high * s)
        edge, slope = tl.where(x < high * s, low, high), tl.zeros_like(x)
    else:
        inside = (x >= low * s) & (x <= high * s)
        v = _quotient(x, s, inverse, low, high, fused)
        edge = _round(v, double)  # low or high, where x is outside
        slope = edge - v
    outside = (x == x) & ~inside
    return tl.where(outside, edge, tl.where(inside, slope, 0.0)), outside


@triton.jit
def _params(a, b, kind: tl.constexpr, quant_min, quant_max, double: tl.constexpr):
    """The results of a reduction whose last values are a and b (see lowbit.scale)"""
    if kind == "symmetric":
        a = tl.maximum(_divide(a, tl.zeros_like(a) + quant_max), tl.full(a.shape, _SCALE_FLOOR, a.dtype))
    elif kind == "min_max" or kind == "affine":
        # A group without a finite value: inf and -inf. Adding 0 makes -0 and 0 one.
        a = tl.where(a < float("inf"), a, 0.0) + 0.0
        b = tl.where(b > float("-inf"), b, 0.0) + 0.0
    if kind == "affine":
        lo, hi = tl.minimum(a, 0.0), tl.maximum(b, 0.0)
        steps = tl.zeros_like(a) + (quant_max - quant_min)
        a = _divide(hi - lo, steps)
        a = tl.where(a < float("inf"), a, _divide(hi, steps) - _divide(lo, steps))
        a = tl.maximum(a, tl.full(a.shape, _SCALE_FLOOR, a.dtype))
        b = _round(
            _clamp(quant_min - _divide(lo, a), tl.zeros_like(a) + quant_min, tl.zeros_like(a) + quant_max), double
        )
    return a, b


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
    dtype: tl.constexpr = ptr.dtype.element_ty
    if value.dtype == tl.float64 and (dtype == tl.float16 or dtype == tl.bfloat16):
        value = value.to(tl.float32)  # as torch does
    if _INTERPRETED and value.dtype == tl.float32 and dtype == tl.bfloat16:
        # The interpreter would cut the last bits off. To the nearest, half to even:
        bits = value.to(tl.uint32, bitcast=True)
        bits = tl.where(value == value, bits + 0x7FFF + ((bits >> 16) & 1), bits)
        value = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    if even:
        tl.store(ptr, value.to(dtype))
    else:
        tl.store(ptr, value.to(dtype), mask=inside)


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
    low, high, inverse = quant_min - z, quant_max - z, _inverse(s, fused)
    if learned:
        ds, dz = tl.zeros((block_rows, block_columns), math), tl.zeros((block_rows, block_columns), math)
    for _ in range(steps):
        if not ahead:
            inside = (down < rows_left) & (across < columns_left)
            raw = _load(x_ptr + base + offsets, inside, 0, even)
            g = None if g_ptr is None else _load(g_ptr + base + offsets, inside, 0, even)
        x = _widen(raw, math).to(math)
        if op == "fake_quantize":
            y = _round(_quotient(x, s, inverse, low, high, fused), double) * s
        elif op == "quantize":
            y = _round(_quotient(x, s, inverse, low, high, fused), double)
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
            y = tl.where(_in_range(x, s, inverse, low, high, double, fused), _divide(_widen(g, math), s), 0.0)
        else:
            y = _gradient(g, x, s, inverse, low, high, rule, double, fused)
        _store(y_ptr + base + offsets, y, inside, even)
        if learned:
            slope, outside = _slope(x, s, inverse, low, high, op, double, fused)
            ds = tl.fma(_widen(g, math).to(math), slope, ds)
            dz += tl.where(outside, _widen(g, math).to(math), 0.0)
        base += stride
        if by_row:
            columns_left -= block_columns
        else:
            rows_left -= block_rows
    if learned:
        _store(ds_ptr + slot, tl.sum(ds, 1 if by_row else 0, keep_dims=True), known, even)
        _store(dz_ptr + slot, -s * tl.sum(dz, 1 if by_row else 0, keep_dims=True), known, even)


@triton.jit
def _ends(x, inside, kind: tl.constexpr, even: tl.constexpr):
    """What the statistic of ``kind`` takes from each x: abs(x) twice, or x for the least and x for the greatest"""
    finite = tl.abs(x) < float("inf")
    if not even:
        finite = finite & inside
    if kind == "abs_max" or kind == "symmetric":
        a = tl.where(finite, tl.abs(x), 0.0)
        b = a
    else:
        a, b = tl.where(finite, x, float("inf")), tl.where(finite, x, float("-inf"))
    return a, b


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
def _collapse(a, b, axis: tl.constexpr, kind: tl.constexpr):
    """The reduction of ``kind``, along an axis"""
    if kind == "sum":
        a, b = tl.sum(a, axis, keep_dims=True), tl.sum(b, axis, keep_dims=True)
    elif kind == "abs_max" or kind == "symmetric":
        a = tl.max(a, axis, keep_dims=True)
    else:
        a, b = tl.min(a, axis, keep_dims=True), tl.max(b, axis, keep_dims=True)
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
    a, b = _ends(tl.full((block_rows, block_columns), float("nan"), math), known, kind, True)
    for _ in range(steps):
        inside = (down < rows_left) & (across < columns_left)
        c, d = _ends(_widen(_load(x_ptr + base + offsets, inside, 0, even), math), inside, kind, even)
        a, b = _join(a, b, c, d, kind)
        base += stride
        if by_row:
            columns_left -= block_columns
        else:
            rows_left -= block_rows
    a, b = _collapse(a, b, 1 if by_row else 0, kind)
    if last:
        a, b = _params(a, b, kind, quant_min, quant_max, double)
    _store(a_ptr + slot, a, known, even)
    if b_ptr is not None:
        _store(b_ptr + slot, b, known, even)


@triton.jit
def _finish(
    y_ptr, z_ptr, a_ptr, b_ptr, groups, repeats, channels, inner,
    kind: tl.constexpr, block: tl.constexpr, block_groups: tl.constexpr, rounds: tl.constexpr, wide: tl.constexpr,
    quant_min, quant_max, double: tl.constexpr,
):  # fmt: skip
    """The results of each group, from its partial results [outer, repeats, channels, inner]"""
    math: tl.constexpr = tl.float64 if double else tl.float32
    group = tl.program_id(0) * block_groups + tl.arange(0, block_groups)[None, :]
    known = group < groups
    if wide:
        group = group.to(tl.int64)
    first = group // channels * (repeats * channels * inner) + group % channels * inner
    if kind == "sum":
        a, b = tl.zeros((block, block_groups), math), tl.zeros((block, block_groups), math)
    else:
        a, b = _ends(tl.full((block, block_groups), float("nan"), math), known, kind, True)
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
    a, b = _collapse(a, b, 0, kind)
    a, b = _params(a, b, kind, quant_min, quant_max, double)
    _store(y_ptr + group, a, known, False)
    if z_ptr is not None:
        _store(z_ptr + group, b, known, False)


@triton.jit
def _quantize_rows(
    y_ptr, x_ptr, s_ptr, z_ptr,
    rows, units, chunks, tiles, period, channels, inner,
    by_row: tl.constexpr, single: tl.constexpr, plain: tl.constexpr, ordered: tl.constexpr, wide: tl.constexpr,
    unit: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr, steps: tl.constexpr,
    even: tl.constexpr, kind: tl.constexpr,
    quant_min, quant_max, double: tl.constexpr, fused: tl.constexpr,
):  # fmt: skip
    """s, z from the range of each row, and y = fake_quantize(x, s, z), in one read of x"""
    math: tl.constexpr = tl.float64 if double else tl.float32
    base, _, offsets, down, across, rows_left, columns_left, group, _ = _place(
        rows, units, chunks, tiles, period, channels, inner,
        by_row, single, plain, ordered, wide, unit, block_rows, block_columns, steps,
    )  # fmt: skip
    known, inside = down < rows_left, (down < rows_left) & (across < columns_left)
    x = _widen(_load(x_ptr + base + offsets, inside, 0, even), math)
    a, b = _ends(x, inside, kind, even)
    a, b = _collapse(a, b, 1, kind)
    s, z = _params(a, b, kind, quant_min, quant_max, double)
    _store(s_ptr + group, s, known, even)
    if z_ptr is None:
        z = tl.zeros_like(s)
    else:
        _store(z_ptr + group, z, known, even)
    y = _round(_quotient(x, s, _inverse(s, fused), quant_min - z, quant_max - z, fused), double) * s
    _store(y_ptr + base + offsets, y, inside, even)


@triton.jit
def _ema(
    a_ptr, b_ptr, low_ptr, high_ptr, s_ptr, z_ptr, started_ptr,
    new_low_ptr, new_high_ptr, new_s_ptr, new_z_ptr, new_started_ptr,
    groups, decay, rest,
    quant_min, quant_max, kind: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """state = decay * state + rest * batch where the batch has data; the first is copied in (see the reference)"""
    group = tl.program_id(0) * block + tl.arange(0, block)
    known = group < groups
    started = tl.load(started_ptr + group, mask=known, other=0) != 0
    s, a = tl.load(s_ptr + group, mask=known, other=1.0), tl.load(a_ptr + group, mask=known, other=0.0)
    if kind == "symmetric":
        has_data = a > 0
        batch, _ = _params(a, a, kind, quant_min, quant_max, False)
        s = tl.where(has_data, tl.where(started, decay * s + rest * batch, batch), s)
    else:
        b = tl.load(b_ptr + group, mask=known, other=0.0)
        has_data = (a != 0) | (b != 0)
        low, high = tl.load(low_ptr + group, mask=known, other=0.0), tl.load(high_ptr + group, mask=known, other=0.0)
        low = tl.where(has_data, tl.where(started, decay * low + rest * a, a), low)
        high = tl.where(has_data, tl.where(started, decay * high + rest * b, b), high)
        new_s, new_z = _params(low, high, kind, quant_min, quant_max, False)
        z = tl.load(z_ptr + group, mask=known, other=0)
        tl.store(new_low_ptr + group, low, mask=known)
        tl.store(new_high_ptr + group, high, mask=known)
        tl.store(new_z_ptr + group, tl.where(started | has_data, new_z.to(tl.int32), z), mask=known)
        s = tl.where(started | has_data, new_s, s)
    tl.store(new_s_ptr + group, s, mask=known)
    tl.store(new_started_ptr + group, (started | has_data).to(tl.uint8), mask=known)


_KERNELS = triton_launch.Kernels(_map, _reduce, _finish, _quantize_rows, _ema)
