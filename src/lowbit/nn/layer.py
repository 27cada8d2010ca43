"""QuantLayer: a torch layer whose input, weight, bias and output are quantized on their way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lowbit.functional import round as round_straight_through
from lowbit.nn.batch_norm import FoldedBatchNorm
from lowbit.nn.slots import Slotted
from lowbit.nn.swap import Swapped, remove


class Quantized(Slotted, Swapped):
    """A torch module with quantizers on its way: y = parent(x) where none of them is on"""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._context.owners:  # the arithmetic in here is the layer's own, not one of its owner's ops
            with torch._C.DisableTorchFunction():  # noqa: SLF001
                return self.quantized_forward(*args, **kwargs)
        return self.quantized_forward(*args, **kwargs)

    def quantized_forward(self, *args: Any, **kwargs: Any) -> Any:
        """The parent's forward, with quantizers on the way."""
        raise NotImplementedError


def _tensor(name: str, in_forward: str) -> property:
    """An attribute that is quantized while the forward runs; hooks set it and delete it as any other."""
    return property(
        lambda self: self._read(name, getattr(self, in_forward)),
        lambda self, value: self.__dict__.__setitem__(name, value),
        lambda self: self.__dict__.__delitem__(name),
    )


class QuantLayer(Quantized):
    """y = q_out(layer(q_in(x); q_w(w), b)),  the layer being the torch class that this one is mixed into

    - A quantizer that is None or disabled is the identity; with all of them so, this is the parent's forward.
    - ``integer_bias``: b = round(b / (s_x * s_w)) * s_x * s_w, an int32 code of the accumulator's own scale.
    - A batch norm that follows (``fold``) is folded in: w' = w * f and b' = (b - mu) * f + beta, with its running
      statistics and f = gamma / sqrt(var + eps), and w' is what is quantized. While it takes its statistics from each
      batch, the layer runs with q_w(w * f) / f, which has the folded weight's rounding, and the batch norm follows.

    The parameters keep their names; ``weight`` is the float one except while the forward runs.
    """

    output_axis: ClassVar[int] = 0
    takes_activations: ClassVar[bool] = True
    has_weight: ClassVar[bool] = True
    _running: dict[str, Any] | None = None  # while the forward runs, what it has read

    input_quantizer: nn.Module | None
    weight_quantizer: nn.Module | None
    output_quantizer: nn.Module | None

    def __init__(
        self,
        *args: Any,
        input_quantizer: nn.Module | None = None,
        weight_quantizer: nn.Module | None = None,
        output_quantizer: nn.Module | None = None,
        integer_bias: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        quantizers = {"input_quantizer": input_quantizer, "weight_quantizer": weight_quantizer}
        self.equip({**quantizers, "output_quantizer": output_quantizer}, integer_bias=integer_bias)

    def slots(self) -> dict[str, str]:
        slots = {"input_quantizer": "activation", "weight_quantizer": "weight", "output_quantizer": "output"}
        present = {"activation": self.takes_activations, "weight": self.has_weight, "output": True}
        return {slot: role for slot, role in slots.items() if present[role]}

    def slot_weight(self, slot: str) -> tuple[Tensor, int]:
        return self.prepare_weight(self._float("weight")), self.output_axis

    def equip(self, *args: Any, **kwargs: Any) -> None:
        super().equip(*args, **kwargs)
        self._norm: tuple[FoldedBatchNorm, ...] = ()

    def strip(self) -> None:
        super().strip()
        remove(self, "_norm", "_running")

    def fold(self, norm: FoldedBatchNorm) -> None:
        """``norm`` takes this layer's output, and nothing else does."""
        self._norm = (norm,)
        norm.follow(self)

    @property
    def folds(self) -> bool:
        """Whether a batch norm's factor is part of the quantized weight."""
        return bool(self._norm) and self.is_on("weight_quantizer")

    def quantized_forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.quantizer("input_quantizer") is not None:
            args, kwargs = self._with_input(args, kwargs)
        object.__setattr__(self, "_running", {})
        try:
            output = self.float_class.forward(self, *args, **kwargs)
        finally:
            object.__setattr__(self, "_running", None)
        return self.quantize("output_quantizer", output)

    def _with_input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (self.quantize("input_quantizer", args[0]), *args[1:]), kwargs
        name = next(iter(kwargs))
        return args, {**kwargs, name: self.quantize("input_quantizer", kwargs[name])}

    def prepare_weight(self, weight: Tensor) -> Tensor:
        """What the weight's quantizer quantizes: the weight, or the folded one."""
        return weight * self._along(self._norm[0].factor(), weight) if self.folds else weight

    def _quantized_weight(self, weight: Tensor) -> Tensor:
        if not self.is_on("weight_quantizer"):
            return weight
        if not self._norm:
            return self.quantize_weight("weight_quantizer", weight, self.output_axis)
        factor = self._along(self._norm[0].factor(), weight)
        quantized = self.quantize_weight("weight_quantizer", weight * factor, self.output_axis)
        return quantized if self._norm[0].is_settled else quantized / factor

    def _along(self, factor: Tensor, weight: Tensor) -> Tensor:
        shape = [1] * weight.dim()
        shape[self.output_axis] = -1
        return factor.view(shape).to(weight.dtype)

    def _prepared_bias(self, bias: Tensor | None) -> Tensor | None:
        if self.folds and self._norm[0].is_settled:
            bias = self._norm[0].folded_bias(bias)
        if bias is None or not self.integer_bias or not self.is_on("weight_quantizer"):
            return bias
        scale = self.accumulator_scale().to(bias.dtype)
        return round_straight_through(bias / scale) * scale

    @torch.no_grad()
    def accumulator_scale(self) -> Tensor:
        """s_x * s_w: one number, or one for each output"""
        weight = self.prepare_weight(self._float("weight"))
        scales = [self.grid_of(slot).params(weight)[0] for slot in ("input_quantizer", "weight_quantizer")]
        return scales[0] * scales[1]

    def _float(self, name: str) -> Any:
        """The parameter, or what a parametrization or a hook, such as that of pruning, computes in its place."""
        inherited = getattr(type(self).float_class, name, None)
        if isinstance(inherited, property):
            return inherited.__get__(self)
        return self._parameters[name] if name in self._parameters else self.__dict__.get(name, self)

    def _read(self, name: str, in_forward: Callable[[Any], Any]) -> Any:
        value = self._float(name)
        if value is self:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if self._running is None:
            return value
        if name not in self._running:
            try:
                self._running[name] = in_forward(value)
            except AttributeError as error:  # which torch would take for a missing attribute
                raise RuntimeError(f"the {name} of a {type(self).__name__} could not be quantized: {error}") from error
        return self._running[name]

    # What the parent's forward reads; an Any, since torch's own attributes can be set.
    weight: Any = _tensor("weight", "_quantized_weight")
    bias: Any = _tensor("bias", "_prepared_bias")
