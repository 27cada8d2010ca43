"""Rounding, clamping and k-bit quantization that a gradient passes straight through.

The names and formulas are those of spikingjelly's ``activation_based.quantize``. What differs, on purpose:
half-precision inputs compute in float32, masks select instead of multiplying (inf * 0 is NaN), ``clamp_by_linear``
adds eps after the difference, where it is not lost to rounding, and a step, k or bound without meaning is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowbit.functional.apply import apply
from lowbit.functional.check import check_float, check_grad, check_tensor
from lowbit.kernels import plan
from lowbit.kernels.precision import math_dtype
from lowbit.record import check_finite, check_integer, check_number


class _StraightThrough(torch.autograd.Function):
    """dx = g, whatever the forward computes; the other arguments get no gradient."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.constants = len(inputs) - 1

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return (grad_output, *(None,) * ctx.constants)


class round_atgf(_StraightThrough):
    """The autograd Function behind ``round``."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return plan.run("round", x, x)


class ceil_atgf(_StraightThrough):
    """The autograd Function behind ``ceil``."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return plan.run("ceil", x, x)


class floor_atgf(_StraightThrough):
    """The autograd Function behind ``floor``."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return plan.run("floor", x, x)


class step_quantize_atgf(_StraightThrough):
    """The autograd Function behind ``step_quantize``."""

    @staticmethod
    def forward(x: Tensor, step: float) -> Tensor:
        return plan.run("step_quantize", x, x, step)


class k_bit_quantize_atgf(_StraightThrough):
    """The autograd Function behind ``k_bit_quantize``."""

    @staticmethod
    def forward(x: Tensor, k: int) -> Tensor:
        return plan.run("k_bit_quantize", x, x, k)


class clamp_atgf(torch.autograd.Function):
    """The autograd Function behind ``clamp``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, min_value: float, max_value: float) -> Tensor:
        return plan.run("clamp", x, x, min_value, max_value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float, float], output: Tensor) -> None:
        x, ctx.min_value, ctx.max_value = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        dx = plan.run("clamp_backward", x, grad_output, x, ctx.min_value, ctx.max_value)
        return dx, None, None


def round(x: Tensor) -> Tensor:
    """y = round(x), half to even

    dx = g

    >>> round(torch.tensor([0.5, 1.5]))
    tensor([0., 2.])
    """
    check_tensor("x", x)
    return apply(round_atgf, x)


def ceil(x: Tensor) -> Tensor:
    """y = ceil(x)

    dx = g

    >>> ceil(torch.tensor([0.2, -0.2]))
    tensor([1., -0.])
    """
    check_tensor("x", x)
    return apply(ceil_atgf, x)


def floor(x: Tensor) -> Tensor:
    """y = floor(x)

    dx = g

    >>> floor(torch.tensor([0.2, -0.2]))
    tensor([ 0., -1.])
    """
    check_tensor("x", x)
    return apply(floor_atgf, x)


def clamp(x: Tensor, min_value: float, max_value: float) -> Tensor:
    """y = min(max(x, min_value), max_value)

    dx = g where min_value <= x <= max_value, else 0

    As in torch, max_value wins where min_value > max_value.

    >>> clamp(torch.tensor([-2.0, 0.5]), -1.0, 1.0)
    tensor([-1.0000,  0.5000])
    """
    check_tensor("x", x)
    check_number("min_value", min_value)
    check_number("max_value", max_value)
    return apply(clamp_atgf, x, min_value, max_value)


def clamp_backward(grad_output: Tensor, x: Tensor, min_value: float, max_value: float) -> Tensor:
    """dx = g where min_value <= x <= max_value, else 0

    >>> clamp_backward(torch.ones(2), torch.tensor([-2.0, 0.5]), -1.0, 1.0)
    tensor([0., 1.])
    """
    check_tensor("x", x)
    check_grad(grad_output, x)
    check_number("min_value", min_value)
    check_number("max_value", max_value)
    return plan.run("clamp_backward", x, grad_output, x, min_value, max_value)


def step_quantize(x: Tensor, step: float = 1.0) -> Tensor:
    """y = round(x / step) * step

    dx = g

    >>> step_quantize(torch.tensor([0.3, 0.7]), 0.25)
    tensor([0.2500, 0.7500])
    """
    _check_step(x, step)
    return apply(step_quantize_atgf, x, step)


def step_quantize_forward(x: Tensor, step: float) -> Tensor:
    """y = round(x / step) * step, without the straight-through gradient"""
    _check_step(x, step)
    with torch.no_grad():
        return plan.run("step_quantize", x, x, step)


def k_bit_quantize(x: Tensor, k: int) -> Tensor:
    """y = round((2^k - 1) * x) / (2^k - 1)

    dx = g

    DoReFa's quantizer for x in [0, 1]; it does not clamp.

    >>> k_bit_quantize(torch.tensor([0.2, 0.6]), 2)
    tensor([0.3333, 0.6667])
    """
    _check_k(x, k)
    return apply(k_bit_quantize_atgf, x, k)


def k_bit_quantize_forward(x: Tensor, k: int) -> Tensor:
    """y = round((2^k - 1) * x) / (2^k - 1), without the straight-through gradient"""
    _check_k(x, k)
    with torch.no_grad():
        return plan.run("k_bit_quantize", x, x, k)


def affine_k_bit_quantize(x: Tensor, k: int, w: Tensor | float, b: Tensor | float) -> Tensor:
    """y = w * k_bit_quantize(x, k) + b

    dx = g * w; w and b get their ordinary gradients.

    >>> affine_k_bit_quantize(torch.tensor([0.2, 0.6]), 2, torch.tensor(3.0), torch.tensor(1.0))
    tensor([2., 3.])
    """
    return w * k_bit_quantize(x, k) + b


def clamp_by_linear(x: Tensor, eps: float = 1e-5) -> Tensor:
    """y = (x - min(x)) / (max(x) - min(x) + eps)

    dx = the ordinary gradient, through min and max too. A constant tensor gives 0.

    >>> clamp_by_linear(torch.tensor([1.0, 2.0, 3.0]), eps=0.0)
    tensor([0.0000, 0.5000, 1.0000])
    """
    check_float("x", x)
    if check_finite("eps", eps) < 0:
        raise ValueError(f"eps is {eps}, but it must not be negative")
    if x.numel() == 0:
        return x.clone()
    wide = x.float() if x.dtype != torch.float64 else x
    low = wide.min()
    return ((wide - low) / (wide.max() - low + eps)).to(x.dtype)


def _check_real(x: Tensor) -> None:
    check_tensor("x", x)
    if x.is_complex():
        raise TypeError(f"x is {x.dtype}, but it must be a real tensor; take x.real or x.abs()")


def _check_step(x: Tensor, step: float) -> None:
    _check_real(x)
    info = torch.finfo(math_dtype(x.dtype))
    if not 0 < check_finite("step", step) <= info.max or step < info.smallest_normal * info.eps:
        raise ValueError(f"step is {step}, but it must be positive and finite in {info.dtype}")


def _check_k(x: Tensor, k: int) -> None:
    _check_real(x)
    # The largest k whose 2^k - 1 is a finite number.
    check_integer("k", k, 1, 1023 if x.dtype == torch.float64 else 127)
