"""LinearLayer: a linear layer that multiplies codes while it trains, where that is faster."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.fake_quantize import FakeQuantize
from lowbit.functional.linear import integer_linear
from lowbit.granularity import PerChannel, PerTensor, PerToken
from lowbit.kernels.plan import is_traced
from lowbit.nn.layer import QuantLayer

# Below so many multiplications, what surrounds a product of integers takes longer than it saves.
_LEAST = 2**24
# Of rows up to this long, every sum of products fits 32 bits.
_LONGEST = 2**16
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class LinearLayer(QuantLayer):
    """y = q_in(x) @ q_w(w)^T + b

    In training, large products are those of the codes, y = float(sum (q_x - z_x) * q_w) * (s_x * s_w) + b, where the
    quantizers have codes (``product_refusal``): the sum is exact, and codes are what is kept for the backward. All
    else, and every product in eval mode, is F.linear of the quantized values.
    """

    def quantized_forward(self, *args: Any, **kwargs: Any) -> Any:
        x: Any = args[0] if args else kwargs.get("input")
        if self.product is not None or not self._multiplies_codes(x):
            return super().quantized_forward(*args, **kwargs)
        weight = self.quantizer("weight_quantizer")
        coded = self.code("input_quantizer", x), weight.code(self._float("weight"))
        return self.quantize("output_quantizer", integer_linear(*coded, self._float("bias")))

    def product_refusal(self) -> str:
        """Why this layer never multiplies codes in training; "" where it does."""
        if type(self).float_class.forward is not nn.Linear.forward:
            return "the layer has a forward of its own"
        if self._norm or self.integer_bias:
            return "a batch norm is folded into it" if self._norm else "its bias is one of integers"
        for slot, pers in (
            ("input_quantizer", (PerTensor(), PerToken())),
            ("weight_quantizer", (PerTensor(), PerToken(), PerChannel(0))),
        ):
            quantizer, name = self.quantizer(slot), slot.removesuffix("_quantizer")
            if not isinstance(quantizer, FakeQuantize):
                return f"the {name} has no quantizer with a scale"
            reason = quantizer.codes_refusal()
            if reason:
                return f"the {name}'s quantizer: {reason}"
            if quantizer.per not in pers:
                return f"the {name} has scales {quantizer.per}, which change along the sum"
        weight = self.quantizer("weight_quantizer")
        if not weight.symmetric or (not weight.grid.signed and weight.bits == 8):
            return "the weight has zero points"
        return ""

    def _multiplies_codes(self, x: Any) -> bool:
        weight = self._float("weight")
        return (
            self.training
            and isinstance(x, Tensor)
            and x.numel() * self.out_features >= _LEAST
            and self.in_features <= _LONGEST
            and x.device.type == weight.device.type == "cpu"
            and x.dtype == weight.dtype
            and x.dtype in _DTYPES
            and not torch.is_autocast_enabled("cpu")
            and not is_traced(x, weight)
            and not self.product_refusal()
            # Codes know no NaN, which must be seen. An infinity brings this to NaN too, and needs no speed.
            and all(math.isfinite(tensor.detach().sum()) for tensor in (x, weight))
        )
