"""Oscillation: weights that flip between two codes, and what stops them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.fake_quantize import FakeQuantize
from lowbit.functional import dequantize, quantize
from lowbit.functional import round as nearest
from lowbit.grid import Grid
from lowbit.kernels.precision import math_dtype
from lowbit.nn.slots import Slotted, rows
from lowbit.preparation import slotted_modules
from lowbit.record import Record, check_finite, check_integer
from lowbit.scale import EMA, PerBatch


@dataclass(frozen=True)
class Oscillation(Record):
    """f = m * o + (1 - m) * f,  e = m * q + (1 - m) * e;  a weight with f > threshold is frozen at the code round(e)

    q is the weight's code after an optimizer step, o is 1 where q changed in the direction opposite to its last change
    and else 0, m is the momentum. The first q seen is copied into e, and f starts at 0.

    - ``threshold`` is one number, or (first, last): last + (first - last) * (1 + cos(pi * t / steps)) / 2, with t the
      steps since ``start``, and last from t = ``steps`` on.
    - ``start`` is the step from which codes are followed.

    A frozen weight is put back after every optimizer step, which moves it by its momentum and decay:

    - under Learned and Fixed scales to w = (code - z) * s, so that it keeps its code while the scale moves;
    - under PerBatch and EMA, where the scale itself follows the weights, to the value that w had when it froze: a scale
      taken from weights that are taken from the scale would sink step by step.

    From "Overcoming Oscillations in Quantization-Aware Training", arXiv 2203.11086.

    >>> Oscillation(threshold=(0.04, 0.01), steps=100).threshold_at(50)
    0.025
    """

    threshold: float | tuple[float, float]
    momentum: float = 0.01
    start: int = 0
    steps: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.threshold, list):  # as TOML and JSON have it
            object.__setattr__(self, "threshold", tuple(self.threshold))
        pair = isinstance(self.threshold, tuple)
        if isinstance(self.threshold, tuple) and len(self.threshold) != 2:
            raise ValueError(f"threshold is {self.threshold!r}, but it must be one number, or two: (first, last)")
        for number in self._ends:
            if not 0 <= check_finite("threshold", number) < 1:
                raise ValueError(f"threshold is {self.threshold!r}, but it must be at least 0 and below 1")
        if not 0 < check_finite("momentum", self.momentum) <= 1:
            raise ValueError(f"momentum is {self.momentum}, but it must be above 0 and at most 1")
        check_integer("start", self.start, 0)
        if self.steps is not None:
            check_integer("steps", self.steps, 1)
        if pair != (self.steps is not None):
            raise ValueError(
                f"threshold is {self.threshold!r} and steps is {self.steps!r}; a threshold (first, last) needs the "
                "steps it takes, and one number takes none"
            )

    @property
    def _ends(self) -> tuple[float, float]:
        return self.threshold if isinstance(self.threshold, tuple) else (self.threshold, self.threshold)

    def threshold_at(self, step: int) -> float:
        """The threshold in force at this step."""
        first, last = self._ends
        passed = 1.0 if self.steps is None else min(max(step - self.start, 0) / self.steps, 1.0)
        return last + (first - last) * (1 + math.cos(math.pi * passed)) / 2


class CodeTrack:
    """The codes of one weight from step to step, and which of its elements are frozen.

    ``state`` is empty before the first step; then it holds tensors of the weight's shape: code, direction (of the last
    change), frequency (f), average (e), frozen, and held (the code, or value, of what is frozen).
    """

    def __init__(self, holder: Slotted, slot: str) -> None:
        self.holder, self.slot = holder, slot
        self.state: dict[str, Tensor] = {}

    @property
    def weight(self) -> nn.Parameter:
        """The float weight."""
        weight = weight_of(self.holder, self.slot)
        assert weight is not None
        return weight

    @property
    def quantizer(self) -> FakeQuantize:
        """What quantizes it."""
        return self.holder.quantizer(self.slot)

    @property
    def frozen_share(self) -> float:
        """The share of elements that are frozen."""
        frozen = self.state.get("frozen")
        return 0.0 if frozen is None or frozen.numel() == 0 else frozen.sum().item() / frozen.numel()

    @torch.no_grad()
    def step(self, momentum: float, threshold: float) -> None:
        """Put frozen elements back, take in the codes, and freeze what oscillates; nothing while not quantized."""
        if not (self.quantizer.enabled and self.quantizer.is_ready):
            return
        if self.state:
            self._put_back()
        code = self._codes()
        if not self.state:
            self.state = self._first(code)
        old = self.state
        change = (code.to(torch.int32) - old["code"]).sign().to(torch.int8)
        oscillates = (change * old["direction"] < 0).to(old["frequency"].dtype)
        frequency = momentum * oscillates + (1 - momentum) * old["frequency"]
        average = momentum * code.to(old["average"].dtype) + (1 - momentum) * old["average"]
        freezing = (frequency > threshold) & ~old["frozen"]
        target = nearest(average)
        if self._follows_weight:
            target = self._values(target).to(target.dtype)
        self.state = {
            "code": code,
            "direction": torch.where(change != 0, change, old["direction"]),
            "frequency": frequency,
            "average": average,
            "frozen": old["frozen"] | freezing,
            "held": torch.where(freezing, target, old["held"]),
        }
        self._put_back()

    def checked(self, name: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A state that was saved, where this weight is, once it fits."""
        wanted = self._first(torch.zeros_like(self.weight, dtype=_code_dtype(self.quantizer.grid)))
        if state and state.keys() != wanted.keys():
            raise ValueError(f"the state of {name} has the keys {', '.join(state)}, but needs {', '.join(wanted)}")
        shape = tuple(self.weight.shape)
        for tensor in state.values():
            if tuple(tensor.shape) != shape:
                raise ValueError(f"the state of {name} has shape {tuple(tensor.shape)}, but the weight has {shape}")
        return {key: tensor.to(wanted[key]) for key, tensor in state.items()}

    def _first(self, code: Tensor) -> dict[str, Tensor]:
        real = code.to(math_dtype(self.weight.dtype))
        return {
            "code": code,
            "direction": torch.zeros_like(code, dtype=torch.int8),
            "frequency": torch.zeros_like(code, dtype=torch.float32),
            "average": real,
            "frozen": torch.zeros_like(code, dtype=torch.bool),
            "held": torch.zeros_like(real),
        }

    @property
    def _follows_weight(self) -> bool:
        return isinstance(self.quantizer.scale_mode, PerBatch | EMA)

    def _put_back(self) -> None:
        weight, frozen, held = self.weight, self.state["frozen"], self.state["held"]
        value = held if self._follows_weight else self._values(held)
        weight.copy_(torch.where(frozen & value.isfinite(), value.to(weight.dtype), weight))

    def _codes(self) -> Tensor:
        """The codes of the weight, in its shape."""
        quantizer = self.quantizer
        x, axis, shape = self._operand()
        code = quantize(
            x, *quantizer.params(x), grid=quantizer.grid, per=quantizer.per, dtype=_code_dtype(quantizer.grid)
        )
        return _unrolled(code, axis, shape)

    def _values(self, code: Tensor) -> Tensor:
        """The weights that have these codes: (code - z) * s, divided by a folded batch norm's factor

        Not finite where that is 0, and the code is that of 0 whatever the weight.
        """
        x, axis, shape = self._operand()
        laid_out = rows(code, axis) if self.quantizer.per.divides_rows else code
        value = _unrolled(dequantize(laid_out, *self.quantizer.params(x), per=self.quantizer.per), axis, shape)
        weight, holder = self.weight, self.holder
        if holder.slot_weight(self.slot)[0] is weight:
            return value
        factor: Tensor = holder.prepare_weight(torch.ones_like(weight))
        return value / factor

    def _operand(self) -> tuple[Tensor, int, tuple[int, ...] | None]:
        """What the quantizer takes, the axis of its outputs and, where it takes rows, the shape to unroll them to."""
        prepared, axis = self.holder.slot_weight(self.slot)
        if not self.quantizer.per.divides_rows:
            return prepared, axis, None
        return rows(prepared, axis), axis, tuple(prepared.movedim(axis, 0).shape)


def code_tracks(model: nn.Module) -> Iterator[tuple[str, CodeTrack]]:
    """One for each weight, by its name, that has codes and is a parameter: not binary, DoReFa's, or an op's."""
    seen = set()
    for path, holder in slotted_modules(model):
        for slot, role in holder.slots().items():
            weight = weight_of(holder, slot) if role == "weight" else None
            quantizer = holder.quantizer(slot)
            if weight is not None and id(weight) not in seen and isinstance(quantizer, FakeQuantize):
                seen.add(id(weight))
                yield f"{path}.{_name(slot)}".removeprefix("."), CodeTrack(holder, slot)


def weight_of(holder: Slotted, slot: str) -> Any:
    """The parameter that a weight quantizer takes; None where it takes something computed."""
    return holder._parameters.get(_name(slot))  # noqa: SLF001


def _name(slot: str) -> str:
    return slot.removesuffix("_quantizer")


def _unrolled(x: Tensor, axis: int, shape: tuple[int, ...] | None) -> Tensor:
    """Rows, one for each output, in the weight's shape again."""
    return x if shape is None else x.view(shape).movedim(0, axis)


def _code_dtype(grid: Grid) -> torch.dtype:
    """The smallest that holds every code."""
    dtypes = (torch.int8, torch.int16, torch.int32)
    fits = (
        dtype
        for dtype in dtypes
        if torch.iinfo(dtype).min <= grid.quant_min and grid.quant_max <= torch.iinfo(dtype).max
    )
    return next(fits)
