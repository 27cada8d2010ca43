"""The law in plain torch: runs on any device, and is what torch.compile traces.

Operands keep the input's dtype and memory format until the scale, spread to the input's rank, promotes them to the
dtype of the arithmetic. Temporaries are reused in place where vmap allows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowbit.division import divide
from lowbit.granularity import Granularity
from lowbit.grid import Grid
from lowbit.kernels.nan import mark_nan
from lowbit.kernels.ops import OPS
from lowbit.kernels.precision import math_dtype
from lowbit.kernels.signature import Signature
from lowbit.packing import pack
from lowbit.scale import affine_params, symmetric_scale
from lowbit.ste import SteKind
from lowbit.tracing import is_exporting

ACCUMULATOR = None

# torch splits a long sum, and the columns of a strided one, by the number of threads; contiguous rows of this length
# are each summed by one thread, always in the same order.
_SUM_ROW = 4096


# How many tensors of the math dtype, each as large as the input, an op holds at its peak.
_TEMPORARIES = {
    "round": 0,
    "ceil": 0,
    "floor": 0,
    "clamp": 2,
    "clamp_backward": 2,
    "step_quantize": 2,
    "k_bit_quantize": 2,
    "fake_quantize": 2,
    "fake_quantize_backward": 5,
    "fake_quantize_per_batch": 3,
    "quantize_per_batch": 3,
    "gradient_bits": 7,
    "learned_fake_quantize": 2,
    "learned_fake_quantize_backward": 8,
    "quantize": 2,
    "quantize_backward": 4,
    "dequantize": 2,
    "dequantize_backward": 1,
    "abs_max": 3,
    "min_max": 3,
    "ema_scale": 8,
    "ema_range": 16,
    "mean_abs": 5,
    "mean_std": 10,
}


def absence() -> str:
    """Torch is all it needs."""
    return ""


def refusal(signature: Signature) -> str:
    """It serves every signature."""
    return ""


def kernel(signature: Signature) -> Callable[..., Any]:
    """The op's function, with the signature's records in place."""
    return partial(globals()[signature.op], **{name: getattr(signature, name) for name in OPS[signature.op].records})


def workspace_size(signature: Signature) -> int:
    """Bytes of temporary memory at the op's peak."""
    groups = math.prod(signature.scale_shape) if "per" in OPS[signature.op].records else 0
    elements = _TEMPORARIES[signature.op] * math.prod(signature.shape) + 8 * groups
    return elements * signature.math_dtype.itemsize


def round(x: Tensor) -> Tensor:
    """y = round(x), half to even"""
    return torch.round(x)


def ceil(x: Tensor) -> Tensor:
    """y = ceil(x)"""
    return torch.ceil(x)


def floor(x: Tensor) -> Tensor:
    """y = floor(x)"""
    return torch.floor(x)


def clamp(x: Tensor, min_value: float, max_value: float) -> Tensor:
    """y = min(max(x, min_value), max_value)"""
    return _narrow(torch.clamp(_widen(x), min_value, max_value), x)


def clamp_backward(grad_output: Tensor, x: Tensor, min_value: float, max_value: float) -> Tensor:
    """dx = g where min_value <= x <= max_value, else 0"""
    wide = _widen(x)
    return torch.where((wide >= min_value) & (wide <= max_value), grad_output, 0)


def step_quantize(x: Tensor, step: float) -> Tensor:
    """y = round(x / step) * step"""
    wide = x.to(math_dtype(x.dtype))
    size = torch.full((), step, dtype=wide.dtype, device=x.device)
    return _narrow(divide(wide, size).round_() * size, x)


def k_bit_quantize(x: Tensor, k: int) -> Tensor:
    """y = round((2^k - 1) * x) / (2^k - 1)"""
    wide = x.to(math_dtype(x.dtype))
    levels = torch.full((), float(1 << k) - 1, dtype=wide.dtype, device=x.device)
    return _narrow(divide((wide * levels).round_(), levels), x)


def fake_quantize(
    x: Tensor, scale: Tensor, zero_point: Tensor | None = None, *, grid: Grid, per: Granularity
) -> Tensor:
    """y = (q - z) * s,  q = clamp(round(x / s) + z, quant_min, quant_max)"""
    split, s, z = _spread(x, scale, zero_point, per)
    q = _clamp_codes(_shift(_round_codes(split, s), z), grid)
    if z is not None:
        q = q.sub_(z)
    # In place where a conversion follows: a fresh result must come last (see _cast).
    y = q * s if q.dtype == x.dtype else q.mul_(s)
    return per.join(_cast(y, x.dtype), x.shape)


def fake_quantize_backward(
    grad_output: Tensor,
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    *,
    grid: Grid,
    per: Granularity,
    ste: SteKind,
) -> Tensor:
    """dx = the rule of ``ste``"""
    if ste is SteKind.IDENTITY:
        return _cast(grad_output, x.dtype)
    split, s, z = _spread(x, scale, zero_point, per)
    dx = _RULES[ste](_gradient(grad_output, x, per), split, s, z, grid)
    return per.join(_cast(dx, x.dtype), x.shape)


def fake_quantize_per_batch(
    x: Tensor, *, grid: Grid, per: Granularity, symmetric: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """y, s, z = fake_quantize with the scale and zero point (None if symmetric) of x's own range"""
    scale, zero_point = _own_params(x, grid, per, symmetric=symmetric)
    return fake_quantize(x, scale, zero_point, grid=grid, per=per), scale, zero_point


def quantize_per_batch(
    x: Tensor, *, grid: Grid, per: Granularity, symmetric: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """q, s, z = the int8 codes of x with the scale and zero point (None if symmetric) of x's own range

    Codes know no NaN: the s of a group that holds one is NaN.
    """
    scale, zero_point = _own_params(x, grid, per, symmetric=symmetric)
    q = quantize(x, scale, zero_point, grid=grid, per=per, dtype=torch.int8)
    return q, mark_nan(scale, x, per=per), zero_point


def _own_params(x: Tensor, grid: Grid, per: Granularity, *, symmetric: bool) -> tuple[Tensor, Tensor | None]:
    if symmetric:
        return symmetric_scale(abs_max(x, per=per), grid), None
    return affine_params(*min_max(x, per=per), grid)


def gradient_bits(
    x: Tensor, scale: Tensor, zero_point: Tensor | None = None, *, grid: Grid, per: Granularity, ste: SteKind
) -> Tensor:
    """Whether the rule, one that only clips, passes a gradient to each x: a bit each, the lowest of a byte first"""
    ones = torch.ones_like(x, memory_format=torch.contiguous_format)
    passed = fake_quantize_backward(ones, x, scale, zero_point, grid=grid, per=per, ste=ste)
    return pack((passed != 0).to(torch.int32), 1)


# The forward of a learned scale is the same formula; only its backward differs.
learned_fake_quantize = fake_quantize


def learned_fake_quantize_backward(
    grad_output: Tensor,
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    *,
    grid: Grid,
    per: Granularity,
    ste: SteKind,
    method: str = "lsq",
) -> tuple[Tensor, ...]:
    """dx = the rule of ``ste``,  ds = sum(g * t);  with a zero point dz = sum(-g * s) where x lies outside the range

    lsq:   t = round(x / s) - x / s where lo <= x <= hi, quant_min - z below, quant_max - z above
    pact:  t = quant_min - z where x <= lo, quant_max - z where x >= hi, else 0
    """
    dx = fake_quantize_backward(grad_output, x, scale, zero_point, grid=grid, per=per, ste=ste)
    split, s, z = _spread(x, scale, zero_point, per)
    g = _gradient(grad_output, x, per)
    low, high = _code_ends(z, grid)
    if method == "pact":
        below, above, inside = split <= low * s, split >= high * s, torch.zeros_like(s)
    else:
        v = divide(split, s)
        below, above, inside = split < low * s, split > high * s, v.round() - v
    slope = torch.where(above, high, torch.where(below, low, inside))
    ds = torch.where(split.isnan(), 0, g * slope)
    if zero_point is None:
        return dx, _sum(ds, per, scale.shape)
    dz = torch.where(above | below, -g * s, 0)
    return dx, _sum(ds, per, scale.shape), _sum(dz, per, scale.shape)


def quantize(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    *,
    grid: Grid,
    per: Granularity,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """q = clamp(round(x / s) + z, quant_min, quant_max); as integers, NaN becomes z"""
    split, s, z = _spread(x, scale, zero_point, per)
    q = _round_codes(split, s)
    if dtype is not None:
        q = q.nan_to_num_(nan=0.0, posinf=math.inf, neginf=-math.inf)
    q = _shift(q, z)
    codes = q.clamp(grid.quant_min, grid.quant_max) if dtype is None else _clamp_codes(q, grid).to(dtype)
    return per.join(codes, x.shape)


def quantize_backward(
    grad_output: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None = None, *, grid: Grid, per: Granularity
) -> Tensor:
    """dx = g / s where quant_min <= round(x / s) + z <= quant_max, else 0"""
    split, s, z = _spread(x, scale, zero_point, per)
    dx = _in_range(divide(_gradient(grad_output, x, per), s), split, s, z, grid)
    return per.join(_cast(dx, x.dtype), x.shape)


def dequantize(
    q: Tensor, scale: Tensor, zero_point: Tensor | None = None, *, per: Granularity, dtype: torch.dtype | None = None
) -> Tensor:
    """y = (q - z) * s, in ``dtype``, by default that of float codes and float32 for integer ones"""
    if dtype is None:
        dtype = q.dtype if q.is_floating_point() else torch.float32
    wide = torch.float64 if torch.float64 in (q.dtype, dtype) else torch.float32
    split = per.split(q)
    if zero_point is not None:
        split = split - per.spread(zero_point, split).to(wide)
    return per.join(_cast(split * per.spread(scale.to(wide), split), dtype), q.shape)


def dequantize_backward(
    grad_output: Tensor, scale: Tensor, *, per: Granularity, dtype: torch.dtype | None = None
) -> Tensor:
    """dq = g * s"""
    split = per.split(grad_output)
    dq = split * per.spread(scale.to(math_dtype(split.dtype)), split)
    return per.join(_cast(dq, grad_output.dtype if dtype is None else dtype), grad_output.shape)


def abs_max(x: Tensor, *, per: Granularity) -> Tensor:
    """m[c] = max(abs(x)) over the finite x of group c, 0 where there is none"""
    if x.numel() == 0:
        return _zeros(x, per)
    split = per.split(x)
    finite = torch.where(split.isfinite(), split, 0)
    return per.reduce(torch.amax, finite.abs()).to(math_dtype(x.dtype))


def min_max(x: Tensor, *, per: Granularity) -> tuple[Tensor, Tensor]:
    """lo[c], hi[c] = min(x), max(x) over the finite x of group c, 0 and 0 where there is none"""
    if x.numel() == 0:
        return _zeros(x, per), _zeros(x, per)
    split = per.split(x)
    finite = split.isfinite()
    lo = per.reduce(torch.amin, torch.where(finite, split, math.inf))
    hi = per.reduce(torch.amax, torch.where(finite, split, -math.inf))
    # Adding 0 makes -0 and 0 one: which of them a minimum finds is chance.
    lo, hi = (torch.where(end.isfinite(), end, 0).to(math_dtype(x.dtype)) + 0.0 for end in (lo, hi))
    return lo, hi


def ema_scale(
    magnitude: Tensor, scale: Tensor, initialized: Tensor, decay: float, *, grid: Grid
) -> tuple[Tensor, Tensor]:
    """s = decay * s + (1 - decay) * s_batch where magnitude > 0; the first s_batch is copied in"""
    has_data = magnitude > 0
    blended = _blend(scale, symmetric_scale(magnitude, grid), initialized, decay)
    return torch.where(has_data, blended, scale).to(scale.dtype), initialized | has_data


def ema_range(
    low: Tensor,
    high: Tensor,
    state_low: Tensor,
    state_high: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    initialized: Tensor,
    decay: float,
    *,
    grid: Grid,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """lo = decay * lo + (1 - decay) * lo_batch, hi likewise, where the batch has data; s and z follow from them"""
    has_data = (low != 0) | (high != 0)
    state_low, state_high = (
        torch.where(has_data, _blend(state, batch, initialized, decay), state).to(state.dtype)
        for state, batch in ((state_low, low), (state_high, high))
    )
    started = initialized | has_data
    new_scale, new_zero_point = affine_params(state_low, state_high, grid)
    return (
        state_low,
        state_high,
        torch.where(started, new_scale, scale),
        torch.where(started, new_zero_point, zero_point),
        started,
    )


def mean_abs(x: Tensor, *, per: Granularity) -> Tensor:
    """m[c] = mean(abs(x)) over the finite x of group c, 0 where there is none"""
    split, shape = per.split(x), per.scale_shape(x.shape)
    wide = split.to(math_dtype(x.dtype))
    finite = wide.isfinite()
    count = _sum(finite.to(wide.dtype), per, shape).clamp_min(1)
    # Divided before the sum, which could overflow.
    return _sum(torch.where(finite, divide(wide.abs(), per.spread(count, wide)), 0), per, shape)


def mean_std(x: Tensor, *, per: Granularity) -> tuple[Tensor, Tensor]:
    """mu[c], sigma[c] = mean(x), sqrt(mean((x - mu)^2)) over the finite x of group c, 0 and 0 where there is none"""
    split, shape = per.split(x), per.scale_shape(x.shape)
    wide = split.double()  # a square of float32 could overflow
    finite = wide.isfinite()
    count = _sum(finite.to(wide.dtype), per, shape).clamp_min(1)
    mean = divide(_sum(torch.where(finite, wide, 0), per, shape), count)
    deviation = wide - per.spread(mean, wide)
    std = divide(_sum(torch.where(finite, deviation * deviation, 0), per, shape), count).sqrt()
    return mean.to(math_dtype(x.dtype)), std.to(math_dtype(x.dtype))


def _spread(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, per: Granularity
) -> tuple[Tensor, Tensor, Tensor | None]:
    dtype, split = math_dtype(x.dtype), per.split(x)
    z = None if zero_point is None else per.spread(zero_point, split).to(dtype)
    return split, per.spread(scale.to(dtype), split), z


def _gradient(grad_output: Tensor, x: Tensor, per: Granularity) -> Tensor:
    """The gradient, split, and no wider than x's arithmetic."""
    narrow = grad_output.dtype == torch.float64 and x.dtype != torch.float64
    return per.split(grad_output.float() if narrow else grad_output)


def _round_codes(split: Tensor, s: Tensor) -> Tensor:
    return divide(split, s).round_()


def _shift(q: Tensor, z: Tensor | None) -> Tensor:
    # Adding 0 turns -0 into the code 0, as an integer would.
    return q.add_(0.0) if z is None else q + z


def _clamp_codes(q: Tensor, grid: Grid) -> Tensor:
    return q.clamp_min_(grid.quant_min).clamp_max_(grid.quant_max)


def _code_ends(z: Tensor | None, grid: Grid) -> tuple[Tensor | int, Tensor | int]:
    """quant_min - z, quant_max - z"""
    return (grid.quant_min, grid.quant_max) if z is None else (grid.quant_min - z, grid.quant_max - z)


def _clipped_identity(g: Tensor, x: Tensor, s: Tensor, z: Tensor | None, grid: Grid) -> Tensor:
    low, high = _code_ends(z, grid)
    return torch.where((x >= low * s) & (x <= high * s), g, 0)


def _in_range(g: Tensor, x: Tensor, s: Tensor, z: Tensor | None, grid: Grid) -> Tensor:
    q = _shift(_round_codes(x, s), z)
    return torch.where((q >= grid.quant_min) & (q <= grid.quant_max), g, 0)


def _tanh(g: Tensor, x: Tensor, s: Tensor, z: Tensor | None, grid: Grid) -> Tensor:
    # 1 - tanh(v)^2 = 4 e / (1 + e)^2 with e = exp(-2 |v|): the difference would cancel where tanh nears 1.
    e = torch.exp(-2 * divide(x, s).abs())
    t = 1 + e
    return torch.where(x.isfinite(), g * divide(4 * e, t * t), 0)


def _hard_tanh(g: Tensor, x: Tensor, s: Tensor, z: Tensor | None, grid: Grid) -> Tensor:
    low, high = _code_ends(z, grid)
    bound = torch.where(x >= 0, high * s, -(low * s))
    inside = x.abs() < bound
    # The bound of an empty side is 0; a second derivative would see 0 / 0 there.
    return torch.where(inside, g * (1 - divide(x.abs(), torch.where(inside, bound, 1))), 0)


_RULES = {
    SteKind.CLIPPED_IDENTITY: _clipped_identity,
    SteKind.IN_RANGE: _in_range,
    SteKind.TANH: _tanh,
    SteKind.HARD_TANH: _hard_tanh,
}


def _sum(terms: Tensor, per: Granularity, shape: tuple[int, ...]) -> Tensor:
    """The sum of each scale group, in an order that does not depend on the number of threads."""
    rows = per.by_group(terms)
    # An exported graph is summed in the order of whoever runs it, and must take groups of any length.
    while not is_exporting() and rows.shape[1] > _SUM_ROW:
        padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % _SUM_ROW))
        rows = padded.view(rows.shape[0], -1, _SUM_ROW).sum(2)
    return rows.sum(1).reshape(shape)


def _blend(state: Tensor, batch: Tensor, initialized: Tensor, decay: float) -> Tensor:
    return torch.where(initialized, decay * state + (1 - decay) * batch, batch)


def _zeros(x: Tensor, per: Granularity) -> Tensor:
    return torch.zeros(per.scale_shape(x.shape), dtype=math_dtype(x.dtype), device=x.device)


def _widen(x: Tensor) -> Tensor:
    """Half precision in float32; every other dtype as it is."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _narrow(y: Tensor, x: Tensor) -> Tensor:
    """y in x's dtype; integers in, whatever the arithmetic gave out."""
    return _cast(y, x.dtype) if x.is_floating_point() else y


def _cast(y: Tensor, dtype: torch.dtype) -> Tensor:
    # torch.compile of torch 2.11 loses the gradient of an autograd Function whose result is what an in-place op, or a
    # conversion to the same dtype, handed back: results must come fresh out of their last op.
    return y if y.dtype == dtype else y.to(dtype)
