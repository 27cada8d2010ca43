"""Scales over twelve magnitudes, zero points over the grid, and inputs that reach every part of the law."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor

import oracle
from lowbit import Grid

Draw = Callable[[Grid, Tensor, Tensor, Generator], Tensor]


def scales(shape: tuple[int, ...], generator: Generator) -> Tensor:
    """From 1e-6 to 1e6, every magnitude alike; every other one a power of two."""
    exponent = (torch.rand(shape, generator=generator) - 0.5) * 12 * math.log2(10)
    rounded = torch.rand(shape, generator=generator) < 0.5
    return torch.exp2(torch.where(rounded, exponent.round(), exponent))


def zero_points(shape: tuple[int, ...], grid: Grid, generator: Generator) -> Tensor:
    return torch.randint(grid.quant_min, grid.quant_max + 1, shape, generator=generator, dtype=torch.int32)


def uniform_inputs(grid: Grid, s: Tensor, z: Tensor, generator: Generator) -> Tensor:
    """Over the grid and three steps beyond."""
    steps = grid.quant_max - grid.quant_min + 6
    return (grid.quant_min - 3 - z + torch.rand(s.shape, generator=generator) * steps) * s


def hard_inputs(grid: Grid, s: Tensor, z: Tensor, generator: Generator) -> Tensor:
    """Ties and ends with their neighbours, any float at all, zeros, subnormals, infinities; no NaN."""

    def pick(values: list[float]) -> Tensor:
        return torch.tensor(values)[torch.randint(len(values), s.shape, generator=generator)]

    tie = ((uniform_inputs(grid, s, z, generator) / s).floor() + 0.5) * s
    end = (pick([grid.quant_min, grid.quant_max]) - z + pick([-1, -0.5, 0, 0.5, 1])) * s
    any_float = torch.randint(-(2**31), 2**31, s.shape, generator=generator).to(torch.int32).view(torch.float32)
    odd = pick([0.0, -0.0, math.inf, -math.inf, 1e-45, -1e-45, 1e-39, -1e-39, 3.4e38, -3.4e38])
    away = pick([-math.inf, math.inf])
    return _mix([tie, tie.nextafter(away), end, end.nextafter(away), any_float.nan_to_num(0.0), odd], generator)


def mixed_inputs(grid: Grid, s: Tensor, z: Tensor, generator: Generator) -> Tensor:
    """Uniform and hard ones, half and half."""
    return _mix([draw(grid, s, z, generator) for draw in (uniform_inputs, hard_inputs)], generator)


def within(reach: float, draw: Draw) -> Draw:
    """The same draw, but no further than ``reach`` steps from 0."""

    def drawn(grid: Grid, s: Tensor, z: Tensor, generator: Generator) -> Tensor:
        return torch.clamp(draw(grid, s, z, generator), -reach * s, reach * s)

    return drawn


def case(
    grid: Grid, shape: tuple[int, ...], per: object, draw: Draw = mixed_inputs, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """x, scale and zero point of this granularity."""
    generator = torch.Generator().manual_seed(seed)
    params = oracle.scale_shape(shape, per)
    scale, zero_point = scales(params, generator), zero_points(params, grid, generator)
    return draw(grid, spread(scale, shape, per), spread(zero_point, shape, per), generator), scale, zero_point


def spread(param: Tensor, shape: tuple[int, ...], per: object) -> Tensor:
    """The scale or zero point of every element."""
    return param.flatten()[oracle.group_index(shape, per)]


def _mix(choices: list[Tensor], generator: Generator) -> Tensor:
    which = torch.randint(len(choices), choices[0].shape, generator=generator)
    return torch.stack(choices).gather(0, which.unsqueeze(0)).squeeze(0)
