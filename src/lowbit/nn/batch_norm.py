"""FoldedBatchNorm: a batch norm whose factor is part of the weight of the layer before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lowbit.nn.swap import Swapped

# A smaller factor would leave nothing of the weight that it multiplies; the quantized weight is divided by it again.
_LEAST = 1e-5


class FoldedBatchNorm(Swapped):
    """y = x where the layer before has folded it in, else gamma * (x - mu) / sqrt(var + eps) + beta

    It is settled, and so folded in, in eval mode and once frozen: mu and var are the running statistics. In training
    they are the batch's, the running ones follow, and the layer before quantizes its weight as if it were folded.
    """

    weight: Any
    bias: Any
    running_mean: Any
    running_var: Any
    eps: float

    def equip(self) -> None:
        """Start unfrozen."""
        self.frozen = False
        self._layer: tuple[Any, ...] = ()

    def strip(self) -> None:
        """Remove what ``equip`` and ``follow`` added."""
        del self.frozen, self._layer

    def follow(self, layer: nn.Module) -> None:
        """``layer`` comes before."""
        self._layer = (layer,)

    @property
    def is_settled(self) -> bool:
        """Whether the running statistics are what normalizes."""
        return self.frozen or not self.training

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's own name)
        if self.is_settled and self._layer[0].folds:
            return input
        if self.frozen and self.training:
            self.training = False
            try:
                return super().forward(input)
            finally:
                self.training = True
        return super().forward(input)

    def factor(self) -> Tensor:
        """f = gamma / sqrt(running_var + eps); without a gradient, and not near 0, while the batch's statistics rule"""
        deviation = torch.sqrt(self.running_var + self.eps)
        gamma = torch.ones_like(deviation) if self.weight is None else self.weight
        if self.is_settled:
            return gamma / deviation
        gamma = gamma.detach()
        return torch.where(gamma < 0, -1.0, 1.0) * gamma.abs().clamp_min(_LEAST) / deviation

    def folded_bias(self, bias: Tensor | None) -> Tensor:
        """b' = (b - mu) * f + beta"""
        centred = -self.running_mean if bias is None else bias - self.running_mean
        folded = centred * self.factor()
        return folded if self.bias is None else folded + self.bias
