"""From data to scale and zero point: the statistics kernels and the arithmetic of ``lowbit.scale`` in one call.

With ``ranks``, x is this rank's part of a batch, and the result is that of the whole batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.granularity import Granularity
from lowbit.grid import Grid
from lowbit.kernels import plan
from lowbit.kernels.precision import math_dtype
from lowbit.ranks import Ranks
from lowbit.scale import affine_params, symmetric_scale


@torch.no_grad()
def abs_max(x: Tensor, per: Granularity, ranks: Ranks | None = None) -> Tensor:
    """m[c] = max(abs(x)) over the finite x of group c, 0 where there is none"""
    magnitude = plan.run("abs_max", x, x.detach(), per=per)
    return magnitude if ranks is None else ranks.max(magnitude)


@torch.no_grad()
def min_max(
    x: Tensor, per: Granularity, ranks: Ranks | None = None, *, with_zero: bool = False
) -> tuple[Tensor, Tensor]:
    """lo[c], hi[c] = min(x), max(x) over the finite x of group c, 0 and 0 where there is none

    ``with_zero``: the caller widens the range to hold 0, so that a rank without data may pass for one with zeros.
    """
    low, high = plan.run("min_max", x, x.detach(), per=per)
    if ranks is None:
        return low, high
    return ranks.range(low, high, None if with_zero else count_finite(x, per) > 0)


@torch.no_grad()
def count_finite(x: Tensor, per: Granularity) -> Tensor:
    """n[c] = how many finite x group c has"""
    return per.reduce(torch.sum, per.split(x.detach()).isfinite().long())


def follow(
    state: list[Tensor], x: Tensor, per: Granularity, decay: float, grid: Grid, ranks: Ranks | None = None
) -> None:
    """Take x into an EMA's state: scale and initialized; affine: low, high, scale, zero point, initialized"""
    if ranks is None and plan.follow(state, x, per, decay, grid):
        return
    symmetric = len(state) == 2
    batch: tuple[Tensor, ...] = (abs_max(x, per, ranks),) if symmetric else min_max(x, per, ranks)
    if state[0].dtype == torch.float64:  # a module moved to double
        batch = tuple(value.double() for value in batch)
    plan.update(state, "ema_scale" if symmetric else "ema_range", batch[0], *batch, *state, decay, grid=grid)


@torch.no_grad()
def mean_abs(x: Tensor, per: Granularity, ranks: Ranks | None = None) -> Tensor:
    """m[c] = mean(abs(x)) over the finite x of group c, 0 where there is none"""
    mean = plan.run("mean_abs", x, x.detach(), per=per)
    return mean if ranks is None else ranks.mean(mean, count_finite(x, per))


@torch.no_grad()
def mean_std(x: Tensor, per: Granularity, ranks: Ranks | None = None) -> tuple[Tensor, Tensor]:
    """mu[c], sigma[c] = mean(x), sqrt(mean((x - mu)^2)) over the finite x of group c, 0 and 0 where there is none"""
    mean, std = plan.run("mean_std", x, x.detach(), per=per)
    if ranks is None:
        return mean, std
    count = count_finite(x, per)
    joint = ranks.mean(mean, count)
    # A rank's mean((x - mu)^2) is its own variance and how far its own mean lies from that of all.
    variance = ranks.mean(std.double().square() + (mean.double() - joint.double()).square(), count)
    return joint, variance.sqrt().to(std.dtype)


@torch.no_grad()
def least_error_params(
    x: Tensor, *, grid: Grid, per: Granularity, symmetric: bool, candidates: int = 50, ranks: Ranks | None = None
) -> tuple[Tensor, Tensor | None]:
    """s, z (symmetric: z None): of ``candidates`` shrunken ranges, the one with the least mean((y - x)^2)"""
    x = x.detach().to(math_dtype(x.dtype))
    low, high = (abs_max(x, per, ranks),) * 2 if symmetric else min_max(x, per, ranks, with_zero=True)

    def params(share: float) -> tuple[Tensor, Tensor | None]:
        return (
            (symmetric_scale(high * share, grid), None) if symmetric else affine_params(low * share, high * share, grid)
        )

    found = [params(step / candidates) for step in range(candidates, 0, -1)]
    losses = []
    for s, z in found:
        error = plan.run("fake_quantize", x, x, s, z, grid=grid, per=per) - x
        losses.append(plan.run("mean_abs", x, error * error, per=per))
    if ranks is not None:
        losses = list(ranks.mean(torch.stack(losses), count_finite(x, per)))
    best = torch.full_like(high, torch.inf)
    scale, zero_point = found[0]
    for loss, (s, z) in zip(losses, found, strict=True):
        better = loss < best
        scale = torch.where(better, s, scale)
        zero_point = None if z is None or zero_point is None else torch.where(better, z, zero_point)
        best = torch.minimum(loss, best)
    return scale, zero_point


@torch.no_grad()
def params_from_data(
    x: Tensor,
    *,
    grid: Grid,
    per: Granularity,
    symmetric: bool,
    statistic: str = "abs_max",
    ranks: Ranks | None = None,
) -> tuple[Tensor, Tensor | None]:
    """s, z of the current data: symmetric from abs_max or mean_abs (z None), affine from min and max"""
    if not symmetric:
        return affine_params(*min_max(x, per, ranks, with_zero=True), grid)
    magnitude = mean_abs(x, per, ranks) if statistic == "mean_abs" else abs_max(x, per, ranks)
    return symmetric_scale(magnitude, grid), None
