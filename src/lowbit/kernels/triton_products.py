"""The product of codes on a GPU: int8 tensor cores, with scales and bias in the epilogue."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from lowbit.kernels.triton_formulas import INTERPRETED, narrowed, widened
from lowbit.kernels.triton_launch import Launch, empty_on

# What is worth tuning.
TILES = {2: (128, 256, 128), 4: (128, 128, 128), 8: (64, 64, 128)}  # rows, columns, inner, by bytes of a result
SELECTED_TILE = 128, 256, 64  # the same of a product of values
WARPS, STAGES = 8, 3
GROUPED_TILE, GROUPED_WARPS, GROUPED_STAGES = (64, 128, 128), 4, 4  # of a product that scales the sums of groups
GROUPED_PROGRAMS = 2  # of a multiprocessor: while one scales sums, the other multiplies
TOGETHER = 8  # tiles of rows that are taken together, so that they find each other's columns in the cache

_ALIGNED = 16  # bytes, from row to row of what a descriptor reads or writes
_SHARED = 232448  # bytes that a program of compute capability 9.0 may have


@triton.jit
def corner(tile, rows, columns, block_rows: tl.constexpr, block_columns: tl.constexpr, together: tl.constexpr):
    """The first row and column of a tile"""
    down, across = tl.cdiv(rows, block_rows), tl.cdiv(columns, block_columns)
    first = tile // (together * across) * together
    size = min(down - first, together)
    row = (first + tile % (together * across) % size) * block_rows
    return row, tile % (together * across) // size * block_columns


@triton.jit
def _result(y_ptr, rows, columns, described: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr):
    """A descriptor of y, where it may have one"""
    if described:
        y = tl.make_tensor_descriptor(y_ptr, [rows, columns], [columns, 1], [block_rows, block_columns])
    else:
        y = None
    return y


@triton.jit
def _put(y, y_ptr, row, column, r, c, rows, columns, value, described: tl.constexpr):
    """A tile into y"""
    if described:
        y.store([row, column], value)
    else:
        tl.store(y_ptr + r.to(tl.int64) * columns + c, value, mask=(r < rows) & (c < columns))


@triton.jit
def _tile(
    tile, x, w, y, y_ptr, x_scale_ptr, w_scale_ptr, zero_ptr, sums_ptr, bias_ptr, rows, columns, steps,
    scale_by_row: tl.constexpr, zero_by_row: tl.constexpr, scale_by_column: tl.constexpr, double: tl.constexpr,
    described: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr, block_inner: tl.constexpr,
    together: tl.constexpr,
):  # fmt: skip
    math: tl.constexpr = tl.float64 if double else tl.float32
    row, column = corner(tile, rows, columns, block_rows, block_columns, together)
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
    value = total.to(math) * (x_scale * w_scale)
    if bias_ptr is not None:
        value += widened(tl.load(bias_ptr + c, mask=c < columns, other=0.0), math)
    _put(y, y_ptr, row, column, r, c, rows, columns, narrowed(value, y_ptr.dtype.element_ty), described)


@triton.jit
def _product(
    x_ptr, w_ptr, y_ptr, x_scale_ptr, w_scale_ptr, zero_ptr, sums_ptr, bias_ptr,
    rows, columns, inner,
    scale_by_row: tl.constexpr, zero_by_row: tl.constexpr, scale_by_column: tl.constexpr, double: tl.constexpr,
    described: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr, block_inner: tl.constexpr,
    together: tl.constexpr, programs: tl.constexpr, fixed_turns: tl.constexpr, fixed_steps: tl.constexpr,
):  # fmt: skip
    """y = float(sum_k x * w - z * sum_k w) * (s_x * s_w) + b; a program takes every ``programs``-th tile"""
    x = tl.make_tensor_descriptor(x_ptr, [rows, inner], [inner, 1], [block_rows, block_inner])
    w = tl.make_tensor_descriptor(w_ptr, [columns, inner], [inner, 1], [block_columns, block_inner])
    y = _result(y_ptr, rows, columns, described, block_rows, block_columns)
    tiles = tl.cdiv(rows, block_rows) * tl.cdiv(columns, block_columns)
    if INTERPRETED:  # which knows no bounds of a loop that are not constant
        for turn in range(fixed_turns):
            if tl.program_id(0) + turn * programs < tiles:
                _tile(
                    tl.program_id(0) + turn * programs, x, w, y, y_ptr, x_scale_ptr, w_scale_ptr, zero_ptr, sums_ptr,
                    bias_ptr, rows, columns, fixed_steps, scale_by_row, zero_by_row, scale_by_column, double, described,
                    block_rows, block_columns, block_inner, together,
                )  # fmt: skip
    else:
        for tile in tl.range(tl.program_id(0), tiles, programs, flatten=True):
            _tile(
                tile, x, w, y, y_ptr, x_scale_ptr, w_scale_ptr, zero_ptr, sums_ptr,
                bias_ptr, rows, columns, tl.cdiv(inner, block_inner), scale_by_row, zero_by_row, scale_by_column,
                double, described, block_rows, block_columns, block_inner, together,
            )  # fmt: skip


@triton.jit
def _grouped_tile(
    tile, x, w, y, y_ptr, x_scale_ptr, w_scale_ptr, zero_ptr, sums_ptr, bias_ptr, rows, columns, steps, groups,
    group: tl.constexpr, scale_by_row: tl.constexpr, zero_by_row: tl.constexpr, described: tl.constexpr,
    block_rows: tl.constexpr, block_columns: tl.constexpr, block_inner: tl.constexpr, together: tl.constexpr,
):  # fmt: skip
    row, column = corner(tile, rows, columns, block_rows, block_columns, together)
    r, c = row + tl.arange(0, block_rows)[:, None], column + tl.arange(0, block_columns)[None, :]
    total = tl.zeros((block_rows, block_columns), tl.float32)
    sums = tl.zeros((block_rows, block_columns), tl.int32)
    for step in range(steps):
        a, b = x.load([row, step * block_inner]), w.load([column, step * block_inner])
        sums = tl.dot(a, b.T, sums, out_dtype=tl.int32)
        if (step + 1) * block_inner % group == 0:
            place = c * groups + step * block_inner // group
            if zero_ptr is not None:
                zero = tl.load(zero_ptr + r, mask=r < rows, other=0) if zero_by_row else tl.load(zero_ptr)
                sums -= zero * tl.load(sums_ptr + place, mask=c < columns, other=0)
            total += sums.to(tl.float32) * tl.load(w_scale_ptr + place, mask=c < columns, other=0.0)
            sums = tl.zeros((block_rows, block_columns), tl.int32)
    total *= tl.load(x_scale_ptr + r, mask=r < rows, other=0.0) if scale_by_row else tl.load(x_scale_ptr)
    if bias_ptr is not None:
        total += widened(tl.load(bias_ptr + c, mask=c < columns, other=0.0), tl.float32)
    _put(y, y_ptr, row, column, r, c, rows, columns, narrowed(total, y_ptr.dtype.element_ty), described)


@triton.jit
def _grouped_product(
    x_ptr, w_ptr, y_ptr, x_scale_ptr, w_scale_ptr, zero_ptr, sums_ptr, bias_ptr, rows, columns, inner,
    group: tl.constexpr, scale_by_row: tl.constexpr, zero_by_row: tl.constexpr, described: tl.constexpr,
    block_rows: tl.constexpr, block_columns: tl.constexpr, block_inner: tl.constexpr, together: tl.constexpr,
    programs: tl.constexpr, fixed_turns: tl.constexpr, fixed_steps: tl.constexpr,
):  # fmt: skip
    """y = (sum_g float(sum_k x * w - z * sum_k w) * s_w[g]) * s_x + b, k in group g; a program takes every
    ``programs``-th tile
    """
    x = tl.make_tensor_descriptor(x_ptr, [rows, inner], [inner, 1], [block_rows, block_inner])
    w = tl.make_tensor_descriptor(w_ptr, [columns, inner], [inner, 1], [block_columns, block_inner])
    y = _result(y_ptr, rows, columns, described, block_rows, block_columns)
    tiles = tl.cdiv(rows, block_rows) * tl.cdiv(columns, block_columns)
    if INTERPRETED:  # see _product
        for turn in range(fixed_turns):
            if tl.program_id(0) + turn * programs < tiles:
                _grouped_tile(
                    tl.program_id(0) + turn * programs, x, w, y, y_ptr, x_scale_ptr, w_scale_ptr, zero_ptr, sums_ptr,
                    bias_ptr, rows, columns, fixed_steps, inner // group, group, scale_by_row, zero_by_row, described,
                    block_rows, block_columns, block_inner, together,
                )  # fmt: skip
    else:
        for tile in tl.range(tl.program_id(0), tiles, programs, flatten=True):
            _grouped_tile(
                tile, x, w, y, y_ptr, x_scale_ptr, w_scale_ptr, zero_ptr, sums_ptr, bias_ptr, rows, columns,
                inner // block_inner, inner // group, group, scale_by_row, zero_by_row, described,
                block_rows, block_columns, block_inner, together,
            )  # fmt: skip


@triton.jit
def _selected_tile(
    tile, a, b, y, y_ptr, bits_ptr, rows, columns, steps, even: tl.constexpr,
    block_rows: tl.constexpr, block_columns: tl.constexpr, block_inner: tl.constexpr, together: tl.constexpr,
):  # fmt: skip
    row, column = corner(tile, rows, columns, block_rows, block_columns, together)
    total = tl.zeros((block_rows, block_columns), tl.float32)
    for step in range(steps):
        left, right = a.load([row, step * block_inner]), b.load([step * block_inner, column])
        if INTERPRETED:  # which has no product of bfloat16
            left, right = widened(left, tl.float32), widened(right, tl.float32)
        total = tl.dot(left, right, total)
    value = narrowed(total, y_ptr.dtype.element_ty)
    down, octet = row + tl.arange(0, block_rows)[:, None], column // 8 + tl.arange(0, block_columns // 8)[None, :]
    inside = (down < rows) & (octet < columns // 8)
    bits = tl.load(bits_ptr + down.to(tl.int64) * (columns // 8) + octet, mask=None if even else inside)
    passed = (bits[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
    passed = tl.reshape(passed, (block_rows, block_columns)) != 0
    y.store([row, column], tl.where(passed, value, tl.zeros_like(value)))


@triton.jit
def _selected_product(
    a_ptr, b_ptr, y_ptr, bits_ptr, rows, columns, inner, even: tl.constexpr,
    block_rows: tl.constexpr, block_columns: tl.constexpr, block_inner: tl.constexpr, together: tl.constexpr,
    programs: tl.constexpr, fixed_turns: tl.constexpr, fixed_steps: tl.constexpr,
):  # fmt: skip
    """y = sum_k a[m, k] * b[k, n] where its bit is set, else 0; a program takes every ``programs``-th tile"""
    a = tl.make_tensor_descriptor(a_ptr, [rows, inner], [inner, 1], [block_rows, block_inner])
    b = tl.make_tensor_descriptor(b_ptr, [inner, columns], [columns, 1], [block_inner, block_columns])
    y = tl.make_tensor_descriptor(y_ptr, [rows, columns], [columns, 1], [block_rows, block_columns])
    tiles = tl.cdiv(rows, block_rows) * tl.cdiv(columns, block_columns)
    if INTERPRETED:  # see _product
        for turn in range(fixed_turns):
            if tl.program_id(0) + turn * programs < tiles:
                _selected_tile(
                    tl.program_id(0) + turn * programs, a, b, y, y_ptr, bits_ptr, rows, columns, fixed_steps, even,
                    block_rows, block_columns, block_inner, together,
                )  # fmt: skip
    else:
        for tile in tl.range(tl.program_id(0), tiles, programs, flatten=True):
            _selected_tile(
                tile, a, b, y, y_ptr, bits_ptr, rows, columns, tl.cdiv(inner, block_inner), even,
                block_rows, block_columns, block_inner, together,
            )  # fmt: skip


@triton.jit
def _sum_rows(sums_ptr, q_ptr, columns, steps: tl.constexpr, block: tl.constexpr):
    """sum_k q[n, k]; a program takes a row"""
    row, across = tl.program_id(0), tl.arange(0, block)
    q_ptr += row.to(tl.int64) * columns
    total = tl.zeros((block,), tl.int32)
    for step in range(steps):
        column = step * block + across
        total += tl.load(q_ptr + column, mask=column < columns, other=0).to(tl.int32)
    tl.store(sums_ptr + row, tl.sum(total, 0))


def row_sums(q: Tensor) -> Tensor:
    """sum_k q[n, k] in int32"""
    q = q.contiguous()
    sums = torch.empty(len(q), dtype=torch.int32, device=q.device)
    _sums_launch(*q.shape, q.device)(sums, q)
    return sums


@lru_cache(maxsize=4096)
def _sums_launch(rows: int, columns: int, device: torch.device) -> Launch:
    block = min(2048, triton.next_power_of_2(columns))
    return Launch(_sum_rows, rows, (columns, triton.cdiv(columns, block), block), max(1, block // 512), device)


def refusal(q_x: Tensor, q_w: Tensor, w_scale: Tensor) -> str:
    """Why there is no such product of these codes; "" where there is."""
    if w_scale.dim() == 2 and (w_scale.dtype == torch.float64 or not has_groups(_group(q_w, w_scale))):
        return "the sums of groups are scaled in float32, after whole tiles"
    if not (q_x.is_cuda or knobs.runtime.interpret):
        return f"Triton kernels run on CUDA, not on {q_x.device}"
    if 0 in (*q_x.shape, q_w.shape[0]):
        return "an empty product needs no kernel"
    return row_refusal(q_x.shape[1]) or (device_refusal(q_x.device.index) if q_x.is_cuda else "")


def _group(q_w: Tensor, w_scale: Tensor) -> int:
    return q_w.shape[1] // w_scale.shape[1]


def row_refusal(inner: int) -> str:
    """Why there is no product of rows this long; "" where there is."""
    return f"rows of {inner} codes do not start at multiples of {_ALIGNED} bytes" if inner % _ALIGNED else ""


@cache
def device_refusal(index: int | None) -> str:
    """Why there is no product on this GPU; "" where there is."""
    if torch.version.hip is not None or torch.cuda.get_device_capability(index) < (9, 0):
        return "the device has no tensor descriptors, which came with compute capability 9.0"
    properties: Any = torch.cuda.get_device_properties(index)
    if properties.shared_memory_per_block_optin < _SHARED:
        return f"a program has less than the {_SHARED} bytes of shared memory that the tiles are made for"
    return ""


def scaled_product(
    q_x: Tensor,
    q_w: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    zero_point: Tensor | None,
    w_sums: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """y = float(sum_k (q_x - z) * q_w) * (s_x * s_w) + b; scales in the arithmetic's dtype

    With a scale for each group of w's rows, y = (sum_g float(sum_k (q_x - z) * q_w) * s_w[g]) * s_x + b, in float32.
    """
    (rows, inner), columns = q_x.shape, q_w.shape[0]
    y = torch.empty((rows, columns), dtype=dtype, device=q_x.device)
    zero_point = None if zero_point is None else zero_point.to(torch.int32).contiguous()
    sizes, by_row = (rows, columns, inner), (x_scale.dim() > 0, zero_point is not None and zero_point.dim() > 0)
    if w_scale.dim() == 2:
        launch = grouped_launch(*sizes, _group(q_w, w_scale), *by_row, dtype, q_x.device)
    else:
        launch = product_launch(*sizes, *by_row, w_scale.dim() > 0, x_scale.dtype, dtype, q_x.device)
    tensors = q_x.contiguous(), q_w.contiguous(), y, x_scale.contiguous(), w_scale.contiguous()
    run_product(launch, *tensors, zero_point, w_sums, bias)
    return y


def run_product(launch: Launch, *tensors: Tensor | None) -> None:
    """A launch of the product, with all the tensors that it takes"""
    triton.set_allocator(allocate)
    launch(*tensors)


@lru_cache(maxsize=4096)
def product_launch(
    rows: int,
    columns: int,
    inner: int,
    scale_by_row: bool,
    zero_by_row: bool,
    scale_by_column: bool,
    math: torch.dtype,
    dtype: torch.dtype,
    device: torch.device,
) -> Launch:
    """The product's launch; zero points and scales are one number, or one for each row or column."""
    described = _has_descriptor(columns, dtype)
    flags = scale_by_row, zero_by_row, scale_by_column, math == torch.float64, described
    return _persistent_launch(_product, rows, columns, inner, flags, TILES[dtype.itemsize], device)


def selects(a: Tensor, b: Tensor) -> bool:
    """Whether there is a ``selected_product`` of these"""
    addresses = a.data_ptr() | b.data_ptr()
    aligned = a.shape[1] % 8 == b.shape[1] % 8 == addresses % _ALIGNED == 0
    on_device = not device_refusal(a.device.index) if a.is_cuda else bool(knobs.runtime.interpret)
    return aligned and on_device and a.dtype == b.dtype and a.dtype in (torch.bfloat16, torch.float16)


def selected_product(a: Tensor, b: Tensor, bits: Tensor) -> Tensor:
    """a @ b where its bit is set, else 0; both contiguous"""
    (rows, inner), columns = a.shape, b.shape[1]
    y = torch.empty((rows, columns), dtype=a.dtype, device=a.device)
    run_product(_selected_launch(rows, columns, inner, a.device), a, b, y, bits.contiguous())
    return y


@lru_cache(maxsize=4096)
def _selected_launch(rows: int, columns: int, inner: int, device: torch.device) -> Launch:
    even = rows % SELECTED_TILE[0] == columns % SELECTED_TILE[1] == 0 and not knobs.runtime.interpret
    return _persistent_launch(_selected_product, rows, columns, inner, (even,), SELECTED_TILE, device)


def has_groups(group: int) -> bool:
    """Whether there is a product of codes with a scale for each group of w's rows, for groups this long"""
    return group % GROUPED_TILE[2] == 0


@lru_cache(maxsize=4096)
def grouped_launch(
    rows: int,
    columns: int,
    inner: int,
    group: int,
    scale_by_row: bool,
    zero_by_row: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> Launch:
    """The launch of that product; x has one zero point and scale, or one for each row."""
    options = {"warps": GROUPED_WARPS, "stages": GROUPED_STAGES, "each": GROUPED_PROGRAMS}
    flags = group, scale_by_row, zero_by_row, _has_descriptor(columns, dtype)
    return _persistent_launch(_grouped_product, rows, columns, inner, flags, GROUPED_TILE, device, **options)


def _has_descriptor(columns: int, dtype: torch.dtype) -> bool:
    return columns * dtype.itemsize % _ALIGNED == 0


def _persistent_launch(
    function: Any,
    rows: int,
    columns: int,
    inner: int,
    numbers: tuple[Any, ...],
    blocks: tuple[int, int, int],
    device: torch.device,
    *,
    warps: int = WARPS,
    stages: int = STAGES,
    each: int = 1,
) -> Launch:
    """A kernel of ``each`` programs on each multiprocessor"""
    count = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    programs, fixed = count * each, (0, 0)
    if knobs.runtime.interpret:
        blocks = 16, 32, 16
        tiles = triton.cdiv(rows, blocks[0]) * triton.cdiv(columns, blocks[1])
        fixed = triton.cdiv(tiles, programs), triton.cdiv(inner, blocks[2])
    arguments = rows, columns, inner, *numbers, *blocks, TOGETHER, programs, *fixed
    return Launch(function, programs, arguments, warps, device, num_stages=stages)


def allocate(size: int, alignment: int, stream: Any) -> Tensor:
    """Where a kernel keeps its descriptors."""
    return _empty_on_current()((size,), torch.int8)


@cache
def _empty_on_current() -> Callable[[tuple[int, ...], torch.dtype], Tensor]:
    return empty_on(torch.device("cuda"))
