"""Quantizers without a scale of their own to keep: binary weights, and DoReFa's weights and activations."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lowbit.functional import binarize, clamp, fake_quantize
from lowbit.functional import round as round_straight_through
from lowbit.functional.binary import check_binary
from lowbit.functional.check import check_float
from lowbit.functional.statistics import mean_abs
from lowbit.granularity import Granularity, PerTensor
from lowbit.grid import Grid
from lowbit.kernels.precision import math_dtype
from lowbit.nn.coded import Codes
from lowbit.record import check_integer
from lowbit.ste import SteKind


class Stateless(nn.Module):
    """y = f(x) while enabled, else x; no state but the two flags

    What FakeQuantize shows of itself, for a quantizer that is one formula. There is nothing to observe: ``observing``
    is kept and saved, so that model code may set it on every quantizer alike.
    """

    def __init__(self, bits: int, per: Granularity, ste: SteKind) -> None:
        super().__init__()
        self.bits, self.per, self.ste = bits, per, ste
        self.enabled = self.observing = True

    def forward(self, x: Tensor) -> Tensor:
        """Quantize x, where enabled; x is checked in either case."""
        check_float("x", x)
        self.per.scale_shape(x.shape)  # refuses what does not fit
        return self._quantize(x) if self.enabled else x

    def start(self, x: Tensor) -> None:
        """There is no scale to start."""

    def _quantize(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def extra_repr(self) -> str:
        flags = "".join(f", {name}=False" for name in ("enabled", "observing") if not getattr(self, name))
        return f"{self.bits} bit{'s' if self.bits > 1 else ''}, {self.per}, {self.ste.name}{flags}"

    def get_extra_state(self) -> Tensor:
        """The flags and the bits, as FakeQuantize saves them."""
        return torch.tensor([self.enabled, self.observing, self.bits], dtype=torch.int32)

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the flags."""
        self.enabled, self.observing = (bool(flag) for flag in state.tolist()[:2])


class Binarize(Stateless):
    """y = a * sign(x),  sign(0) = +1,  a[c] = mean(abs(x)) over the finite x of group c

    dx = g (IDENTITY), or g where abs(x) <= 1, else 0 (CLIPPED_IDENTITY)

    >>> Binarize()(torch.tensor([0.5, -1.5]))
    tensor([ 1., -1.])
    """

    def __init__(self, per: Granularity = PerTensor(), ste: SteKind = SteKind.IDENTITY) -> None:
        check_binary(per, ste)
        super().__init__(1, per, ste)

    def _quantize(self, x: Tensor) -> Tensor:
        return binarize(x, per=self.per, ste=self.ste)

    @torch.no_grad()
    def codes(self, x: Tensor) -> Codes:
        """+1 and -1, and a, rounded to x's dtype as the values are."""
        scale = mean_abs(x, self.per).to(x.dtype).to(math_dtype(x.dtype))
        return Codes(torch.where(x < 0, -1, 1), scale, None)


class DoReFaWeight(Stateless):
    """w_q = 2 * q_k(tanh(w) / (2 * max(abs(tanh(w)))) + 1/2) - 1,  q_k(x) = round(n x) / n,  n = 2^k - 1

    computed as an integer times a scale, (2 round(n x) - n) * (1 / n), so that a file can hold it as it is

    dw = the ordinary gradient, through tanh and max too, with q_k passed unchanged

    The max is that of the whole tensor and skips NaN; where it is 0, the divisor is 1. No code stands for 0: a weight
    of 0 becomes 1 / (2^k - 1). From DoReFa-Net, arXiv 1606.06160.

    >>> DoReFaWeight(2)(torch.tensor([-1.0, 0.1, 1.0]))
    tensor([-1.0000,  0.3333,  1.0000])
    """

    def __init__(self, bits: int) -> None:
        if bits == 1 and not isinstance(bits, bool):
            raise ValueError(
                "bits is 1, but DoReFa weights must have from 2 to 16; for 1 bit use Binarize(), as recipes.binary()"
            )
        check_integer("bits", bits, 2, 16)
        super().__init__(bits, PerTensor(), SteKind.IDENTITY)

    def _quantize(self, x: Tensor) -> Tensor:
        q = self._codes(x)
        return (q * self._scale(q)).to(x.dtype)

    @torch.no_grad()
    def codes(self, x: Tensor) -> Codes:
        """The odd numbers from -n to n, and 1 / n."""
        q = self._codes(x)
        return Codes(q.to(torch.int32), self._scale(q), None)

    def _codes(self, x: Tensor) -> Tensor:
        t = x.to(math_dtype(x.dtype)).tanh()
        # An empty tensor has no max.
        reach = t.nan_to_num(nan=0.0).abs().max() if t.numel() else t.sum()
        unit = t / (2 * torch.where(reach > 0, reach, 1)) + 0.5
        return 2 * round_straight_through(unit * self._steps) - self._steps

    @property
    def _steps(self) -> int:
        return 2**self.bits - 1

    def _scale(self, like: Tensor) -> Tensor:
        return torch.full((), self._steps, dtype=like.dtype, device=like.device).reciprocal()


class DoReFaActivation(Stateless):
    """y = q_k(min(max(x, 0), 1)),  q_k(x) = round(x / s) * s,  s = 1 / (2^k - 1)

    dx = g where 0 <= x <= 1, else 0

    >>> DoReFaActivation(2)(torch.tensor([-1.0, 0.4, 2.0]))
    tensor([0.0000, 0.3333, 1.0000])
    """

    def __init__(self, bits: int) -> None:
        check_integer("bits", bits, 1, 16)
        super().__init__(bits, PerTensor(), SteKind.CLIPPED_IDENTITY)

    @property
    def grid(self) -> Grid:
        """The codes from 0 to n."""
        return Grid(self.bits, signed=False)

    def scale(self, like: Tensor) -> Tensor:
        """1 / n"""
        n = torch.full((), self.grid.quant_max, dtype=math_dtype(like.dtype), device=like.device)
        return n.reciprocal()

    def _quantize(self, x: Tensor) -> Tensor:
        return fake_quantize(clamp(x, 0.0, 1.0), self.scale(x), grid=self.grid, ste=SteKind.IDENTITY)
