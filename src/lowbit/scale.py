"""ScaleMode: where the grid lies; and the arithmetic from statistics to scale and zero point."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.division import divide
from lowbit.grid import Grid
from lowbit.record import TaggedRecord, check_choice, check_finite, check_flag, check_integer

SCALE_FLOOR = 1e-12


class NotCalibratedError(ValueError, RuntimeError):
    """A scale was asked for before any data gave one."""


class ScaleMode(TaggedRecord, tag="mode"):
    """How a scale follows the data: PerBatch, EMA, Fixed or Learned."""


@dataclass(frozen=True)
class PerBatch(ScaleMode, kind="per_batch"):
    """s = max(statistic(x) / quant_max, 1e-12) on every call, from the current data; no state.

    The statistic is max(abs(x)) or mean(abs(x)) of a symmetric quantizer; an affine one takes the data's min and max.
    """

    statistic: str = "abs_max"

    def __post_init__(self) -> None:
        check_choice("statistic", self.statistic, ("abs_max", "mean_abs"))


@dataclass(frozen=True)
class EMA(ScaleMode, kind="ema"):
    """state = decay * state + (1 - decay) * s_batch,  s = state

    The first batch with data is copied in, group by group; all-zero groups leave the state alone. An affine quantizer
    blends the range's two ends instead, and its scale and zero point follow from them.
    """

    decay: float = 0.99

    def __post_init__(self) -> None:
        decay = check_finite("decay", self.decay)
        if not 0 <= decay < 1:
            raise ValueError(f"decay is {self.decay}, but it must be at least 0 and below 1")


@dataclass(frozen=True)
class Fixed(ScaleMode, kind="fixed"):
    """s = state, as the constructor, ``update_params`` or a checkpoint set it."""


@dataclass(frozen=True)
class Learned(ScaleMode, kind="learned"):
    """s = max(parameter, 1e-3 * initial), with the gradient passed through that floor.

    - ``lsq``   ds = sum(g * (round(x / s) - x / s)) inside the range, g * (quant_min - z) or (quant_max - z) outside
    - ``lsq+``  the same, and a learned zero point where affine: dz = sum(-g * s) outside the range
    - ``pact``  ds = sum(g * quant_max) where x >= hi, nothing inside

    With ``grad_scale``, ds and dz are multiplied by 1 / sqrt(n * quant_max) (pact: 1 / quant_max^2, which moves the
    clip point ``quant_max * s`` as if it were the parameter). n counts the elements that share a scale, without
    ``batch_axis`` where one is named (activations), so that the batch size and the number of ranks do not matter.
    """

    method: str = "lsq"
    grad_scale: bool = True
    batch_axis: int | None = None

    def __post_init__(self) -> None:
        check_choice("method", self.method, ("lsq", "lsq+", "pact"))
        check_flag("grad_scale", self.grad_scale)
        if self.batch_axis is not None:
            check_integer("batch_axis", self.batch_axis, -64, 63)


def symmetric_scale(magnitude: Tensor, grid: Grid) -> Tensor:
    """s = max(magnitude / quant_max, 1e-12)"""
    return divide(magnitude, _divisor(grid.quant_max, magnitude)).clamp_min(SCALE_FLOOR)


def affine_params(lo: Tensor, hi: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """s = max((hi - lo) / (quant_max - quant_min), 1e-12),  z = clamp(round(quant_min - lo / s), quant_min, quant_max)

    The range is first widened to hold 0, so that 0 is represented exactly.
    """
    lo, hi = lo.clamp_max(0), hi.clamp_min(0)
    steps = _divisor(grid.quant_max - grid.quant_min, lo)
    scale = divide(hi - lo, steps)
    # A range wider than the dtype's largest number: divide before the difference, so that the scale stays finite.
    scale = torch.where(scale.isfinite(), scale, divide(hi, steps) - divide(lo, steps)).clamp_min(SCALE_FLOOR)
    return scale, nearest_zero_point(grid.quant_min - divide(lo, scale), grid)


def lsq_scale(mean_abs: Tensor, grid: Grid) -> Tensor:
    """s = 2 * mean(abs(x)) / sqrt(quant_max), the first scale of LSQ"""
    return divide(2 * mean_abs, _divisor(math.sqrt(grid.quant_max), mean_abs)).clamp_min(SCALE_FLOOR)


def lsq_plus_scale(mean: Tensor, std: Tensor, grid: Grid) -> Tensor:
    """s = max(abs(mu - 3 sigma), abs(mu + 3 sigma)) / 2^(b-1) (unsigned: quant_max), the first scale of LSQ+"""
    reach = torch.maximum((mean - 3 * std).abs(), (mean + 3 * std).abs())
    levels = 2 ** (grid.bits - 1) if grid.signed else grid.quant_max
    return divide(reach, _divisor(levels, reach)).clamp_min(SCALE_FLOOR)


def nearest_zero_point(zero_point: Tensor, grid: Grid) -> Tensor:
    """z = clamp(round(zero_point), quant_min, quant_max), as int32; integers are in the grid already"""
    if not zero_point.is_floating_point():
        return zero_point
    return zero_point.round().clamp(grid.quant_min, grid.quant_max).to(torch.int32)


def _divisor(value: float, like: Tensor) -> Tensor:
    return torch.full((), value, dtype=like.dtype, device=like.device)
