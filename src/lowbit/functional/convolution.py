"""Convolutions on integer products: codes in, sums in int32, values out; and the gradients of the same in float."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowbit.functional.apply import apply
from lowbit.functional.linear import LONGEST_ROW, Coded
from lowbit.granularity import PerChannel, PerTensor
from lowbit.kernels.convolution import Steps, scaled_convolution


class _Convolution(torch.autograd.Function):
    """y = convolution(x, w) + b;  dx, dw, db = those of torch's convolution, of the values of x and w"""

    @staticmethod
    def forward(ctx: Any, x_carrier: Tensor, w_carrier: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        ctx.dtype, ctx.steps, q_x, x_scale, zero_point, x_per, q_w, w_scale, w_per = rest
        ctx.pers, ctx.sizes = (x_per, w_per), None if bias is None else list(bias.shape)
        ctx.carriers = x_carrier, w_carrier  # not saved: a hook that copies what is saved would give them memory
        ctx.save_for_backward(q_x, x_scale, zero_point, q_w, w_scale)
        return scaled_convolution(q_x, q_w, x_scale, w_scale, zero_point, bias, steps=ctx.steps, dtype=ctx.dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        q_x, x_scale, zero_point, q_w, w_scale = ctx.saved_tensors
        x = Coded(ctx.carriers[0], q_x, x_scale, zero_point, ctx.pers[0]).values(ctx.dtype)
        w = Coded(ctx.carriers[1], q_w, w_scale, None, ctx.pers[1]).values(ctx.dtype)
        still, wanted = [0] * len(ctx.steps.stride), ctx.needs_input_grad[:3]
        grads = torch.ops.aten.convolution_backward(grad_output, x, w, ctx.sizes, *ctx.steps, False, still, 1, wanted)
        return *grads, *[None] * 9


def integer_convolution(
    x: Coded, w: Coded, bias: Tensor | None = None, *, steps: Steps, dtype: torch.dtype | None = None
) -> Tensor:
    """y = float(sum (q_x - z_x) * q_w) * (s_x * s_w) + b, over the window of each output

    The sum is exact; the rest is in float32 (float64 for float64), rounded to ``dtype`` (that of x) at the end. Around
    x lie zeros, whose code is z_x. x has one scale or one for each image, and one zero point, w one scale or one for
    each output; other codes are multiplied as values. dx, dw and db are those of torch's convolution in this dtype
    at the values of x and w, which are made of the codes again when the backward needs them: only codes are kept.
    """
    terms = w.q[0].numel() if len(w.q) else 0
    if terms > LONGEST_ROW:
        raise ValueError(f"sums of {terms} products of codes may not fit 32 bits; the most is {LONGEST_ROW}")
    dtype = dtype or x.carrier.dtype
    has_one_point = x.zero_point is None or x.zero_point.dim() == 0
    if not has_one_point or any(part.per not in (PerTensor(), PerChannel(0)) for part in (x, w)):
        still = [0] * len(steps.stride)
        bias = None if bias is None else bias.to(dtype)
        return torch.convolution(x.values(dtype), w.values(dtype), bias, *steps, False, still, 1)
    codes = x.q, x.scale, x.zero_point, x.per, w.q, w.scale, w.per
    y: Tensor = apply(_Convolution, x.carrier, w.carrier, bias, dtype, steps, *codes)
    return y
