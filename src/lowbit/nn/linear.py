"""LinearLayer: a linear layer that multiplies codes while it trains, where that is faster."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lowbit.functional.float_linear import float_linear
from lowbit.functional.linear import Coded, integer_linear, linear_by_kept_scale, linear_per_batch
from lowbit.granularity import Granularity, PerChannel, PerGroup, PerTensor, PerToken
from lowbit.kernels import products
from lowbit.kernels.float_products import has_faster
from lowbit.nn.code_layer import CodeLayer, is_watched
from lowbit.nn.memo import Memo
from lowbit.nn.swap import remove

# By device: below so many multiplications, codes take longer than quantized values and a product of those.
_LEAST = {"cpu": 2**24, "cuda": 2**32}


class LinearLayer(CodeLayer):
    """y = q_in(x) @ q_w(w)^T + b"""

    input_pers = PerTensor(), PerToken()
    weight_pers = PerTensor(), PerToken(), PerChannel(0)

    def equip(self, *args: Any, **kwargs: Any) -> None:
        super().equip(*args, **kwargs)
        self._memo = Memo()

    def strip(self) -> None:
        super().strip()
        remove(self, "_memo")

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
        device = device or self._float("weight").device
        if reason := self.codes_refusal(device):
            return reason
        per, of_x = self.quantizer("weight_quantizer").per, self.quantizer("input_quantizer")
        has_zero = not (of_x.symmetric and of_x.grid.fits_int8)
        if not isinstance(per, PerGroup) or products.multiplies_groups(
            device.type, self.in_features, per.size, has_zero
        ):
            return ""
        return f"the sums of {per} take longer to scale than values take to multiply; codes are what is kept"

    def run_float(self, *args: Any, **kwargs: Any) -> Any:
        x: Any = args[0] if args else kwargs.get("input")
        if self._is_by_float_linear(x):
            return float_linear(x, self.weight, self.bias)
        return super().run_float(*args, **kwargs)

    def _is_by_float_linear(self, x: Any) -> bool:
        """Whether a large product of values in training is one of ours: it is, where torch's takes longer."""
        if not (self.training and self._context.integer_products and isinstance(x, Tensor) and x.device.type == "cpu"):
            return False
        if type(self).float_class.forward is not nn.Linear.forward or is_watched(x):
            return False
        least = self.least_sums("cpu")
        if least is None or self.count_sums(x) < least:
            return False
        if torch.is_autocast_enabled("cpu") or not any(map(self.is_on, ("input_quantizer", "weight_quantizer"))):
            return False
        own = self.weight, *([] if self.bias is None else [self.bias])
        if is_watched(*own) or any(tensor.dtype != torch.float32 for tensor in (x, *own)):
            return False
        return self.fits(x, self.weight) and has_faster()

    def takes_per(self, slot: str, per: Granularity | None) -> bool:
        if slot == "weight_quantizer" and isinstance(per, PerGroup):
            return bool(self.in_features % per.size == 0)
        return super().takes_per(slot, per)

    def way(self, device: torch.device) -> str:
        if torch.compiler.is_compiling():
            return self._choose(device)
        return self._memo.recall(self._facts(device), self._choose, device)

    def _facts(self, device: torch.device) -> tuple[Any, ...]:
        """All that a choice depends on."""
        of_x, of_w = self.quantizer("input_quantizer"), self.quantizer("weight_quantizer")
        return (
            *(device, device.type == "cpu" and torch.backends.mkldnn.enabled, self.in_features),
            *(self._context.integer_products, len(self._edges), self._norm, self.integer_bias),
            *(getattr(of_x, "settings", None), getattr(of_w, "settings", None)),
        )

    def _choose(self, device: torch.device) -> str:
        """By one function, for a weight that is a parameter: "groups", "rows" and "kept"; by codes of both: "codes"."""
        way = super().way(device)
        if not way or self._edges or self._norm:
            return way
        of_x, of_w = self.quantizer("input_quantizer"), self.quantizer("weight_quantizer")
        if of_x.takes_own_rows and (of_w.takes_own_rows or of_w.takes_own_groups):
            return "rows" if of_w.takes_own_rows else "groups"
        return "kept" if of_x.keeps_scale and of_w.takes_own_rows else way

    def run_on_codes(self, way: str, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        if way == "codes" or not isinstance(weight, nn.Parameter):
            return super().run_on_codes(way, x, weight, bias, dtype)
        of_x, of_w = self.quantizer("input_quantizer"), self.quantizer("weight_quantizer")
        w = self._once_coded(weight)
        if way == "kept":
            kept, grids = of_x.follow(x), {"x_grid": of_x.grid, "w_grid": of_w.grid}
            return linear_by_kept_scale(x, kept, w, bias, **grids, ste=of_x.ste, dtype=dtype)
        group = of_w.per.size if way == "groups" else None
        return linear_per_batch(x, w, bias, x_grid=of_x.grid, w_grid=of_w.grid, dtype=dtype, group=group)

    def _once_coded(self, weight: nn.Parameter) -> nn.Parameter | Coded:
        slot = "weight_quantizer"
        return self.code_weight(slot, weight) if self.holds(slot, weight) else weight

    def multiply(self, x: Coded, w: Coded, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        return integer_linear(x, w, bias, dtype=dtype)
