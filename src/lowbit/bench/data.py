"""Data: the tensors of one case, the same for every contender."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lowbit.bench.registry import GRID, Case, Op
from lowbit.functional.statistics import params_from_data

# The range is three standard deviations: 0.3 % of normal values are clipped.
_DEVIATIONS = 3.0


class Data(NamedTuple):
    """x (codes, for dequantize), the upstream gradient of the result, and the scale (of the data, where it follows)."""

    x: Tensor
    grad_output: Tensor
    scale: Tensor


def make_data(case: Case, device: torch.device, seed: int = 0) -> Data:
    """Normal values, a random scale near 3 / quant_max for each group, and normal gradients.

    No x lies within a step outside the range, where IN_RANGE and CLIPPED_IDENTITY differ: so a peer with either rule
    has the same right answer.
    """
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(case.shape, generator=generator, device=device)
    shape = case.per.scale_shape(case.shape)
    noise = torch.rand(shape, generator=generator, device=device)
    scale = _DEVIATIONS / GRID.quant_max * (0.9 + 0.2 * noise)
    if not case.op.follows_data:
        x = _avoid_bounds(x, scale, case)
    x = x.to(case.dtype)
    if case.channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    if case.op.follows_data:
        scale, _ = params_from_data(x, grid=GRID, per=case.per, symmetric=True)
    if case.op is Op.DEQUANTIZE:
        x = (x * 40).clamp(GRID.quant_min, GRID.quant_max).to(torch.int8).to(case.code_dtype)
    result_dtype = case.code_dtype if case.op is Op.QUANTIZE else case.dtype
    grad_output = torch.randn(case.shape, generator=generator, device=device).to(result_dtype)
    if case.channels_last:
        grad_output = grad_output.contiguous(memory_format=torch.channels_last)
    x.requires_grad_(x.is_floating_point())
    return Data(x, grad_output, scale.requires_grad_(case.op is Op.LEARNED))


def in_steps(x: Tensor, scale: Tensor, case: Case) -> Tensor:
    """x / s, in x's shape"""
    split = case.per.split(x)
    return case.per.join(split / case.per.spread(scale, split), x.shape)


def _avoid_bounds(x: Tensor, scale: Tensor, case: Case) -> Tensor:
    steps = in_steps(x, scale, case).abs()
    return torch.where((steps > GRID.quant_max - 1) & (steps < GRID.quant_max + 3), 0.9 * x, x)
