"""noise: how much of the signal each quantizer of a model leaves."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.flow import call, in_eval_mode
from lowbit.model import require_preparation
from lowbit.preparation import quantizers


@dataclass(frozen=True)
class NoiseLine:
    """signal-to-noise of one quantizer: 10 log10(mean(x^2) / mean((q(x) - x)^2)) dB; inf where nothing is lost"""

    path: str
    role: str
    decibels: float


@dataclass(frozen=True)
class Noise:
    """The lines, the noisiest first; ``str`` gives a table."""

    lines: tuple[NoiseLine, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"lines": [asdict(line) for line in self.lines]}

    def __str__(self) -> str:
        width = max((len(line.path) for line in self.lines), default=0)
        return "\n".join(f"{line.path:{width}}  {line.role:10}  {line.decibels:6.1f} dB" for line in self.lines)


@torch.no_grad()
def noise(model: nn.Module, batch: Any) -> Noise:
    """Signal-to-noise of every quantizer, weights and activations, on one batch in eval mode; the noisiest first

    What reaches a quantizer has been through those before it. A batch is passed as ``model(b)``, ``model(*b)`` or
    ``model(**b)`` by its type. No state changes.
    """
    require_preparation(model)
    powers: dict[str, list[float]] = {}
    found = list(quantizers(model))
    handles = [
        quantizer.register_forward_hook(_measure(powers.setdefault(path, [0.0, 0.0, 0.0])))
        for path, _, quantizer in found
    ]
    try:
        with in_eval_mode(model):
            call(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    lines = [NoiseLine(path, role, _decibels(*powers[path][:2])) for path, role, _ in found if powers[path][2]]
    return Noise(tuple(sorted(lines, key=lambda line: line.decibels)))


def _measure(powers: list[float]) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        x, y = args[0].double(), output.double()
        powers[0] += x.square().sum().item()
        powers[1] += (y - x).square().sum().item()
        powers[2] += x.numel()

    return hook


def _decibels(signal: float, lost: float) -> float:
    if lost == 0:
        return math.inf
    return 10 * math.log10(signal / lost) if signal > 0 else -math.inf
