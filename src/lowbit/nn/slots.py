"""Slotted: a module with named places for quantizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.functional.linear import Coded
from lowbit.nn.coded import CodedWeight
from lowbit.nn.context import Context, Edge
from lowbit.nn.swap import remove


class Slotted(nn.Module):
    """A module with quantizers, each in a slot: the name of a child module, and its role.

    Roles: "weight" (of a parameter), "activation" (of what comes in), "output", and "share" (of values from 0 to 1).
    """

    integer_bias: bool

    def slots(self) -> dict[str, str]:
        """The role of each quantizer that this module has a place for."""
        raise NotImplementedError

    def slot_weight(self, slot: str) -> tuple[Tensor, int]:
        """The tensor that the weight quantizer in this slot takes, and the axis of its outputs."""
        raise NotImplementedError

    def slot_parameter(self, slot: str) -> Any:
        """The Parameter whose quantizer this slot holds; None where a weight is computed from others."""
        return self._parameters.get(slot.removesuffix("_quantizer"))

    def equip(
        self,
        quantizers: Mapping[str, nn.Module | None],
        *,
        integer_bias: bool = False,
        context: Context | None = None,
    ) -> None:
        """Put the quantizers in their slots; a slot that is not named stays empty."""
        for name in quantizers:
            if name not in self.slots():
                raise ValueError(f"there is no slot {name!r}; the slots are {', '.join(self.slots())}")
        for slot in self.slots():
            self.register_module(slot, quantizers.get(slot))
        self.integer_bias = integer_bias
        self._context = context or Context()
        self._edges: dict[str, Edge] = {}
        self._grids: dict[str, Any] = {}

    def strip(self) -> None:
        """Remove what ``equip`` added, or had added when it was interrupted."""
        for slot in self.slots():
            self._modules.pop(slot, None)
        remove(self, "integer_bias", "_context", "_edges", "_grids")

    def share(self, slot: str, edge: Edge) -> None:
        """The tensor that the quantizer of this slot takes has other consumers; one of them leads."""
        self._edges[slot] = edge

    def find_on_grid(self, slot: str, quantizer: nn.Module) -> None:
        """What comes in by this slot lies on the grid of another module's quantizer already."""
        self._grids[slot] = quantizer

    def grid_of(self, slot: str) -> Any:
        """The quantizer on whose grid the values of this slot lie, here or elsewhere; None where on none."""
        return self.quantizer(slot) or self._grids.get(slot)

    def quantizer(self, slot: str) -> Any:
        """The quantizer of this slot, in it or shared with another module; None where there is none."""
        edge = self._edges.get(slot)
        return self._modules.get(slot) if edge is None else edge.quantizer

    def __getattr__(self, name: str) -> Any:
        """A shared quantizer is an attribute of all that share it; a weight that is kept as codes is their value."""
        if (coded := self.coded(f"{name}_quantizer")) is not None:
            return coded()
        value = super().__getattr__(name)
        return self.quantizer(name) if value is None and name in self.__dict__.get("_edges", ()) else value

    def coded(self, slot: str) -> CodedWeight | None:
        """The codes of a weight, where it is kept as codes."""
        edge = self.__dict__.get("_edges", {}).get(slot)
        held = self.__dict__.get("_modules", {}).get(slot) if edge is None else edge.quantizer
        return held if isinstance(held, CodedWeight) else None

    def quantize(self, slot: str, x: Tensor) -> Tensor:
        """x as the quantizer of this slot gives it; x itself where there is none, and where x holds no floats."""
        quantizer = self.quantizer(slot)
        if quantizer is None or not x.is_floating_point():
            return x
        if slot in self._edges:
            return self._edges[slot].quantize(x, leads=self._modules.get(slot) is not None)
        return quantizer(x)

    def offers_codes(self, slot: str, x: Tensor) -> bool:
        """Whether the quantizer of this slot, which gives codes, has given no values of x yet."""
        return slot not in self._edges or not self._edges[slot].has_values(x)

    def code(self, slot: str, x: Tensor) -> Coded:
        """The codes of x by the quantizer of this slot, which gives codes."""
        if slot in self._edges:
            return self._edges[slot].code(x, leads=self._modules.get(slot) is not None)
        coded: Coded = self.quantizer(slot).code(x)
        return coded

    def quantize_weight(self, slot: str, weight: Tensor, output_axis: int) -> Tensor:
        """The quantized weight; scales of groups run over it as one row for each output."""
        if self.coded(slot) is not None:
            return weight  # which its codes have given
        quantizer = self.quantizer(slot)

        def run() -> Tensor:
            if quantizer is None or not quantizer.per.divides_rows:
                return self.quantize(slot, weight)
            shape = weight.movedim(output_axis, 0).shape
            return self.quantize(slot, rows(weight, output_axis)).view(shape).movedim(0, output_axis)

        quantized: Tensor = self._held(slot, weight, "values", run)
        return quantized

    def code_weight(self, slot: str, weight: Tensor) -> Coded:
        """The codes of a weight by the quantizer of this slot, which gives codes."""
        coded: Coded = self._held(slot, weight, "codes", lambda: self.code(slot, weight))
        return coded

    def holds(self, slot: str, weight: Tensor) -> bool:
        """Whether what the quantizer of this slot makes of the weight is made once (``weights_once``)."""
        held = self._context.held
        if held is None or torch.compiler.is_compiling() or slot in self._edges or not isinstance(weight, nn.Parameter):
            return False
        return held.serves(weight) and getattr(self.quantizer(slot), "is_repeatable", False)

    def _held(self, slot: str, weight: Tensor, what: str, run: Callable[[], Any]) -> Any:
        """run(), or what it gave before, where weights are quantized once."""
        held = self._context.held
        if held is None or not isinstance(weight, nn.Parameter) or not self.holds(slot, weight):
            return run()
        return held.take(self.quantizer(slot), weight, what, run)

    def start_weight(self, slot: str) -> None:
        """Start the scale of a weight from the weight as it is now."""
        quantizer = self.quantizer(slot)
        weight, axis = self.slot_weight(slot)
        quantizer.start(rows(weight, axis) if quantizer.per.divides_rows else weight)

    def is_on(self, slot: str) -> bool:
        """Whether this slot has a quantizer, and it is enabled."""
        quantizer = self.quantizer(slot)
        return quantizer is not None and quantizer.enabled

    def is_active(self, slot: str) -> bool:
        """Whether this slot has a quantizer that is on, or wants to see its data."""
        quantizer = self.quantizer(slot)
        return quantizer is not None and (quantizer.enabled or (quantizer.training and quantizer.observing))


def rows(weight: Tensor, output_axis: int) -> Tensor:
    """A weight as one row for each output."""
    return weight.movedim(output_axis, 0).flatten(1)
