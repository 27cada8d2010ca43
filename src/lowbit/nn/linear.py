"""LinearLayer: a linear layer that multiplies codes while it trains, where that is faster."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lowbit.functional.linear import Coded, integer_linear, linear_per_batch
from lowbit.granularity import PerChannel, PerTensor, PerToken
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

    def run_on_codes(self, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        if isinstance(weight, nn.Parameter) and not (self._edges or self._norm):
            quantizers = [self.quantizer(slot) for slot in ("input_quantizer", "weight_quantizer")]
            if all(quantizer.takes_own_rows for quantizer in quantizers):
                held = self.holds("weight_quantizer", weight)
                w = self.code_weight("weight_quantizer", weight) if held else weight
                x_grid, w_grid = (quantizer.grid for quantizer in quantizers)
                return linear_per_batch(x, w, bias, x_grid=x_grid, w_grid=w_grid, dtype=dtype)
        return super().run_on_codes(x, weight, bias, dtype)

    def multiply(self, x: Coded, w: Coded, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        return integer_linear(x, w, bias, dtype=dtype)
