"""torch.ao's observers: the same ranges, and the same scales where the formulas are the same."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.ao.quantization.observer import (
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    PerChannelMinMaxObserver,
)

from compare import assert_same_bits
from lowbit import Grid, PerChannel, PerTensor
from lowbit.observers import MinMax, MovingAverage

EPS = torch.finfo(torch.float32).eps
PERS = (PerTensor(), PerChannel(0), PerChannel(1), PerChannel(2))
every_per = pytest.mark.parametrize("per", PERS, ids=str)
GRIDS = {"int8": (Grid(8), torch.qint8), "uint8": (Grid(8, signed=False), torch.quint8)}


def batches() -> list[Tensor]:
    """Ranges of every kind: growing and shrinking, above 0, below 0, and 0 throughout."""
    generator = torch.Generator().manual_seed(0)
    kinds = [(1, 0), (3, 1), (0.1, 5), (0.1, -5), (5, 0), (2, 0)]
    scaled = [torch.randn((6, 7, 8), generator=generator) * width + offset for width, offset in kinds]
    return [*scaled, torch.zeros(6, 7, 8)]


def scheme(per: object, *, symmetric: bool) -> torch.qscheme:
    named = ("per_channel" if isinstance(per, PerChannel) else "per_tensor", "symmetric" if symmetric else "affine")
    return getattr(torch, "_".join(named))


def min_max_peer(per: object, *, symmetric: bool = False, **options: object) -> torch.nn.Module:
    options["qscheme"] = scheme(per, symmetric=symmetric)
    return PerChannelMinMaxObserver(per.axis, **options) if isinstance(per, PerChannel) else MinMaxObserver(**options)


def average_peer(per: object, constant: float) -> torch.nn.Module:
    if isinstance(per, PerChannel):
        return MovingAveragePerChannelMinMaxObserver(constant, per.axis, qscheme=scheme(per, symmetric=False))
    return MovingAverageMinMaxObserver(constant)


@every_per
def test_min_max_ranges(per: object) -> None:
    ours, peer = MinMax(per), min_max_peer(per)
    for x in batches():
        ours.observe(x)
        peer(x)
        assert_same_bits(ours.low, peer.min_val)
        assert_same_bits(ours.high, peer.max_val)


@every_per
def test_moving_average_ranges_of_exact_values(per: object) -> None:
    """Eighths, halved: neither formula rounds."""
    ours, peer = MovingAverage(per, decay=0.5), average_peer(per, 0.5)
    for x in batches():
        eighths = (x * 8).round() / 8
        ours.observe(eighths)
        peer(eighths)
        assert_same_bits(ours.low, peer.min_val)
        assert_same_bits(ours.high, peer.max_val)


@every_per
@pytest.mark.parametrize("decay", [0.0, 0.9, 0.99])
def test_moving_average_ranges(per: object, decay: float) -> None:
    """ours: decay * m + (1 - decay) * x; theirs: m + (1 - decay) * (x - m). A batch adds three roundings to each."""
    ours, peer, largest = MovingAverage(per, decay=decay), average_peer(per, 1 - decay), 0.0
    for count, x in enumerate(batches()):
        ours.observe(x)
        peer(x)
        largest = max(largest, x.abs().max().item())
        slack = count * 6 * EPS * largest
        assert (ours.low - peer.min_val).abs().max() <= slack
        assert (ours.high - peer.max_val).abs().max() <= slack


@every_per
@pytest.mark.parametrize(("grid", "dtype"), GRIDS.values(), ids=GRIDS)
def test_affine_scales(per: object, grid: Grid, dtype: torch.dtype) -> None:
    for x in batches()[:-1]:
        ours, peer = MinMax(per), min_max_peer(per, dtype=dtype)
        ours.observe(x)
        peer(x)
        scale, zero_point = ours.quant_params(grid, symmetric=False)
        peer_scale, peer_zero_point = peer.calculate_qparams()
        assert_same_bits(scale, peer_scale.reshape(scale.shape))
        assert_same_bits(zero_point, peer_zero_point.reshape(scale.shape).to(torch.int32))


@every_per
def test_symmetric_scales_of_a_narrow_grid(per: object) -> None:
    """torch divides by (quant_max - quant_min) / 2, which is quant_max where the grid is narrow."""
    for x in batches()[:-1]:
        ours = MinMax(per)
        peer = min_max_peer(per, symmetric=True, dtype=torch.qint8, quant_min=-127, quant_max=127)
        ours.observe(x)
        peer(x)
        scale, zero_point = ours.quant_params(Grid(8, narrow=True), symmetric=True)
        assert_same_bits(scale, peer.calculate_qparams()[0].reshape(scale.shape))
        assert not zero_point.any()


DIFFERENCES = {
    # name: grid, symmetric, data, our scale, torch's scale
    "torch divides by 127.5": (Grid(8), True, [127.5], 127.5 / 127, 1.0),
    "torch's floor is one eps": (Grid(8), False, [0.0], 1e-12, EPS),
    "torch observes inf": (Grid(8), True, [127.0, math.inf], 1.0, math.inf),
}


@pytest.mark.parametrize(("grid", "symmetric", "data", "ours", "theirs"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_differences(grid: Grid, symmetric: bool, data: list[float], ours: float, theirs: float) -> None:
    x = torch.tensor(data)
    observer, peer = MinMax(), min_max_peer(PerTensor(), symmetric=symmetric, dtype=torch.qint8)
    observer.observe(x)
    peer(x)
    assert_same_bits(observer.quant_params(grid, symmetric)[0], torch.tensor(ours))
    assert_same_bits(peer.calculate_qparams()[0], torch.tensor([theirs]))
    assert observer.nonfinite == (~x.isfinite()).sum()
