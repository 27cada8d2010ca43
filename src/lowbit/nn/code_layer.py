"""CodeLayer: a layer that multiplies codes while it trains, where that is faster."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from lowbit.fake_quantize import FakeQuantize
from lowbit.functional.linear import LONGEST_ROW, Coded
from lowbit.granularity import Granularity
from lowbit.kernels.plan import is_odd, is_plain, is_traced
from lowbit.nn.layer import QuantLayer
from lowbit.tracing import is_exporting

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class CodeLayer(QuantLayer):
    """y = float(sum (q_x - z_x) * q_w) * (s_x * s_w) + b

    In training this is how large products are computed, where the quantizers have codes (``codes_refusal``): the sum
    is exact, and codes are what is kept for the backward. All else, and every product in eval mode, is the parent's
    forward at the quantized values; a few layers keep codes, and multiply their values (``product_refusal``).

    A batch norm's factor f may be part of w; while its statistics are those of each batch, s_w / f stands for s_w.
    """

    sums: ClassVar[str] = "rows"  # in words, what has one sum for each output
    input_pers: ClassVar[tuple[Granularity, ...]]
    weight_pers: ClassVar[tuple[Granularity, ...]]

    @property
    def terms(self) -> int:
        """How many products a sum has."""
        raise NotImplementedError

    def least_sums(self, device: str) -> int | None:
        """From how many sums of each output on codes take less time than values; None where they never do."""
        raise NotImplementedError

    def count_sums(self, x: Tensor) -> int:
        """How many sums each output has for this x; -1 where the layer does not take it."""
        raise NotImplementedError

    def fits(self, x: Tensor, weight: Tensor) -> bool:
        """Whether the two have a product; else the parent's forward says so."""
        return True

    def own_refusal(self, device: torch.device) -> str:
        """Why this layer never multiplies codes on this device, whatever its quantizers; "" where it may."""
        raise NotImplementedError

    def multiply(self, x: Coded, w: Coded, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """y in this dtype."""
        raise NotImplementedError

    def quantized_forward(self, *args: Any, **kwargs: Any) -> Any:
        x: Any = args[0] if args else kwargs.get("input")
        if self.product is None and self.training and (way := self._way_for(x)):
            weight, bias = self._float("weight"), self._float("bias")
            device = x.device.type
            autocasts = torch.is_autocast_enabled(device)
            if _multiplies_codes(x, weight, bias, autocasts) and self.fits(x, weight):
                dtype = torch.get_autocast_dtype(device) if autocasts else x.dtype
                y = self.run_on_codes(way, x, weight, self._folded_bias(bias), dtype)
                return self.quantize("output_quantizer", y)
        return super().quantized_forward(*args, **kwargs)

    def run_on_codes(self, way: str, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """y in this dtype, of x and the weight as they come."""
        return self.multiply(self.code("input_quantizer", x), self._coded_weight(weight), bias, dtype)

    def product_refusal(self, device: torch.device | None = None) -> str:
        """Why this layer never multiplies codes in training, on this device or its own; "" where it does."""
        return self.codes_refusal(device)

    def codes_refusal(self, device: torch.device | None = None) -> str:
        """Why this layer takes no codes in training, on this device or its own; "" where it does."""
        if not self._context.integer_products:
            return "the recipe has integer_products off"
        device = device or self._float("weight").device
        if reason := self.own_refusal(device):
            return reason
        if self.integer_bias:
            return "its bias is one of integers"
        if self.terms > LONGEST_ROW:
            return f"a sum of more than {LONGEST_ROW} products might not fit 32 bits"
        for slot in ("input_quantizer", "weight_quantizer"):
            quantizer, name = self.quantizer(slot), slot.removesuffix("_quantizer")
            if not isinstance(quantizer, FakeQuantize):
                return f"the {name} has no quantizer with a scale"
            if reason := quantizer.codes_refusal():
                return f"the {name}'s quantizer: {reason}"
            if not self.takes_per(slot, quantizer.per):
                return self.per_refusal(slot, quantizer.per)
        weight = self.quantizer("weight_quantizer")
        if not weight.symmetric:
            return "the weight has zero points"
        return "" if weight.grid.fits_int8 else "the weight's codes do not fit int8"

    def way(self, device: torch.device) -> str:
        """How ``run_on_codes`` serves the layer on this device; "" where it does not."""
        return "codes" if self._scales_fit() and not self.codes_refusal(device) else ""

    def takes_per(self, slot: str, per: Granularity | None) -> bool:
        """Whether the product has such scales for what comes by this slot."""
        return per in (self.input_pers if slot == "input_quantizer" else self.weight_pers)

    def per_refusal(self, slot: str, per: Granularity) -> str:
        """Why it has not."""
        pers = self.input_pers if slot == "input_quantizer" else self.weight_pers
        name = slot.removesuffix("_quantizer")
        return f"the {name} has scales {per}, and the product takes {' or '.join(map(str, pers))}"

    def _scales_fit(self) -> bool:
        """A part of ``codes_refusal``, whose words about it a compiler cannot follow."""
        slots = "input_quantizer", "weight_quantizer"
        return all(self.takes_per(slot, getattr(self.quantizer(slot), "per", None)) for slot in slots)

    def _way_for(self, x: Any) -> str:
        """The way for this x, as far as can be told without the weight, which may be computed."""
        if not isinstance(x, Tensor) or is_watched(x) or x.dtype not in _DTYPES:
            return ""
        device = x.device
        least = self.least_sums(device.type)
        if least is None or self.count_sums(x) < least:
            return ""
        way = self.way(device)
        return way if way and self.offers_codes("input_quantizer", x) else ""

    def _coded_weight(self, weight: Tensor) -> Coded:
        if not self._norm:
            return self.code_weight("weight_quantizer", weight)
        factor = self._norm[0].factor().to(weight.dtype)
        coded = self.code_weight("weight_quantizer", weight * self._along(factor, weight))
        return coded if self._norm[0].is_settled else coded.divide(factor)


def is_watched(*args: Any) -> bool:
    """Whether a tracer wants torch's own ops, or a tensor is no plain one; a compiler takes the product as it is."""
    if not torch.compiler.is_compiling():
        return is_traced(*args)
    return is_exporting() or not all(is_plain(arg) for arg in args if isinstance(arg, Tensor))


def _multiplies_codes(x: Tensor, weight: Any, bias: Tensor | None, autocasts: bool) -> bool:
    """Whether these go together; of x it is known that nothing is traced."""
    if not isinstance(weight, Tensor) or weight.dtype not in _DTYPES or weight.device != x.device:
        return False
    is_foreign = is_odd if not torch.compiler.is_compiling() else lambda tensor: not is_plain(tensor)
    if is_foreign(weight) or (bias is not None and is_foreign(bias)):
        return False
    return autocasts or (x.dtype == weight.dtype and (bias is None or bias.dtype == x.dtype))
