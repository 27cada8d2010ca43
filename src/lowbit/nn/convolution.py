"""ConvolutionLayer: a convolution that multiplies codes while it trains, where that is faster."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.functional.convolution import integer_convolution
from lowbit.functional.linear import Coded
from lowbit.granularity import PerChannel, PerTensor
from lowbit.kernels import convolution
from lowbit.kernels.convolution import Steps
from lowbit.nn.code_layer import CodeLayer

# By device: below so many multiplications, codes take longer than quantized values and a convolution of those.
_LEAST = {"cpu": 2**27}
# The same for so few positions, since oneDNN packs the weight first,
_LEAST_POSITIONS = 512
# and for so few multiplications of each element that comes in or goes out, since these pass through memory.
_LEAST_USES = 128
_FORWARDS = {getattr(cls, name) for cls in (nn.Conv1d, nn.Conv2d, nn.Conv3d) for name in ("forward", "_conv_forward")}


class ConvolutionLayer(CodeLayer):
    """y = convolution(q_in(x), q_w(w)) + b"""

    sums = "output positions"
    input_pers = weight_pers = PerTensor(), PerChannel(0)

    @property
    def terms(self) -> int:
        return int(self.in_channels) // int(self.groups) * math.prod(self.kernel_size)

    def least_sums(self, device: str) -> int | None:
        size = self.out_channels * self.terms
        if device not in _LEAST or not size or torch.compiler.is_compiling():
            return None
        return max(-(-_LEAST[device] // size), _LEAST_POSITIONS)

    def count_sums(self, x: Tensor) -> int:
        if x.dim() != len(self.kernel_size) + 2 or x.shape[1] != self.in_channels:
            return -1
        return int(x.shape[0]) * math.prod(self.steps.positions(x.shape[2:], self.kernel_size))

    def own_refusal(self, device: torch.device) -> str:
        cls: Any = type(self).float_class
        if cls.forward not in _FORWARDS or cls._conv_forward not in _FORWARDS:
            return "the layer has a forward of its own"
        if self.groups > 1:
            return f"it has {self.groups} groups"
        if self.padding_mode != "zeros":
            return f"its padding is {self.padding_mode}"
        if self.padding == "same" and any(reach % 2 for reach in self._reaches()):
            return "its padding is not the same on both sides"
        passed = self.in_channels * math.prod(self.stride) + self.out_channels
        uses = self.out_channels * self.terms // max(passed, 1)
        if uses < _LEAST_USES:
            return f"{uses} multiplications for each element that comes in or goes out are too few"
        quantizer = self.quantizer("input_quantizer")
        if getattr(quantizer, "per", None) == PerChannel(0) and not quantizer.symmetric:
            return "the input has a zero point for each image"
        return convolution.refusal(device.type)

    @property
    def steps(self) -> Steps:
        """Stride, padding and dilation, in numbers."""
        named = {"valid": [0] * len(self.kernel_size), "same": [reach // 2 for reach in self._reaches()]}
        padding = named[self.padding] if isinstance(self.padding, str) else self.padding
        return Steps(tuple(self.stride), tuple(padding), tuple(self.dilation))

    def _reaches(self) -> list[int]:
        """How far a window reaches beyond its first element, along each axis."""
        return [step * (taps - 1) for step, taps in zip(self.dilation, self.kernel_size, strict=True)]

    def multiply(self, x: Coded, w: Coded, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        return integer_convolution(x, w, bias, steps=self.steps, dtype=dtype)
