"""quantize and dequantize: real codes, each with its own backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowbit.functional.apply import apply
from lowbit.functional.check import (
    FLOATS,
    INTEGERS,
    check_float,
    check_grad,
    check_params,
    check_per,
    check_scale,
    check_tensor,
    check_zero_point,
)
from lowbit.granularity import Granularity, PerTensor
from lowbit.grid import Grid
from lowbit.kernels import plan

CODE_DTYPES = (torch.int8, torch.uint8, torch.int16, torch.int32)


class _Quantize(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, scale: Tensor, zero_point: Tensor | None, grid: Grid, per: Granularity) -> Tensor:
        return plan.run("quantize", x, x, scale, zero_point, grid=grid, per=per)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, scale, zero_point, ctx.grid, ctx.per = inputs
        ctx.save_for_backward(x, scale, zero_point)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, zero_point = ctx.saved_tensors
        return _quantize_backward(grad_output, x, scale, zero_point, ctx.grid, ctx.per), None, None, None, None


class _Dequantize(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(q: Tensor, scale: Tensor, zero_point: Tensor | None, per: Granularity, dtype: torch.dtype) -> Tensor:
        return plan.run("dequantize", q, q, scale, zero_point, per=per, dtype=dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        q, scale, _, ctx.per, _ = inputs
        ctx.dtype = q.dtype
        ctx.save_for_backward(scale)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = ctx.saved_tensors
        return _dequantize_backward(grad_output, scale, ctx.per, ctx.dtype), None, None, None, None


def _quantize_backward(
    grad_output: Tensor,
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    grid: Grid,
    per: Granularity,
    *,
    differentiable: bool = False,
) -> Tensor:
    args = grad_output, x, scale, zero_point
    return plan.run("quantize_backward", x, *args, grid=grid, per=per, differentiable=differentiable)


def _dequantize_backward(grad_output: Tensor, scale: Tensor, per: Granularity, dtype: torch.dtype) -> Tensor:
    return plan.run("dequantize_backward", grad_output, grad_output, scale, per=per, dtype=dtype)


def quantize(
    x: Tensor,
    scale: Tensor | float,
    zero_point: Tensor | int | None = None,
    *,
    grid: Grid = Grid(8),
    per: Granularity = PerTensor(),
    dtype: torch.dtype | None = None,
) -> Tensor:
    """q = clamp(round(x / s) + z, quant_min, quant_max)

    dx = g / s where quant_min <= round(x / s) + z <= quant_max, else 0

    With ``dtype`` int8, uint8, int16 or int32 the codes are integers, NaN becomes z, and no gradient flows. With None
    they are differentiable floats: float64 for float64 inputs, else float32.

    >>> quantize(torch.tensor([0.26, -9.0]), torch.tensor(0.5), grid=Grid(4), dtype=torch.int8)
    tensor([ 1, -8], dtype=torch.int8)
    """
    scale, zero_point = check_params(x, scale, zero_point, grid, per)
    if dtype is None:
        return apply(_Quantize, x, scale, zero_point, grid, per)
    _check_code_dtype(dtype, grid)
    with torch.no_grad():
        return plan.run("quantize", x, x, scale, zero_point, grid=grid, per=per, dtype=dtype)


def quantize_backward(
    grad_output: Tensor,
    x: Tensor,
    scale: Tensor | float,
    zero_point: Tensor | int | None = None,
    *,
    grid: Grid = Grid(8),
    per: Granularity = PerTensor(),
) -> Tensor:
    """dx = g / s where quant_min <= round(x / s) + z <= quant_max, else 0; in x's dtype

    >>> quantize_backward(torch.ones(2), torch.tensor([0.26, -9.0]), torch.tensor(0.5), grid=Grid(4))
    tensor([2., 0.])
    """
    scale, zero_point = check_params(x, scale, zero_point, grid, per)
    check_grad(grad_output, x)
    return _quantize_backward(grad_output, x, scale, zero_point, grid, per, differentiable=True)


def dequantize(
    q: Tensor,
    scale: Tensor | float,
    zero_point: Tensor | int | None = None,
    *,
    per: Granularity = PerTensor(),
    dtype: torch.dtype | None = None,
) -> Tensor:
    """y = (q - z) * s

    dq = g * s

    q holds integer or float codes; y has ``dtype``, by default that of float codes and float32 for integer ones.

    >>> dequantize(torch.tensor([1, -8], dtype=torch.int8), torch.tensor(0.5))
    tensor([ 0.5000, -4.0000])
    """
    check_tensor("q", q)
    if q.dtype not in INTEGERS + FLOATS:
        raise TypeError(f"q is {q.dtype}, but codes must be an integer or float tensor")
    if dtype is None:
        dtype = q.dtype if q.is_floating_point() else torch.float32
    elif dtype not in FLOATS:
        raise TypeError(f"dtype is {dtype}, but it must be float16, bfloat16, float32 or float64")
    check_per(per)
    scale = check_scale(scale, q, per)
    zero_point = check_zero_point(zero_point, q, per, None)
    return apply(_Dequantize, q, scale, zero_point, per, dtype)


def dequantize_backward(grad_output: Tensor, scale: Tensor | float, *, per: Granularity = PerTensor()) -> Tensor:
    """dq = g * s, in g's dtype

    >>> dequantize_backward(torch.ones(2), torch.tensor(0.5))
    tensor([0.5000, 0.5000])
    """
    check_float("grad_output", grad_output)
    check_per(per)
    return _dequantize_backward(grad_output, check_scale(scale, grad_output, per), per, grad_output.dtype)


def _check_code_dtype(dtype: torch.dtype, grid: Grid) -> None:
    if dtype not in CODE_DTYPES:
        raise TypeError(f"dtype is {dtype}, but codes are int8, uint8, int16, int32, or None for float codes")
    info = torch.iinfo(dtype)
    if grid.quant_min < info.min or grid.quant_max > info.max:
        raise ValueError(
            f"dtype is {dtype}, which holds {info.min} to {info.max}, "
            f"but {grid} needs {grid.quant_min} to {grid.quant_max}"
        )
