"""Batch norms of a prepared model: they can be frozen, and be part of the weight of the layer before them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lowbit.nn.swap import Swapped, remove

# A smaller factor would leave nothing of the weight that it multiplies; the quantized weight is divided by it again.
_LEAST = 1e-5


class FreezableBatchNorm(Swapped):
    """y = gamma * (x - mu) / sqrt(var + eps) + beta,  by the running statistics in eval mode and once frozen"""

    def equip(self) -> None:
        """Start unfrozen."""
        self.frozen = False

    def strip(self) -> None:
        """Remove what ``equip`` added."""
        remove(self, "frozen")

    @property
    def is_settled(self) -> bool:
        """Whether the running statistics are what normalizes, and stay as they are."""
        return self.frozen or not self.training

    def get_extra_state(self) -> Tensor:
        """The flag, as a tensor, so that a state_dict holds nothing else."""
        return torch.tensor([self.frozen], dtype=torch.int32)

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the flag."""
        self.frozen = bool(state.item())

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's own name)
        if not (self.frozen and self.training):
            return self.float_class.forward(self, input)
        self.training = False
        try:
            return self.float_class.forward(self, input)
        finally:
            self.training = True


class FoldedBatchNorm(FreezableBatchNorm):
    """y = x where the layer before has folded it in, which it has once settled; else as any batch norm

    In training the statistics are the batch's, the running ones follow, and the layer before quantizes its weight as if
    this were folded in.
    """

    weight: Any
    bias: Any
    running_mean: Any
    running_var: Any
    eps: float

    def equip(self) -> None:
        super().equip()
        self._layer: tuple[Any, ...] = ()

    def strip(self) -> None:
        super().strip()
        remove(self, "_layer")

    def follow(self, layer: nn.Module) -> None:
        """``layer`` comes before."""
        self._layer = (layer,)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's own name)
        return input if self.is_settled and self._layer[0].folds else super().forward(input)

    def factor(self) -> Tensor:
        """f = gamma / sqrt(running_var + eps); without a gradient, and not near 0, while the batch's statistics rule"""
        deviation = torch.sqrt(self.running_var + self.eps)
        gamma = torch.ones_like(deviation) if self.weight is None else self.weight
        if self.is_settled:
            return gamma / deviation
        gamma = gamma.detach()
        return gamma.abs().clamp_min(_LEAST).copysign(gamma) / deviation

    def folded_bias(self, bias: Tensor | None) -> Tensor:
        """b' = (b - mu) * f + beta"""
        centred = -self.running_mean if bias is None else bias - self.running_mean
        folded = centred * self.factor()
        return folded if self.bias is None else folded + self.bias
