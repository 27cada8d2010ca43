"""learned_fake_quantize: the scale (and zero point) as parameters; LSQ, LSQ+ and PACT."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowbit.functional.apply import apply
from lowbit.functional.check import check_params, check_ste
from lowbit.granularity import Granularity, PerTensor
from lowbit.grid import Grid
from lowbit.kernels import plan
from lowbit.kernels.plan import is_traced
from lowbit.record import check_choice, check_flag, check_integer
from lowbit.scale import nearest_zero_point
from lowbit.ste import SteKind


class _LearnedFakeQuantize(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        scale: Tensor,
        zero_point: Tensor | None,
        grid: Grid,
        per: Granularity,
        ste: SteKind,
        method: str,
        factor: float,
    ) -> Tensor:
        z = _grid_zero_point(zero_point, grid)
        return plan.run("learned_fake_quantize", x, x, scale, z, grid=grid, per=per)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, scale, zero_point, ctx.grid, ctx.per, ctx.ste, ctx.method, ctx.factor = inputs
        ctx.save_for_backward(x, scale, zero_point)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        records = {"grid": ctx.grid, "per": ctx.per, "ste": ctx.ste}
        run = partial(plan.run, "learned_fake_quantize_backward", ctx.saved_tensors[0], **records)
        return _gradients(ctx, grad_output, run)


class _Settled(torch.autograd.Function):
    """What _LearnedFakeQuantize does, where no one traces: the forward settles the backward's plan as well."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        x, scale, zero_point, grid, per, ste, *_ = inputs
        forward, ctx.plan = plan.settle("learned_fake_quantize", x, grid, per, ste)
        y: Tensor = forward.run(x, scale, _grid_zero_point(zero_point, grid))
        _LearnedFakeQuantize.setup_context(ctx, inputs, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() or is_traced(grad_output):
            return _LearnedFakeQuantize.backward(ctx, grad_output)
        return _gradients(ctx, grad_output, ctx.plan.run)


def _gradients(ctx: Any, grad_output: Tensor, run: Callable[..., Any]) -> tuple[Tensor | None, ...]:
    x, scale, zero_point = ctx.saved_tensors
    dx, ds, *dz = run(grad_output, x, scale, _grid_zero_point(zero_point, ctx.grid), method=ctx.method)
    learned = dz[0] * ctx.factor if zero_point is not None and zero_point.is_floating_point() else None
    return dx, (ds * ctx.factor).to(scale.dtype), learned, None, None, None, None, None


class _FloorScale(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(scale: Tensor, floor: Tensor) -> Tensor:
        return torch.maximum(scale, floor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return grad_output, None


def learned_fake_quantize(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | int | None = None,
    *,
    grid: Grid = Grid(8),
    per: Granularity = PerTensor(),
    ste: SteKind = SteKind.CLIPPED_IDENTITY,
    grad_scale: bool = True,
    method: str = "lsq",
    batch_axis: int | None = None,
) -> Tensor:
    """y = (q - z) * s,  q = clamp(round(x / s) + z, quant_min, quant_max)

    dx = the rule named by ``ste``
    ds = sum(g * (round(x / s) - x / s)) where lo <= x <= hi, g * (quant_min - z) below, g * (quant_max - z) above
    dz = sum(-g * s) where x < lo or x > hi, for a float zero point, which is rounded into the grid in the forward

    Both sums are over the elements that share a scale, times 1 / sqrt(n * quant_max) unless ``grad_scale`` is False. n
    is their number, without ``batch_axis`` where one is named (activations). ``method="pact"`` drops the inside term
    and scales by 1 / quant_max^2.

    >>> scale = torch.tensor(0.5, requires_grad=True)
    >>> learned_fake_quantize(torch.tensor([0.26, -9.0]), scale, grid=Grid(4), grad_scale=False).sum().backward()
    >>> scale.grad
    tensor(-7.5200)
    """
    check_ste(ste)
    check_flag("grad_scale", grad_scale)
    check_choice("method", method, ("lsq", "pact"))
    scale, zero_point = check_params(x, scale, zero_point, grid, per, learned=True)
    factor = _factor(x.shape, grid, per, method, batch_axis)
    records = grid, per, ste, method, factor if grad_scale else 1.0
    return apply(_LearnedFakeQuantize, x, scale, zero_point, *records, settled=_Settled)


def floor_scale(scale: Tensor, floor: Tensor) -> Tensor:
    """s = max(scale, floor)

    dscale = g, above the floor and on it: a scale that sank below can come back.
    """
    return apply(_FloorScale, scale, floor)


def _factor(shape: torch.Size, grid: Grid, per: Granularity, method: str, batch_axis: int | None) -> float:
    if batch_axis is not None:
        check_integer("batch_axis", batch_axis, -len(shape), len(shape) - 1)
    if method == "pact":
        return 1.0 / grid.quant_max**2
    return 1.0 / math.sqrt(max(per.group_size(shape, batch_axis), 1) * grid.quant_max)


def _grid_zero_point(zero_point: Tensor | None, grid: Grid) -> Tensor | None:
    return None if zero_point is None else nearest_zero_point(zero_point, grid)
