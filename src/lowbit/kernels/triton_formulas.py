"""The formulas of the CUDA kernels: one copy of each, which every kernel inlines."""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

from lowbit.scale import SCALE_FLOOR

_SCALE_FLOOR = tl.constexpr(SCALE_FLOOR)
INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def clamped(x, low, high):
    """min(max(x, low), high), NaN kept"""
    keep: tl.constexpr = tl.PropagateNan.ALL
    return tl.minimum(tl.maximum(x, low, propagate_nan=keep), high, propagate_nan=keep)


@triton.jit
def greater(a, b):
    """max(a, b), NaN kept"""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def divided(a, b):
    """a / b, correctly rounded"""
    return a / b if a.dtype == tl.float64 or b.dtype == tl.float64 else tl.div_rn(a, b)


@triton.jit
def widened(x, math: tl.constexpr):
    """Narrower dtypes in that of the arithmetic; float64 as it is"""
    if INTERPRETED and x.dtype == tl.bfloat16:  # the interpreter would lose subnormal numbers
        x = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x if x.dtype == tl.float64 else x.to(math)


@triton.jit
def narrowed(value, dtype: tl.constexpr):
    """The number of ``dtype`` nearest to the value, half to even"""
    if value.dtype == tl.float64 and (dtype == tl.float16 or dtype == tl.bfloat16):
        value = value.to(tl.float32)  # as torch does
    if INTERPRETED and value.dtype == tl.float32 and dtype == tl.bfloat16:
        # The interpreter would cut the last bits off. To the nearest, half to even:
        bits = value.to(tl.uint32, bitcast=True)
        bits = tl.where(value == value, bits + 0x7FFF + ((bits >> 16) & 1), bits)
        value = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return value.to(dtype)


@triton.jit
def rounded(v, double: tl.constexpr):
    """round(v), half to even, of abs(v) < 2^22; -0 becomes 0"""
    # 1.5 * 2^23 (float64: 1.5 * 2^52): from here on, the dtype's numbers are the integers.
    shift: tl.constexpr = 6755399441055744.0 if double else 12582912.0
    return (v + shift) - shift


@triton.jit
def inverse_of(s, fused: tl.constexpr):
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
def quotient_of(x, s, inverse, low, high, fused: tl.constexpr):
    """v = x / s, correctly rounded, where low <= v <= high; outside, a v with round(v) = low or high

    Where ``fused``, with x and d both p times what they were: q = zh * x + zl * x errs by less than 1 ulp. So x - q * d
    is exact, and q + zh * (x - q * d) is x / d correctly rounded (Markstein 1990), as long as nothing underflows: p
    keeps d far from the ends, and an x / d so small that something does underflow rounds to 0 either way. Clamping x
    instead of v keeps out infinities; low * d / d may be an ulp off low, which rounding takes away.
    """
    if fused:
        v = _refined(clamped(x * inverse[0], low * (s * inverse[0]), high * (s * inverse[0])), inverse)
    else:
        v = clamped(divided(x, s), low, high)
    return v


@triton.jit
def ratio_of(x, s, inverse, fused: tl.constexpr):
    """v = x / s, correctly rounded, of a finite v that is not far from the codes"""
    return _refined(x * inverse[0], inverse) if fused else divided(x, s)


@triton.jit
def _refined(x, inverse):
    _, minus_d, zh, zl = inverse
    q = tl.fma(x, zh, x * zl)
    return tl.fma(tl.fma(q, minus_d, x), zh, q)


@triton.jit
def code_of(v):
    """The last byte of round(v), half to even, of a finite float32, which v + 1.5 * 2^23 has: all of a code of int8"""
    return (v + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def exponential(a, double: tl.constexpr):
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
def gradient_of(g, x, s, inverse, low, high, rule: tl.constexpr, double: tl.constexpr, fused: tl.constexpr):
    """dx = the rule of ``ste``; low, high = quant_min - z, quant_max - z"""
    if rule == "identity":
        dx = g
    elif rule == "clipped_identity":
        dx = tl.where((x >= low * s) & (x <= high * s), g, 0.0)
    elif rule == "in_range":
        dx = tl.where(is_in_range(x, s, inverse, low, high, double, fused), g, 0.0)
    elif rule == "tanh":
        # 1 - tanh(v)^2 = 4 e / (1 + e)^2 with e = exp(-2 |v|), which is 0 from the bounds on.
        most: tl.constexpr = 400.0 if double else 64.0
        unit: tl.constexpr = 1.0 if double else 5.421010862427522e-20  # 2^-64
        e = exponential(-2.0 * tl.abs(quotient_of(x, s, inverse, -most, most, fused)), double)
        t = (1.0 + e * unit) * (1.0 + e * unit)
        if not double and not INTERPRETED:
            # As good as a division, in fewer steps.
            inverse_t = 1.0 / t
            slope = 4.0 * e * inverse_t
            slope = tl.fma(tl.fma(slope, -t, 4.0 * e), inverse_t, slope)
        else:
            slope = divided(4.0 * e, t)
        slope *= unit  # only here may it become subnormal, and round
        dx = tl.where(tl.abs(x) < float("inf"), g * slope, 0.0)
    else:
        tl.static_assert(rule == "hard_tanh", "a rule without a formula")
        bound = tl.where(x >= 0, high * s, -(low * s))
        inside = tl.abs(x) < bound
        dx = tl.where(inside, g * (1.0 - divided(tl.abs(x), tl.where(inside, bound, 1.0))), 0.0)
    return dx


@triton.jit
def is_in_range(x, s, inverse, low, high, double: tl.constexpr, fused: tl.constexpr):
    """quant_min <= round(x / s) + z <= quant_max"""
    r = rounded(quotient_of(x, s, inverse, low - 1.0, high + 1.0, fused), double)
    return (r >= low) & (r <= high)


@triton.jit
def slope_of(x, s, inverse, low, high, method: tl.constexpr, double: tl.constexpr, fused: tl.constexpr):
    """t and whether x lies outside the range: ds = sum(g * t), dz = -s * sum(g where outside) (see the reference)"""
    if method == "pact":
        inside = (x > low * s) & (x < high * s)
        edge, slope = tl.where(x < high * s, low, high), tl.zeros_like(x)
    else:
        inside = (x >= low * s) & (x <= high * s)
        v = quotient_of(x, s, inverse, low, high, fused)
        edge = rounded(v, double)  # low or high, where x is outside
        slope = edge - v
    outside = (x == x) & ~inside
    return tl.where(outside, edge, tl.where(inside, slope, 0.0)), outside


@triton.jit
def params_of(a, b, kind: tl.constexpr, quant_min, quant_max, double: tl.constexpr):
    """The results of a reduction whose last values are a and b (see lowbit.scale)"""
    if kind == "symmetric":
        a = tl.maximum(divided(a, tl.zeros_like(a) + quant_max), tl.full(a.shape, _SCALE_FLOOR, a.dtype))
    elif kind == "min_max" or kind == "affine":
        # A group without a finite value: inf and -inf. Adding 0 makes -0 and 0 one.
        a = tl.where(a < float("inf"), a, 0.0) + 0.0
        b = tl.where(b > float("-inf"), b, 0.0) + 0.0
    if kind == "affine":
        lo, hi = tl.minimum(a, 0.0), tl.maximum(b, 0.0)
        steps = tl.zeros_like(a) + (quant_max - quant_min)
        a = divided(hi - lo, steps)
        a = tl.where(a < float("inf"), a, divided(hi, steps) - divided(lo, steps))
        a = tl.maximum(a, tl.full(a.shape, _SCALE_FLOOR, a.dtype))
        b = rounded(
            clamped(quant_min - divided(lo, a), tl.zeros_like(a) + quant_min, tl.zeros_like(a) + quant_max), double
        )
    return a, b


@triton.jit
def ends_of(x, inside, kind: tl.constexpr, even: tl.constexpr):
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
def collapsed(a, b, axis: tl.constexpr, kind: tl.constexpr):
    """The reduction of ``kind``, along an axis"""
    if kind == "sum":
        a, b = tl.sum(a, axis, keep_dims=True), tl.sum(b, axis, keep_dims=True)
    elif kind == "abs_max" or kind == "symmetric":
        a = tl.max(a, axis, keep_dims=True)
    else:
        a, b = tl.min(a, axis, keep_dims=True), tl.max(b, axis, keep_dims=True)
    return a, b


@triton.jit
def row_params(
    x, inside, kind: tl.constexpr, even: tl.constexpr, block_rows: tl.constexpr,
    quant_min, quant_max, double: tl.constexpr,
):  # fmt: skip
    """s, z from the range of each row; the greatest abs(x), NaN where there is one; whether all x are finite"""
    # Most tiles hold finite numbers alone, which one maximum tells: then no other look at them is needed.
    most = tl.reduce(tl.abs(x), 1, greater, keep_dims=True)
    plainly = tl.sum((most < float("inf")).to(tl.int32)) == block_rows
    if kind == "symmetric":
        a, b = most, most
        if not plainly:
            ends, same = ends_of(x, inside, kind, even)
            a, same = collapsed(ends, same, 1, kind)
    else:
        a, b = ends_of(x, inside, kind, even)
        a, b = collapsed(a, b, 1, kind)
    s, z = params_of(a, b, kind, quant_min, quant_max, double)
    return s, z, most, plainly


@triton.jit
def by_own_params(
    x, s, z, plainly, codes: tl.constexpr, clips: tl.constexpr,
    quant_min, quant_max, double: tl.constexpr, fused: tl.constexpr,
):  # fmt: skip
    """y = fake_quantize(x, s, z), or the codes, with the parameters of x's own range"""
    inverse = inverse_of(s, fused)
    if not clips and plainly:
        v = ratio_of(x, s, inverse, fused)
    else:
        v = quotient_of(x, s, inverse, quant_min - z, quant_max - z, fused)
        if codes:
            v = tl.where(x == x, v, 0.0)
    if not codes:
        y = rounded(v, double) * s
    elif clips or double:
        y = (rounded(v, double) + z).to(tl.int32)
    else:
        y = code_of(v)
    return y


@triton.jit
def codes_of_rows(
    x, inside, even: tl.constexpr, block_rows: tl.constexpr, quant_min, quant_max, fused: tl.constexpr
):  # fmt: skip
    """s, symmetric, from the range of each row, NaN where it holds one, which codes do not know; and the codes"""
    s, _, most, plainly = row_params(x, inside, "symmetric", even, block_rows, quant_min, quant_max, False)
    q = by_own_params(x, s, tl.zeros_like(s), plainly, True, False, quant_min, quant_max, False, fused)
    return tl.where(most == most, s, float("nan")), q
