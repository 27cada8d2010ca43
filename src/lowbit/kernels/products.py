"""Products of codes: sums in int32, which are exact, and then scales and bias in one order."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from lowbit.kernels import native, plan
from lowbit.kernels.precision import math_dtype


def int_mm(x: Tensor, w: Tensor) -> Tensor:
    """x @ w in int32; a GPU's kernel wants more than 16 rows, multiples of 8, and w column by column"""
    if 0 in (*x.shape, w.shape[1]):
        return torch.zeros(x.shape[0], w.shape[1], dtype=torch.int32, device=x.device)
    if not x.is_cuda:
        return torch._int_mm(_by_rows(x), w if w.t().is_contiguous() and 1 not in w.shape else _by_rows(w))  # noqa: SLF001
    (rows, inner), columns = x.shape, w.shape[1]
    x = functional.pad(x, (0, -inner % 8, 0, max(24 - rows, -rows % 8)))
    w = functional.pad(w.t(), (0, -inner % 8, 0, -columns % 8))
    return torch._int_mm(_by_rows(x), _by_rows(w).t())[:rows, :columns]  # noqa: SLF001


def _by_rows(x: Tensor) -> Tensor:
    """x, row by row: torch's CPU kernel writes nothing where an axis of one has a stride that is not the usual one"""
    return x.contiguous().view(-1).view(x.shape)


def to_sums(values: Tensor) -> Tensor:
    """Sums of integers that were added up as float64, in int32; a GPU may come near to them by a transform"""
    return values.round().to(torch.int32)


def scaled_product(
    q_x: Tensor,
    q_w: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    zero_point: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """y[m, n] = float(sum_k (q_x[m, k] - z[m]) * q_w[n, k]) * (s_x[m] * s_w[n]) + b[n]

    int8 codes; scales and zero points are one number, or one for each row. Each float step is rounded once, in float32
    (float64 for float64), as ``lowbit.nn.products`` has it.
    """
    sums, wide = int_mm(q_x, q_w.t()), math_dtype(dtype)
    columns = q_w.sum(1, dtype=torch.int32) if zero_point is not None else None
    x_scale, w_scale = x_scale.to(wide), w_scale.to(wide)
    bias = None if bias is None else bias.to(wide)
    if sums.numel() and plan.runs_native(sums):
        return native.scale_sums(sums, x_scale, w_scale, zero_point, columns, bias, dtype)
    if zero_point is not None and columns is not None:
        sums = sums - (zero_point.view(-1, 1) if zero_point.dim() else zero_point).to(torch.int32) * columns
    y = sums.to(wide) * ((x_scale.view(-1, 1) if x_scale.dim() else x_scale) * w_scale)
    return (y if bias is None else y + bias).to(dtype)
