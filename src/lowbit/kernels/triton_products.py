"""The product of codes on a GPU: int8 tensor cores, with scales and bias in the epilogue."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from lowbit.kernels.triton_formulas import INTERPRETED, narrowed

# What is worth tuning.
ROWS, COLUMNS, INNER = 256, 128, 128  # of a tile
WARPS, STAGES = 8, 3
TOGETHER = 8  # tiles of rows that are taken together, so that they find each other's columns in the cache

_ALIGNED = 16  # bytes, from row to row of what a descriptor reads


@triton.jit
def _tile(
    place, x, w, y_ptr, x_scale_ptr, w_scale_ptr, zero_ptr, sums_ptr, bias_ptr, rows, columns, steps,
    scale_by_row: tl.constexpr, zero_by_row: tl.constexpr, scale_by_column: tl.constexpr, double: tl.constexpr,
    block_rows: tl.constexpr, block_columns: tl.constexpr, block_inner: tl.constexpr, together: tl.constexpr,
):  # fmt: skip
    math: tl.constexpr = tl.float64 if double else tl.float32
    down, across = tl.cdiv(rows, block_rows), tl.cdiv(columns, block_columns)
    tile = min(place, down * across - 1)  # past the last there is nothing to store
    first = tile // (together * across) * together
    size = min(down - first, together)
    row = (first + tile % (together * across) % size) * block_rows
    column = tile % (together * across) // size * block_columns
    total = tl.zeros((block_rows, block_columns), tl.int32)
    for step in range(steps):
        a, b = x.load([row, step * block_inner]), w.load([column, step * block_inner])
        total = tl.dot(a, b.T, total, out_dtype=tl.int32)
    r, c = row + tl.arange(0, block_rows)[:, None], column + tl.arange(0, block_columns)[None, :]
    if zero_ptr is not None:
        zero = tl.load(zero_ptr + r, mask=r < rows, other=0) if zero_by_row else tl.load(zero_ptr)
        total -= zero * tl.load(sums_ptr + c, mask=c < columns, other=0)
    x_scale = tl.load(x_scale_ptr + r, mask=r < rows, other=0.0) if scale_by_row else tl.load(x_scale_ptr)
    w_scale = tl.load(w_scale_ptr + c, mask=c < columns, other=0.0) if scale_by_column else tl.load(w_scale_ptr)
    y = total.to(math) * (x_scale * w_scale)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + c, mask=c < columns, other=0.0)
    inside = (r < rows) & (c < columns) & (place == tile)
    tl.store(y_ptr + r.to(tl.int64) * columns + c, narrowed(y, y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _product(
    x_ptr, w_ptr, y_ptr, x_scale_ptr, w_scale_ptr, zero_ptr, sums_ptr, bias_ptr,
    rows, columns, inner,
    scale_by_row: tl.constexpr, zero_by_row: tl.constexpr, scale_by_column: tl.constexpr, double: tl.constexpr,
    block_rows: tl.constexpr, block_columns: tl.constexpr, block_inner: tl.constexpr, together: tl.constexpr,
    programs: tl.constexpr, fixed_turns: tl.constexpr, fixed_steps: tl.constexpr,
):  # fmt: skip
    """y = float(sum_k x * w - z * sum_k w) * (s_x * s_w) + b; a program takes every ``programs``-th tile"""
    x = tl.make_tensor_descriptor(x_ptr, [rows, inner], [inner, 1], [block_rows, block_inner])
    w = tl.make_tensor_descriptor(w_ptr, [columns, inner], [inner, 1], [block_columns, block_inner])
    if INTERPRETED:  # which knows no bounds of a loop that are not constant
        for turn in range(fixed_turns):
            _tile(
                tl.program_id(0) + turn * programs, x, w, y_ptr, x_scale_ptr, w_scale_ptr, zero_ptr, sums_ptr, bias_ptr,
                rows, columns, fixed_steps, scale_by_row, zero_by_row, scale_by_column, double,
                block_rows, block_columns, block_inner, together,
            )  # fmt: skip
    else:
        turns = tl.cdiv(tl.cdiv(rows, block_rows) * tl.cdiv(columns, block_columns), programs)
        for turn in tl.range(0, turns, flatten=True):
            _tile(
                tl.program_id(0) + turn * programs, x, w, y_ptr, x_scale_ptr, w_scale_ptr, zero_ptr, sums_ptr, bias_ptr,
                rows, columns, tl.cdiv(inner, block_inner), scale_by_row, zero_by_row, scale_by_column, double,
                block_rows, block_columns, block_inner, together,
            )  # fmt: skip


def refusal(q_x: Tensor, q_w: Tensor) -> str:
    """Why there is no such product of these codes; "" where there is."""
    if not (q_x.is_cuda or knobs.runtime.interpret):
        return f"Triton kernels run on CUDA, not on {q_x.device}"
    if q_x.shape[1] % _ALIGNED or 0 in (*q_x.shape, q_w.shape[0]):
        return f"rows of {q_x.shape[1]} codes do not start at multiples of {_ALIGNED} bytes"
    if q_x.is_cuda and torch.cuda.get_device_capability(q_x.device) < (9, 0):
        return "the device has no tensor descriptors, which came with compute capability 9.0"
    return ""


def scaled_product(
    q_x: Tensor,
    q_w: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    zero_point: Tensor | None,
    column_sums: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """y = float(sum_k (q_x - z) * q_w) * (s_x * s_w) + b; scales and bias in the arithmetic's dtype"""
    (rows, inner), columns = q_x.shape, q_w.shape[0]
    y = torch.empty((rows, columns), dtype=dtype, device=q_x.device)
    programs = _processors(q_x.device)
    zero_point = None if zero_point is None else zero_point.to(torch.int32).contiguous()
    by = x_scale.dim() > 0, zero_point is not None and zero_point.dim() > 0, w_scale.dim() > 0
    blocks, fixed = (ROWS, COLUMNS, INNER), (0, 0)
    if knobs.runtime.interpret:
        blocks = 16, 32, 16
        tiles = triton.cdiv(rows, blocks[0]) * triton.cdiv(columns, blocks[1])
        fixed = triton.cdiv(tiles, programs), triton.cdiv(inner, blocks[2])
    tensors = q_x.contiguous(), q_w.contiguous(), y, x_scale.contiguous(), w_scale.contiguous()
    with torch.cuda.device_of(q_x):
        triton.set_allocator(_allocate)
        _product[(programs,)](
            *tensors, zero_point, column_sums, bias, rows, columns, inner, *by, x_scale.dtype == torch.float64, *blocks,
            TOGETHER, programs, *fixed, num_warps=WARPS, num_stages=STAGES, enable_fp_fusion=False,
        )  # fmt: skip
    return y


def _allocate(size: int, alignment: int, stream: Any) -> Tensor:
    """Where a kernel keeps its descriptors."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
