"""binarize: one bit, the sign, and one scale, the mean magnitude."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowbit.functional.apply import apply
from lowbit.functional.check import check_float, check_per, check_ste
from lowbit.functional.statistics import mean_abs
from lowbit.granularity import Granularity, PerTensor
from lowbit.kernels import plan
from lowbit.ste import SteKind

# What CLIPPED_IDENTITY lets through: abs(x) up to this, as in networks with binary weights since BinaryConnect.
_CLIP = 1.0


class _Binarize(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, per: Granularity, ste: SteKind) -> Tensor:
        split = per.split(x)
        # Rounded to x's dtype before it is spread: plus and minus a are all the values there are.
        a = per.spread(mean_abs(x, per), split).to(x.dtype)
        y = torch.where(split < 0, -a, a)
        return per.join(torch.where(split.isnan(), split, y), x.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, _, ctx.ste = inputs
        if ctx.ste is not SteKind.IDENTITY:
            ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.ste is SteKind.IDENTITY:
            return grad_output, None, None
        (x,) = ctx.saved_tensors
        return plan.run("clamp_backward", x, grad_output, x, -_CLIP, _CLIP), None, None


def binarize(x: Tensor, *, per: Granularity = PerTensor(), ste: SteKind = SteKind.IDENTITY) -> Tensor:
    """y = a * sign(x),  sign(0) = +1,  a[c] = mean(abs(x)) over the finite x of group c, 0 where there is none

    dx = g (IDENTITY), or g where abs(x) <= 1, else 0 (CLIPPED_IDENTITY); the other rules need a grid

    x has any shape and any float dtype, and y has both. NaN stays NaN, infinities become plus or minus a.

    >>> binarize(torch.tensor([0.5, -1.5, 0.0, 2.0]))
    tensor([ 1., -1.,  1.,  1.])
    """
    check_float("x", x)
    check_binary(per, ste)
    return apply(_Binarize, x, per, ste)


def check_binary(per: object, ste: object) -> None:
    """Refuse a granularity or a gradient rule that ``binarize`` has not."""
    check_per(per)
    check_ste(ste)
    if ste not in (SteKind.IDENTITY, SteKind.CLIPPED_IDENTITY):
        raise ValueError(
            f"ste is {ste!s}, but binarize has no grid's range; use SteKind.IDENTITY or SteKind.CLIPPED_IDENTITY"
        )
