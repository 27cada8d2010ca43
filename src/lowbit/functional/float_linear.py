"""A linear layer of values, whose three products are by the fastest library."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowbit.functional.apply import apply
from lowbit.kernels.float_products import linear, product
from lowbit.kernels.products import column_sums


class _FloatLinear(torch.autograd.Function):
    """y = x @ w^T + b;  dx = g @ w, dw = g^T @ x, db = sum g"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        wants_x, wants_w, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if wants_w else None, w if wants_x else None)
        ctx.shape, outputs = x.shape, w.shape[0]
        y = linear(x.reshape(-1, x.shape[-1]), w, bias)
        # To autograd no view: those that a Function gives cannot be changed in place.
        return torch.ops.aten._unsafe_view.default(y, (*x.shape[:-1], outputs))  # noqa: SLF001

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        wants_x, wants_w, wants_bias = ctx.needs_input_grad
        g = grad_output.reshape(-1, grad_output.shape[-1])
        dx = product(g, w).view(ctx.shape) if wants_x else None
        dw = product(g.t(), x.reshape(-1, x.shape[-1])) if wants_w else None
        return dx, dw, column_sums(g, g.dtype) if wants_bias else None


def float_linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = x @ w^T + b, all of one dtype and device;  dx = g @ w, dw = g^T @ x, db = sum g

    F.linear, but for the order in which sums are added up.
    """
    y: Tensor = apply(_FloatLinear, x, w, bias)
    return y
