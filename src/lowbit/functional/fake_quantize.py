"""fake_quantize: quantize and dequantize in one step, with the gradient rule of your choice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowbit.functional.apply import apply
from lowbit.functional.check import check_grad, check_params, check_ste
from lowbit.functional.statistics import params_from_data
from lowbit.granularity import Granularity, PerTensor
from lowbit.grid import Grid
from lowbit.kernels import plan
from lowbit.kernels.plan import is_traced
from lowbit.ste import SteKind


class _FakeQuantize(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, scale: Tensor, zero_point: Tensor | None, grid: Grid, per: Granularity, ste: SteKind
    ) -> Tensor:
        return plan.run("fake_quantize", x, x, scale, zero_point, grid=grid, per=per)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, scale, zero_point, ctx.grid, ctx.per, ctx.ste = inputs
        if ctx.ste is not SteKind.IDENTITY:
            ctx.save_for_backward(x, scale, zero_point)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.ste is SteKind.IDENTITY:
            return grad_output, None, None, None, None, None
        x, scale, zero_point = ctx.saved_tensors
        dx = _backward(grad_output, x, scale, zero_point, ctx.grid, ctx.per, ctx.ste)
        return dx, None, None, None, None, None


class _Settled(torch.autograd.Function):
    """What _FakeQuantize does, where no one traces: the forward settles the backward's plan as well.

    While autograd's own thread runs a backward on a GPU, the host waits: there should be nothing left to decide.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        x, scale, zero_point, *records = inputs
        forward, ctx.plan = plan.settle("fake_quantize", x, *records)
        y: Tensor = forward.run(x, scale, zero_point)
        _FakeQuantize.setup_context(ctx, inputs, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.ste is SteKind.IDENTITY:
            return grad_output, None, None, None, None, None
        if torch.is_grad_enabled() or is_traced(grad_output):
            return _FakeQuantize.backward(ctx, grad_output)
        return ctx.plan.run(grad_output, *ctx.saved_tensors), None, None, None, None, None


class _FakeQuantizePerBatch(torch.autograd.Function):
    """Never traced, so that it may keep what it computed on the way: the scale."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: Grid, per: Granularity, ste: SteKind, symmetric: bool) -> Tensor:
        forward, ctx.plan = plan.settle("fake_quantize_per_batch", x, grid, per, ste)
        y, scale, zero_point = forward.run(x, symmetric=symmetric)
        ctx.grid, ctx.per, ctx.ste = grid, per, ste
        if ste is not SteKind.IDENTITY:
            ctx.save_for_backward(x, scale, zero_point)
        return y

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return *_Settled.backward(ctx, grad_output)[:1], None, None, None, None


def _backward(
    grad_output: Tensor,
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    grid: Grid,
    per: Granularity,
    ste: SteKind,
    *,
    differentiable: bool = False,
) -> Tensor:
    args = grad_output, x, scale, zero_point
    return plan.run("fake_quantize_backward", x, *args, grid=grid, per=per, ste=ste, differentiable=differentiable)


def fake_quantize(
    x: Tensor,
    scale: Tensor | float,
    zero_point: Tensor | int | None = None,
    *,
    grid: Grid = Grid(8),
    per: Granularity = PerTensor(),
    ste: SteKind = SteKind.CLIPPED_IDENTITY,
) -> Tensor:
    """y = (q - z) * s,  q = clamp(round(x / s) + z, quant_min, quant_max)

    dx = the rule named by ``ste`` (see SteKind); scale and zero_point get none.

    x has any shape and any float dtype, and y has both; scale and zero_point have the shape that ``per`` asks for (or
    are plain numbers). NaN stays NaN and infinities saturate.

    >>> fake_quantize(torch.tensor([0.26, -9.0]), torch.tensor(0.5), grid=Grid(4))
    tensor([ 0.5000, -4.0000])
    """
    check_ste(ste)
    scale, zero_point = check_params(x, scale, zero_point, grid, per)
    return apply(_FakeQuantize, x, scale, zero_point, grid, per, ste, settled=_Settled)


def fake_quantize_per_batch(x: Tensor, *, grid: Grid, per: Granularity, ste: SteKind, symmetric: bool) -> Tensor:
    """y = fake_quantize with the scale and zero point of x's own range, in one call; x has passed the checks"""
    if is_traced(x):
        scale, zero_point = params_from_data(x, grid=grid, per=per, symmetric=symmetric)
        return fake_quantize(x, scale, zero_point, grid=grid, per=per, ste=ste)
    return apply(_FakeQuantizePerBatch, x, grid, per, ste, symmetric)


def fake_quantize_backward(
    grad_output: Tensor,
    x: Tensor,
    scale: Tensor | float,
    zero_point: Tensor | int | None = None,
    *,
    grid: Grid = Grid(8),
    per: Granularity = PerTensor(),
    ste: SteKind = SteKind.CLIPPED_IDENTITY,
) -> Tensor:
    """dx = the rule named by ``ste`` (see SteKind), applied to ``grad_output``

    >>> fake_quantize_backward(torch.ones(2), torch.tensor([0.26, -9.0]), torch.tensor(0.5), grid=Grid(4))
    tensor([1., 0.])
    """
    check_ste(ste)
    scale, zero_point = check_params(x, scale, zero_point, grid, per)
    check_grad(grad_output, x)
    return _backward(grad_output, x, scale, zero_point, grid, per, ste, differentiable=True)
