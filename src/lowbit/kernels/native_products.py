"""What native.c does around products of codes, which are torch's."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.kernels.native import TYPES, Sums, address, loaded


def select(grad_output: Tensor, bits: Tensor) -> Tensor:
    """grad_output, contiguous, where its bit is set, else 0"""
    grad, bits = grad_output.contiguous(), bits.contiguous()
    dx = torch.empty_like(grad)
    addresses = bits.data_ptr(), grad.data_ptr(), dx.data_ptr()
    loaded().select(grad.numel(), grad.element_size(), *addresses, torch.get_num_threads())
    return dx


def scale_sums(
    sums: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    zero_point: Tensor | None,
    column_sums: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """y = float(sum - z * column_sum) * (s_x * s_w) + b, in one pass; scales and bias in the arithmetic's dtype"""
    y = torch.empty(sums.shape, dtype=dtype, device="cpu")
    zero_point = None if zero_point is None else zero_point.to(torch.int32).contiguous()
    x_scale, w_scale = x_scale.contiguous(), w_scale.contiguous()
    call = Sums(*sums.shape, x_scale.dim() > 0, zero_point is not None and zero_point.dim() > 0, w_scale.dim() > 0)
    call.y_type, call.wide, call.threads = TYPES.index(dtype), x_scale.dtype == torch.float64, torch.get_num_threads()
    call.y, call.sums, call.x_scale, call.w_scale = (t.data_ptr() for t in (y, sums, x_scale, w_scale))
    call.zero_point, call.column_sums, call.bias = address(zero_point), address(column_sums), address(bias)
    loaded().scale_sums(call)
    return y


def put_channels_last(q: Tensor) -> Tensor:
    """q + 128 of int8 codes in uint8, with axis 1 last: (n, c, ...) -> (n, ..., c)"""
    y = torch.empty((q.shape[0], *q.shape[2:], q.shape[1]), dtype=torch.uint8, device="cpu")
    _transpose(q.contiguous(), y, q.shape[1], unsign=True)
    return y


def put_channels_first(x: Tensor, y: Tensor) -> None:
    """y = x, of 2 or 4 bytes each, with its last axis in place 1: (n, ..., c) -> (n, c, ...); both contiguous"""
    _transpose(x.contiguous(), y, x[0].numel() // x.shape[-1])


def transpose(x: Tensor) -> Tensor:
    """x^T of a contiguous matrix whose elements have 1, 2 or 4 bytes"""
    y = torch.empty((x.shape[1], x.shape[0]), dtype=x.dtype, device="cpu")
    _transpose(x.unsqueeze(0), y, x.shape[0])
    return y


def _transpose(x: Tensor, y: Tensor, rows: int, *, unsign: bool = False) -> None:
    sizes = x.shape[0], rows, x[0].numel() // rows, x.element_size()
    loaded().transpose(*sizes, unsign, x.data_ptr(), y.data_ptr(), torch.get_num_threads())
