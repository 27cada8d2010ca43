"""The inputs that every op must get right."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lowbit import Grid, PerBlock, PerChannel, PerGroup, PerTensor, PerToken

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

PERS = (PerTensor(), PerChannel(0), PerChannel(1), PerChannel(-1), PerToken(), PerGroup(4), PerBlock(3, 4))

GRIDS = (
    *(Grid(bits) for bits in (2, 3, 4, 8, 16)),
    *(Grid(bits, narrow=True) for bits in (2, 4, 8)),
    *(Grid(bits, signed=False) for bits in (1, 2, 4, 8, 16)),
)


def eps(dtype: torch.dtype) -> float:
    """Of the arithmetic: float32, or float64 for float64."""
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps


def random(shape: tuple[int, ...], *, seed: int = 0, spread: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64) * spread


def leaf(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """The same, for a gradient"""
    return random(shape, seed=seed).to(dtype).requires_grad_()


def hard_values() -> Tensor:
    """Ties of the scale 0.5, ends, zeros, subnormals, huge and non-finite values: 48 of them."""
    ties = [(k + 0.5) * 0.5 for k in range(-9, 9)]
    ends = [-64.0, -64.25, -63.75, 63.5, 63.75, 63.25, 4.0, -4.0, 3.5, 7.5, 7.75, 127.5]
    tiny = [0.0, -0.0, 1e-45, -1e-45, 1e-40, -1e-20, 1e-8, -1e-8]
    huge = [1e30, -1e30, 3e38, -3e38, 65504.0, -65504.0]
    odd = [math.inf, -math.inf, math.nan, -math.nan]
    return torch.tensor([*ties, *ends, *tiny, *huge, *odd], dtype=torch.float64)


def tensors(dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Named inputs of rank 2 or more, each fit for every granularity of PERS."""
    plain = random((6, 8)).to(dtype).to(device)
    return {
        "random": plain,
        "hard": hard_values().reshape(6, 8).to(dtype).to(device),
        "zeros": torch.zeros(6, 8, dtype=dtype, device=device),
        "transposed": random((8, 6)).to(dtype).to(device).t(),
        "strided": random((6, 16)).to(dtype).to(device)[:, ::2],
        "expanded": random((1, 8)).to(dtype).to(device).expand(6, 8),
        "channels_last": random((2, 4, 3, 8)).to(dtype).to(device).contiguous(memory_format=torch.channels_last),
        "odd": random((5, 3, 12)).to(dtype).to(device),
        "empty": torch.empty(0, 8, dtype=dtype, device=device).reshape(0, 8),
        "empty inside": torch.empty(6, 0, dtype=dtype, device=device),
    }


def params(x: Tensor, per: object, grid: Grid, *, affine: bool, seed: int = 1) -> tuple[Tensor, Tensor | None]:
    """A random scale, about the grid's own for x, and a random zero point inside the grid."""
    shape = per.scale_shape(x.shape)
    generator = torch.Generator().manual_seed(seed)
    size = 4.0 / max(grid.quant_max, 1)
    scale = ((torch.rand(shape, generator=generator) + 0.5) * size).to(x.device)
    if not affine:
        return scale, None
    zero_point = torch.randint(grid.quant_min, grid.quant_max + 1, shape, generator=generator, dtype=torch.int32)
    return scale, zero_point.to(x.device)
