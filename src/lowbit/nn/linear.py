"""LinearLayer: a linear layer that multiplies codes while it trains, where that is faster."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lowbit.fake_quantize import FakeQuantize
from lowbit.functional.linear import Coded, integer_linear, linear_by_kept_scale, linear_per_batch
from lowbit.granularity import PerChannel, PerGroup, PerTensor, PerToken
from lowbit.kernels import products
from lowbit.nn.code_layer import CodeLayer

# By device: below so many multiplications, codes take longer than quantized values and a product of those.
_LEAST = {"cpu": 2**24, "cuda": 2**32}


class LinearLayer(CodeLayer):
    """y = q_in(x) @ q_w(w)^T + b"""

    input_pers = PerTensor(), PerToken()
    weight_pers = PerTensor(), PerToken(), PerChannel(0)

    @property
    def terms(self) -> int:
        return int(self.in_features)

    def least_sums(self, device: str) -> int | None:
        least, size = _LEAST.get(device), self.out_features * self.in_features
        return least if least is None or not size else -(-least // size)

    def count_sums(self, x: Tensor) -> int:
        return x.numel() // x.shape[-1] if x.dim() and x.shape[-1] else -1

    def fits(self, x: Tensor, weight: Tensor) -> bool:
        return weight.dim() == 2 and x.shape[-1] == weight.shape[1]

    def own_refusal(self, device: torch.device) -> str:
        if type(self).float_class.forward is not nn.Linear.forward:
            return "the layer has a forward of its own"
        return products.refusal(device.type, device.index, self.terms)

    def product_refusal(self, device: torch.device | None = None) -> str:
        per = getattr(self.quantizer("weight_quantizer"), "per", None)
        if isinstance(per, PerGroup) and self._keeps_codes_of_groups(device or self._float("weight").device):
            whole = per.size == self.in_features
            if whole or products.multiplies_groups(per.size):
                return ""
        return super().product_refusal(device)

    def takes_codes(self, device: torch.device) -> bool:
        return super().takes_codes(device) or self._keeps_codes_of_groups(device)

    def run_on_codes(self, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        if isinstance(weight, nn.Parameter) and not (self._edges or self._norm):
            of_x, of_w = self.quantizer("input_quantizer"), self.quantizer("weight_quantizer")
            numbers: dict[str, Any] = {"x_grid": of_x.grid, "w_grid": of_w.grid, "dtype": dtype}
            if isinstance(of_w.per, PerGroup):
                return linear_per_batch(x, self._once_coded(weight), bias, **numbers, group=of_w.per.size)
            if of_w.takes_own_rows and of_x.takes_own_rows:
                return linear_per_batch(x, self._once_coded(weight), bias, **numbers)
            if of_w.takes_own_rows and of_x.keeps_scale:
                kept = of_x.follow(x)
                return linear_by_kept_scale(x, kept, self._once_coded(weight), bias, **numbers, ste=of_x.ste)
        return super().run_on_codes(x, weight, bias, dtype)

    def _once_coded(self, weight: nn.Parameter) -> nn.Parameter | Coded:
        slot = "weight_quantizer"
        return self.code_weight(slot, weight) if self.holds(slot, weight) else weight

    def _keeps_codes_of_groups(self, device: torch.device) -> bool:
        """Whether there is a step for groups of a row: of short ones it multiplies values, and keeps codes"""
        of_x, of_w = self.quantizer("input_quantizer"), self.quantizer("weight_quantizer")
        if not (isinstance(of_w, FakeQuantize) and isinstance(of_x, FakeQuantize)) or torch.compiler.is_compiling():
            return False
        weight = self._parameters.get("weight")
        simple = self._context.integer_products and not (self._edges or self._norm or self.integer_bias)
        return (
            simple
            and weight is not None
            and weight.is_contiguous()
            and isinstance(of_w.per, PerGroup)
            and not self.in_features % of_w.per.size
            and of_w.takes_own_groups
            and of_x.per in self.input_pers
            and of_x.takes_own_rows
            and not self.own_refusal(device)
            and products.has_linear_step(device.type, device.index, self.in_features, self.out_features)
        )

    def multiply(self, x: Coded, w: Coded, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        return integer_linear(x, w, bias, dtype=dtype)
