"""Small networks, one for each way that data flows, and what tests ask of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compare import assert_same_bits
from lowbit.preparation import quantizers


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Residual(nn.Module):
    """y = x + conv2(relu(conv1(x)))"""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.relu(self.conv1(x)))


class Projections(nn.Module):
    """Three layers of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) * torch.sigmoid(self.k(x)) + torch.tanh(self.v(x))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, index: Tensor) -> Tensor:
        return self.head(self.embedding(index))


class Joined(nn.Module):
    """Two branches, joined, moved about, and given to a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)
        self.after = nn.Conv2d(8, 4, 1)
        self.also = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([self.left(x), self.right(x)], 1)
        return self.after(joined).mean((2, 3))[:, :2] + self.also(joined.mean((2, 3)))


class Own(nn.Module):
    """y = linear(x, w, b), by functional; ``also`` says what else takes w."""

    def __init__(self, also: Callable[[Any, Tensor], Tensor] = lambda self, y: y) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 8))
        self.b = nn.Parameter(torch.randn(6))
        self.also = also

    def forward(self, x: Tensor) -> Tensor:
        return self.also(self, F.linear(x, self.w, self.b))


def images(count: int = 2, channels: int = 3, size: int = 6) -> Tensor:
    return torch.randn(count, channels, size, size)


def all_state(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def assert_same_states(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(actual) == list(expected)
    for key, value in expected.items():
        assert_same_bits(actual[key], value)


def activations(model: nn.Module) -> dict[str, Any]:
    return {path: quantizer for path, role, quantizer in quantizers(model) if role != "weight"}


def folded_pair(gamma: Tensor | None = None) -> nn.Sequential:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([0.5, -1.5, 2.0, 0.1]) if gamma is None else gamma)
        model[1].bias.copy_(torch.randn(4))
        model[1].running_mean.copy_(torch.randn(4))
        model[1].running_var.copy_(torch.rand(4) + 0.3)
    return model
