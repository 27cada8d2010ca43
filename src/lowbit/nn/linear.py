"""LinearLayer: a linear layer that multiplies codes while it trains, where that is faster."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lowbit.fake_quantize import FakeQuantize
from lowbit.functional.linear import LONGEST_ROW, integer_linear
from lowbit.granularity import PerChannel, PerTensor, PerToken
from lowbit.kernels import products
from lowbit.kernels.plan import is_plain, is_traced
from lowbit.nn.layer import QuantLayer
from lowbit.tracing import is_exporting

# By device: below so many multiplications, codes take longer than quantized values and a product of those.
_LEAST = {"cpu": 2**24, "cuda": 2**32}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class LinearLayer(QuantLayer):
    """y = q_in(x) @ q_w(w)^T + b

    In training, large products are those of the codes, y = float(sum (q_x - z_x) * q_w) * (s_x * s_w) + b, where the
    quantizers have codes (``product_refusal``): the sum is exact, and codes are what is kept for the backward. All
    else, and every product in eval mode, is F.linear of the quantized values.
    """

    def quantized_forward(self, *args: Any, **kwargs: Any) -> Any:
        x: Any = args[0] if args else kwargs.get("input")
        if self.product is None and self._may_multiply_codes(x):
            weight, bias = self._float("weight"), self._float("bias")
            if _multiplies_codes(x, weight, bias):
                coded = self.code("input_quantizer", x), self.code_weight("weight_quantizer", weight)
                device = x.device.type
                dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
                return self.quantize("output_quantizer", integer_linear(*coded, bias, dtype=dtype))
        return super().quantized_forward(*args, **kwargs)

    @property
    def least_rows(self) -> int:
        """From how many rows on the layer multiplies codes in training."""
        weight, _ = self.slot_weight("weight_quantizer")
        return -(-_LEAST[weight.device.type] // weight.numel())

    def product_refusal(self, device: torch.device | None = None) -> str:
        """Why this layer never multiplies codes in training, on this device or its own; "" where it does."""
        if type(self).float_class.forward is not nn.Linear.forward:
            return "the layer has a forward of its own"
        device = device or self.slot_weight("weight_quantizer")[0].device
        if reason := products.refusal(device.type, device.index, self.in_features):
            return reason
        if self._norm or self.integer_bias:
            return "a batch norm is folded into it" if self._norm else "its bias is one of integers"
        if self.in_features > LONGEST_ROW:
            return f"its rows are longer than {LONGEST_ROW}, and a sum might not fit 32 bits"
        for slot in ("input_quantizer", "weight_quantizer"):
            quantizer, name = self.quantizer(slot), slot.removesuffix("_quantizer")
            if not isinstance(quantizer, FakeQuantize):
                return f"the {name} has no quantizer with a scale"
            reason = quantizer.codes_refusal()
            if reason:
                return f"the {name}'s quantizer: {reason}"
            if quantizer.per not in _PERS[slot]:
                return f"the {name} has scales {quantizer.per}, and the product takes one, or one for each row"
        weight = self.quantizer("weight_quantizer")
        if not weight.symmetric:
            return "the weight has zero points"
        return "" if weight.grid.fits_int8 else "the weight's codes do not fit int8"

    def _may_multiply_codes(self, x: Any) -> bool:
        """All that can be told without the weight, which may be computed."""
        return (
            self.training
            and not _is_watched(x)
            and isinstance(x, Tensor)
            and x.dim() > 0
            and x.dtype in _DTYPES
            and x.device.type in _LEAST
            and x.numel() * self.out_features >= _LEAST[x.device.type]
            and not self.product_refusal(x.device)
            and self.offers_codes("input_quantizer", x)
        )


_PERS = {
    "input_quantizer": (PerTensor(), PerToken()),
    "weight_quantizer": (PerTensor(), PerToken(), PerChannel(0)),
}


def _is_watched(x: Any) -> bool:
    """Whether a tracer wants torch's own ops, or x is no plain tensor; a compiler takes the product as it is."""
    return is_exporting() or not is_plain(x) if torch.compiler.is_compiling() else is_traced(x)


def _multiplies_codes(x: Tensor, weight: Any, bias: Tensor | None) -> bool:
    if not isinstance(weight, Tensor) or weight.device != x.device or _is_watched(weight):
        return False
    dtypes = {x.dtype, weight.dtype, *([] if bias is None else [bias.dtype])}
    if len(dtypes) > 1 and not torch.is_autocast_enabled(x.device.type):
        return False
    return weight.dtype in _DTYPES
