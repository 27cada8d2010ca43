"""Networks for schedules."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor, nn

import lowbit
from lowbit import EMA, Learned, PerChannel, QuantSpec, Recipe
from lowbit.nn.batch_norm import FoldedBatchNorm
from lowbit.preparation import quantizers
from lowbit.schedule import Schedule

LEARNED = Recipe(
    weight=QuantSpec(bits=3, per=PerChannel(0), scale_mode=Learned()),
    activation=QuantSpec(bits=4, scale_mode=Learned(batch_axis=0)),
)
AVERAGED = Recipe(
    weight=QuantSpec(bits=4, scale_mode=EMA(0.5)), activation=QuantSpec(bits=8, symmetric=False, scale_mode=EMA(0.9))
)


class Net(nn.Module):
    """One batch norm that folds, and one that can't, for it comes before its convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3)
        self.folded = nn.BatchNorm2d(4)
        self.apart = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.folded(self.first(x)).relu()
        return self.second(self.apart(x)).mean((2, 3))


def images(seed: int = 0) -> Tensor:
    return torch.randn(4, 2, 7, 7, generator=torch.Generator().manual_seed(seed)) + 0.5


def prepared_net(recipe: Recipe = AVERAGED) -> Any:
    torch.manual_seed(0)
    model = lowbit.prepare(Net(), recipe, images())
    assert isinstance(model.folded, FoldedBatchNorm)
    assert not isinstance(model.apart, FoldedBatchNorm)
    return model


def linear(weight: QuantSpec, layer: nn.Module | None = None) -> Any:
    torch.manual_seed(0)
    return lowbit.prepare(nn.Linear(4, 3, bias=False) if layer is None else layer, Recipe(weight=weight))


def flags(model: nn.Module) -> dict[str, set[bool]]:
    """What is on, by role."""
    found: dict[str, set[bool]] = {}
    for _, role, quantizer in quantizers(model):
        found.setdefault(role, set()).add(quantizer.enabled)
    return found


def train(model: Any, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for number in range(first, last):
        optimizer.zero_grad()
        model(images(number)).square().sum().backward()
        optimizer.step()


def every_role() -> nn.Module:
    spec = QuantSpec(bits=8, scale_mode=EMA())
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    return lowbit.prepare(attention, Recipe(weight=spec, activation=spec, output=spec))


def flip(weight: Tensor, schedule: Schedule, times: int) -> None:
    """Move every weight to and fro."""
    for number in range(times):
        with torch.no_grad():
            weight.copy_(torch.full_like(weight, 0.1 + number % 2) * 0.9)
        schedule.step()


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
