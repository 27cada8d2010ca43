"""The numeric law in float64, written for reading.

Every function works element by element on flat arrays: ``group[i]`` is the scale group of element i, found by counting
indices, not by the library's own arithmetic. A code comes with its ``margin``: how far x / s lies from the nearest
boundary where rounding changes. A float32 quotient is right to half an eps of x / s: codes must agree beyond that.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowbit import Grid, PerBlock, PerChannel, PerGroup, PerTensor, PerToken, SteKind


class Codes(NamedTuple):
    codes: Tensor  # after the clamp
    unclamped: Tensor  # round(x / s) + z
    margin: Tensor  # distance of x / s from the nearest half-integer


def group_index(shape: tuple[int, ...], per: object) -> Tensor:
    """The flat index into the scale of every element of a tensor of this shape."""
    where = np.indices(shape)
    match per:
        case PerTensor():
            groups, size = [], []
        case PerChannel(axis):
            groups, size = [where[axis]], [shape[axis]]
        case PerToken():
            groups, size = list(where[:-1]), list(shape[:-1])
        case PerGroup(width):
            groups, size = [*where[:-1], where[-1] // width], [*shape[:-1], shape[-1] // width]
        case PerBlock(rows, columns):
            groups = [*where[:-2], where[-2] // rows, where[-1] // columns]
            size = [*shape[:-2], shape[-2] // rows, shape[-1] // columns]
    index = np.zeros(shape, dtype=np.int64)
    for position, count in zip(groups, size, strict=True):
        index = index * count + position
    return torch.from_numpy(index)


def scale_shape(shape: tuple[int, ...], per: object) -> tuple[int, ...]:
    match per:
        case PerTensor():
            return ()
        case PerChannel(axis):
            return (shape[axis],)
        case PerToken():
            return shape[:-1]
        case PerGroup(width):
            return (*shape[:-1], shape[-1] // width)
        case PerBlock(rows, columns):
            return (*shape[:-2], shape[-2] // rows, shape[-1] // columns)
    raise AssertionError(per)


def each(param: Tensor | None, shape: tuple[int, ...], per: object) -> Tensor:
    """The scale or zero point of every element, in float64."""
    if param is None:
        return torch.zeros(shape, dtype=torch.float64)
    return param.detach().cpu().double().reshape(-1)[group_index(shape, per)]


def quantize(x: Tensor, scale: Tensor, zero_point: Tensor | None, grid: Grid, per: object) -> Codes:
    shape = tuple(x.shape)
    s, z = each(scale, shape, per), each(zero_point, shape, per)
    v = x.detach().cpu().double() / s
    unclamped = torch.round(v) + z
    margin = (v - torch.floor(v) - 0.5).abs()
    return Codes(unclamped.clamp(grid.quant_min, grid.quant_max), unclamped, margin)


def dequantize(codes: Tensor, scale: Tensor, zero_point: Tensor | None, per: object) -> Tensor:
    shape = tuple(codes.shape)
    return (codes.double() - each(zero_point, shape, per)) * each(scale, shape, per)


def ends(x: Tensor, scale: Tensor, zero_point: Tensor | None, grid: Grid, per: object) -> tuple[Tensor, Tensor]:
    """lo and hi of every element."""
    shape = tuple(x.shape)
    s, z = each(scale, shape, per), each(zero_point, shape, per)
    return (grid.quant_min - z) * s, (grid.quant_max - z) * s


def gradient(
    g: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None, grid: Grid, per: object, ste: SteKind
) -> tuple[Tensor, Tensor]:
    """dx, and the margin: how far x is from where the rule jumps, in steps (infinite for a rule without jumps)."""
    g, wide = g.detach().cpu().double(), x.detach().cpu().double()
    s = each(scale, tuple(x.shape), per)
    lo, hi = ends(x, scale, zero_point, grid, per)
    smooth = torch.full_like(wide, math.inf)
    to_ends = torch.minimum((wide - lo).abs(), (wide - hi).abs()) / s
    zero = torch.zeros_like(g)
    match ste:
        case SteKind.IDENTITY:
            return g, smooth
        case SteKind.CLIPPED_IDENTITY:
            return torch.where((lo <= wide) & (wide <= hi), g, zero), to_ends
        case SteKind.IN_RANGE:
            code = quantize(x, scale, zero_point, grid, per)
            inside = (grid.quant_min <= code.unclamped) & (code.unclamped <= grid.quant_max)
            return torch.where(inside, g, zero), code.margin
        case SteKind.TANH:
            return torch.where(wide.isfinite(), g * (1 - torch.tanh(wide / s) ** 2), zero), smooth
        case SteKind.HARD_TANH:
            bound = torch.where(wide >= 0, hi, -lo)
            return torch.where(wide.abs() < bound, g * (1 - wide.abs() / bound), zero), smooth
    raise AssertionError(ste)


def learned_gradient(
    g: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None, grid: Grid, per: object, method: str = "lsq"
) -> tuple[Tensor, Tensor, Tensor]:
    """ds and dz before any gradient scale, and the largest error that float32 terms may add up to, per group."""
    shape = tuple(x.shape)
    g, wide = g.detach().cpu().double(), x.detach().cpu().double()
    s, z = each(scale, shape, per), each(zero_point, shape, per)
    lo, hi = ends(x, scale, zero_point, grid, per)
    v = wide / s
    if method == "pact":
        term = torch.where(wide >= hi, grid.quant_max - z, torch.where(wide <= lo, grid.quant_min - z, 0.0))
        outside = (wide >= hi) | (wide <= lo)
    else:
        inside = torch.round(v) - v
        term = torch.where(wide > hi, grid.quant_max - z, torch.where(wide < lo, grid.quant_min - z, inside))
        outside = (wide > hi) | (wide < lo)
    ds = torch.where(wide.isnan(), torch.zeros_like(g), g * term)
    dz = torch.where(outside, -g * s, torch.zeros_like(g))
    # One rounding of x / s, one of the difference, one of the product, n of the sum.
    size = 2.0**-24 * (
        g.abs() * (torch.nan_to_num(v, posinf=0, neginf=0).abs().clamp_max(70000) + term.abs().nan_to_num() + 1)
    )
    index, count = group_index(shape, per).reshape(-1), math.prod(scale_shape(shape, per))

    def total(terms: Tensor) -> Tensor:
        return torch.zeros(count, dtype=torch.float64).index_add(0, index, terms.reshape(-1))

    elements = torch.zeros(count, dtype=torch.float64).index_add(0, index, torch.ones_like(ds).reshape(-1))
    allowed = 4 * total(size) + 2.0**-24 * elements * total(ds.abs())
    target = scale_shape(shape, per)
    return tuple(value.reshape(target) for value in (total(ds), total(dz), allowed))


def symmetric_scale(x: Tensor, grid: Grid, per: object, statistic: str = "abs_max") -> Tensor:
    values = _groups(x, per)
    measure = max if statistic == "abs_max" else (lambda found: sum(found) / len(found))
    return _scales(
        [max((measure([abs(v) for v in group]) if group else 0) / grid.quant_max, 1e-12) for group in values], x, per
    )


def affine_params(x: Tensor, grid: Grid, per: object) -> tuple[Tensor, Tensor, Tensor]:
    """Scale, zero point, and the distance of the zero point before rounding from the nearest half-integer."""
    scales, zero_points, margins = [], [], []
    for group in _groups(x, per):
        lo, hi = min([0.0, *group]), max([0.0, *group])
        s = max((hi - lo) / (grid.quant_max - grid.quant_min), 1e-12)
        scales.append(s)
        z = grid.quant_min - lo / s
        zero_points.append(min(max(round(z), grid.quant_min), grid.quant_max))
        margins.append(abs(z - math.floor(z) - 0.5))
    return _scales(scales, x, per), _scales(zero_points, x, per), _scales(margins, x, per)


def _groups(x: Tensor, per: object) -> list[list[float]]:
    """The finite values of each scale group."""
    shape = tuple(x.shape)
    groups: list[list[float]] = [[] for _ in range(math.prod(scale_shape(shape, per)))]
    for value, index in zip(
        x.double().cpu().reshape(-1).tolist(), group_index(shape, per).reshape(-1).tolist(), strict=True
    ):
        if math.isfinite(value):
            groups[index].append(value)
    return groups


def _scales(values: list[float], x: Tensor, per: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).reshape(scale_shape(tuple(x.shape), per))
