"""QuantLayer: a torch layer whose input, weight, bias and output are quantized on their way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lowbit import graph
from lowbit.functional import round as round_straight_through
from lowbit.kernels.precision import math_dtype
from lowbit.nn.batch_norm import FoldedBatchNorm
from lowbit.nn.slots import Slotted
from lowbit.nn.swap import Swapped, remove
from lowbit.tracing import is_exporting

# Below this, a bias and a sum of products fit 32 bits together.
BIAS_LIMIT = 2**30


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
    product: Callable[..., Tensor | None] | None = None  # of a converted layer that multiplies codes

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
        output = None if self.product is None else self.product(self, args, kwargs)
        if output is None:
            output = self.run_parent(*self.with_quantized_input(args, kwargs))
        return self.quantize("output_quantizer", output)

    def run_parent(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The parent's forward with the quantized weight and the bias that goes with it."""
        object.__setattr__(self, "_running", {})
        try:
            return self.run_float(*args, **kwargs)
        finally:
            object.__setattr__(self, "_running", None)

    def run_float(self, *args: Any, **kwargs: Any) -> Any:
        """The parent's forward, while the weight and the bias that it reads are the quantized ones."""
        return self.float_class.forward(self, *args, **kwargs)

    def with_quantized_input(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, with the first of them quantized."""
        if self.quantizer("input_quantizer") is None:
            return args, kwargs
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
        if (codes := self.held_bias_codes()) is not None:
            scale, dtype = self.accumulator_scale(), self._coded_dtype()
            if is_exporting():
                return graph.dequantize(codes, scale, None, 0 if scale.dim() else None, 0, dtype)
            return (codes.to(scale.dtype) * scale).to(dtype)
        bias = self._folded_bias(bias)
        if bias is None or not self.integer_bias or not self.is_on("weight_quantizer"):
            return bias
        scale = self.accumulator_scale()
        return (_round_bias(bias, scale) * scale).to(bias.dtype)

    def _folded_bias(self, bias: Tensor | None) -> Tensor | None:
        return self._norm[0].folded_bias(bias) if self.folds and self._norm[0].is_settled else bias

    def _coded_dtype(self) -> torch.dtype:
        coded = self.coded("weight_quantizer")
        assert coded is not None
        return coded.dtype

    def held_bias_codes(self) -> Tensor | None:
        """The int32 bias of a converted layer; None where it has none of integers."""
        return self._buffers.get("bias_codes")

    def float_bias(self) -> Tensor | None:
        """The bias, where it is not one of integers."""
        return None if self.held_bias_codes() is not None else self._float("bias")

    @torch.no_grad()
    def converted_bias(self) -> Tensor | None:
        """The bias that a converted layer holds in the place of its own: int32 codes of the accumulator's scale, or,
        folded or too large for that, floats; None where its own serves.
        """
        if not self.is_on("weight_quantizer") or not (self.folds or self.integer_bias):
            return None
        bias = self._folded_bias(getattr(self, "bias", None))
        if bias is not None and self.integer_bias and self.grid_of("input_quantizer").enabled:
            codes = _round_bias(bias, self.accumulator_scale())
            if bool((codes.abs() < BIAS_LIMIT).all()):
                return codes.to(torch.int32)
        return self._prepared_bias(getattr(self, "bias", None))

    def hold_bias(self, kind: str) -> None:
        """Room for the bias of a converted layer: "int32" codes or "float" values"""
        coded = self.coded("weight_quantizer")
        assert coded is not None
        shape = coded.form.shape[coded.form.output_axis] * self._weight_groups()
        self._parameters.pop("bias", None)
        if kind == "int32":
            self.register_buffer("bias_codes", torch.zeros(shape, dtype=torch.int32))
            self.register_parameter("bias", None)
        else:
            self.register_parameter("bias", nn.Parameter(torch.zeros(shape, dtype=coded.dtype)))

    def _weight_groups(self) -> int:
        """How many times the weight's outputs are there: a transposed convolution's weight holds those of one group."""
        return getattr(self, "groups", 1) if self.output_axis else 1

    @torch.no_grad()
    def accumulator_scale(self) -> Tensor:
        """s_x * s_w: one number, or one for each output"""
        if (coded := self.coded("weight_quantizer")) is not None:
            x_scale, w_scale, dtype = self.grid_of("input_quantizer").scale, coded.scale, coded.dtype
        else:
            weight = self.prepare_weight(self._float("weight"))
            grids = (self.grid_of(slot) for slot in ("input_quantizer", "weight_quantizer"))
            (x_scale, _), (w_scale, _) = (grid.params(weight) for grid in grids)
            dtype = weight.dtype
        wide = math_dtype(dtype)
        scale = x_scale.to(wide) * w_scale.to(wide)
        return scale.repeat(self._weight_groups()) if scale.dim() else scale

    def _float(self, name: str) -> Any:
        """The parameter, or what a parametrization or a hook, such as that of pruning, computes in its place."""
        if (coded := self.coded(f"{name}_quantizer")) is not None:
            return coded()
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


def _round_bias(bias: Tensor, scale: Tensor) -> Tensor:
    """round(b / s); adding 0 turns -0 into the code 0, as an integer would"""
    return round_straight_through(bias.to(scale.dtype) / scale) + 0.0
