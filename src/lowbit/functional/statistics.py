"""From data to scale and zero point: the statistics kernels and the arithmetic of ``lowbit.scale`` in one call."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.granularity import Granularity
from lowbit.grid import Grid
from lowbit.kernels import plan
from lowbit.kernels.precision import math_dtype
from lowbit.scale import affine_params, symmetric_scale


@torch.no_grad()
def abs_max(x: Tensor, per: Granularity) -> Tensor:
    """m[c] = max(abs(x)) over the finite x of group c, 0 where there is none"""
    return plan.run("abs_max", x, x.detach(), per=per)


@torch.no_grad()
def min_max(x: Tensor, per: Granularity) -> tuple[Tensor, Tensor]:
    """lo[c], hi[c] = min(x), max(x) over the finite x of group c, 0 and 0 where there is none"""
    return plan.run("min_max", x, x.detach(), per=per)


@torch.no_grad()
def blend(batch: tuple[Tensor, ...], state: list[Tensor], decay: float, grid: Grid) -> tuple[Tensor, ...]:
    """The state of an EMA after a batch: scale and initialized; affine: low, high, scale, zero point, initialized"""
    op = "ema_scale" if len(batch) == 1 else "ema_range"
    if state[0].dtype == torch.float64:  # a module moved to double
        batch = tuple(value.double() for value in batch)
    return plan.run(op, batch[0], *batch, *state, decay, grid=grid)


@torch.no_grad()
def mean_abs(x: Tensor, per: Granularity) -> Tensor:
    """m[c] = mean(abs(x)) over the finite x of group c, 0 where there is none"""
    return plan.run("mean_abs", x, x.detach(), per=per)


@torch.no_grad()
def mean_std(x: Tensor, per: Granularity) -> tuple[Tensor, Tensor]:
    """mu[c], sigma[c] = mean(x), sqrt(mean((x - mu)^2)) over the finite x of group c, 0 and 0 where there is none"""
    return plan.run("mean_std", x, x.detach(), per=per)


@torch.no_grad()
def least_error_params(x: Tensor, *, grid: Grid, per: Granularity, candidates: int = 50) -> tuple[Tensor, Tensor]:
    """s, z of an affine quantizer: of ``candidates`` shrunken ranges, the one with the least mean((y - x)^2)"""
    x = x.detach().to(math_dtype(x.dtype))
    low, high = min_max(x, per)
    best = torch.full_like(low, torch.inf)
    scale, zero_point = affine_params(low, high, grid)
    for step in range(candidates, 0, -1):
        s, z = affine_params(low * step / candidates, high * step / candidates, grid)
        error = plan.run("fake_quantize", x, x, s, z, grid=grid, per=per) - x
        loss = plan.run("mean_abs", x, error * error, per=per)
        better = loss < best
        scale, zero_point = torch.where(better, s, scale), torch.where(better, z, zero_point)
        best = torch.minimum(loss, best)
    return scale, zero_point


@torch.no_grad()
def params_from_data(
    x: Tensor, *, grid: Grid, per: Granularity, symmetric: bool, statistic: str = "abs_max"
) -> tuple[Tensor, Tensor | None]:
    """s, z of the current data: symmetric from abs_max or mean_abs (z None), affine from min and max"""
    if not symmetric:
        return affine_params(*min_max(x, per), grid)
    magnitude = mean_abs(x, per) if statistic == "mean_abs" else abs_max(x, per)
    return symmetric_scale(magnitude, grid), None
