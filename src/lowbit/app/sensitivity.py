"""sensitivity: which layer's quantizers cost how much accuracy, measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from lowbit.app.fit import count_hits
from lowbit.app.sources import Source
from lowbit.nn.slots import Slotted
from lowbit.preparation import slotted_modules


@dataclass(frozen=True)
class SensitivityLine:
    """The accuracy on held-out data, in %, with only this layer left in float, and what that gains in points"""

    layer: str
    accuracy: float
    gain: float


@dataclass(frozen=True)
class Sensitivity:
    """The layers, the one that gains most by float first; ``quantized``: with all of them quantized, ``of`` so many"""

    quantized: float
    of: int
    lines: tuple[SensitivityLine, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"lines": [asdict(line) for line in self.lines]}


@torch.no_grad()
def measure_sensitivity(
    model: nn.Module, data: Source, on_layer: Callable[[str, int, int], None] | None = None
) -> Sensitivity:
    """accuracy(all quantized but one layer) - accuracy(all quantized), for each layer, on held-out data

    A layer's quantizers are those of its weight and of what comes in, also where it shares one with other layers,
    which then lose it too. ``on_layer`` is told each layer, how many are done, and of how many. The model stays as it
    is.
    """
    layers = [(path, found) for path, holder in slotted_modules(model) if (found := _quantizers(holder))]
    hits, count = count_hits(model, data, data.held_out)
    lines = []
    for done, (path, found) in enumerate(layers):
        if on_layer is not None:
            on_layer(path, done, len(layers))
        with _off(found):
            right, _ = count_hits(model, data, data.held_out)
        lines.append(SensitivityLine(path, 100 * right / count, 100 * (right - hits) / count))
    lines.sort(key=lambda line: -line.gain)
    return Sensitivity(100 * hits / count, count, tuple(lines))


def _quantizers(holder: Slotted) -> list[Any]:
    return [quantizer for slot in holder.slots() if (quantizer := holder.quantizer(slot)) is not None]


@contextmanager
def _off(found: list[Any]) -> Iterator[None]:
    before = [quantizer.enabled for quantizer in found]
    try:
        for quantizer in found:
            quantizer.enabled = False
        yield
    finally:
        for quantizer, enabled in zip(found, before, strict=True):
            quantizer.enabled = enabled
