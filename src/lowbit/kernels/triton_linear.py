"""A step of a linear layer on a GPU: both operands to codes in one launch, and back to values in one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property, lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from lowbit.grid import Grid
from lowbit.kernels.tiling import block_of
from lowbit.kernels.triton_formulas import codes_of_rows, narrowed, widened
from lowbit.kernels.triton_launch import ONE_READ, Launch
from lowbit.kernels.triton_products import device_refusal, product_launch, row_refusal, run_product

# What is worth tuning.
CODE_TILE = 1024  # elements that a program codes, but at least a row
TILE, WARPS = 4096, 4  # elements that a program decodes, or adds to its sums at a time
WIDTH = 64  # columns of such a tile, where they are summed
PROGRAMS = 528  # that sum columns: enough to fill the device
STAGES = 3  # tiles that are on their way while one is added

WIDEST = 2**24  # columns of a matrix: the places of a tile's rows then fit 32 bits


@triton.jit
def _code_tile(
    x_ptr, q_ptr, s_ptr, tile, rows, columns, even: tl.constexpr, quant_min, quant_max, fused: tl.constexpr,
    block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    first = tile * block_rows
    down, across = tl.arange(0, block_rows)[:, None], tl.arange(0, block_columns)[None, :]
    known, inside = down < rows - first, (down < rows - first) & (across < columns)
    base, offsets = first.to(tl.int64) * columns, down * columns + across
    x = widened(tl.load(x_ptr + base + offsets, None if even else inside), tl.float32)
    x = x if even else tl.where(inside, x, 0.0)
    s, q = codes_of_rows(x, inside, even, block_rows, quant_min, quant_max, fused)
    tl.store(s_ptr + first + down, s, known)
    tl.store(q_ptr + base + offsets, q, None if even else inside)


@triton.jit
def _code_operands(
    x_q_ptr, x_s_ptr, w_q_ptr, w_s_ptr, x_ptr, w_ptr, rows, outputs, columns, x_programs, x_min, x_max, w_min, w_max,
    even: tl.constexpr, fused: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    """The codes of the rows of x, and of w if there is one, each by its own range"""
    program = tl.program_id(0)
    if program < x_programs:
        _code_tile(
            x_ptr, x_q_ptr, x_s_ptr, program, rows, columns, even, x_min, x_max, fused, block_rows, block_columns
        )  # fmt: skip
    elif w_ptr is not None:
        _code_tile(
            w_ptr, w_q_ptr, w_s_ptr, program - x_programs, outputs, columns, even, w_min, w_max, fused,
            block_rows, block_columns,
        )  # fmt: skip


@triton.jit
def _decode_tile(
    v_ptr, q_ptr, s_ptr, tile, tiles, rows, columns, block_rows: tl.constexpr, block_columns: tl.constexpr
):  # fmt: skip
    first, start = tile // tiles * block_rows, tile % tiles * block_columns
    down, across = tl.arange(0, block_rows)[:, None], tl.arange(0, block_columns)[None, :]
    known, inside = down < rows - first, (down < rows - first) & (across < columns - start)
    base, offsets = first.to(tl.int64) * columns + start, down * columns + across
    v = tl.load(q_ptr + base + offsets, inside).to(tl.float32) * tl.load(s_ptr + first + down, known)
    tl.store(v_ptr + base + offsets, narrowed(v, v_ptr.dtype.element_ty), inside)


@triton.jit
def _sum_tiles(
    sums_ptr, g_ptr, chunk, start, rows, columns,
    steps: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    down, across = tl.arange(0, block_rows)[:, None], tl.arange(0, block_columns)[None, :]
    known, offsets = across < columns - start, down * columns + across
    total = tl.zeros((block_rows, block_columns), tl.float32)
    for step in tl.range(0, steps, num_stages=stages):
        first = (chunk * steps + step) * block_rows
        g_tile = g_ptr + first.to(tl.int64) * columns + start
        total += widened(tl.load(g_tile + offsets, known & (down < rows - first), other=0.0), tl.float32)
    tl.store(sums_ptr + chunk * columns + start + across, tl.sum(total, 0, keep_dims=True), known)


@triton.jit
def _decode_operands(
    x_ptr, w_ptr, sums_ptr, x_q_ptr, x_s_ptr, w_q_ptr, w_s_ptr, g_ptr,
    rows, outputs, columns, tiles, x_programs, across, sum_programs,
    block_rows: tl.constexpr, block_columns: tl.constexpr,
    steps: tl.constexpr, sum_rows: tl.constexpr, sum_columns: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """The sums of g's columns, each over ``steps`` tiles of rows; x and w = q * s; as far as there are pointers"""
    program = tl.program_id(0)
    if program < sum_programs:
        if sums_ptr is not None:
            start = program % across * sum_columns
            _sum_tiles(sums_ptr, g_ptr, program // across, start, rows, outputs, steps, sum_rows, sum_columns, stages)
    elif program < sum_programs + x_programs:
        if x_ptr is not None:
            tile = program - sum_programs
            _decode_tile(x_ptr, x_q_ptr, x_s_ptr, tile, tiles, rows, columns, block_rows, block_columns)
    else:
        if w_ptr is not None:
            tile = program - sum_programs - x_programs
            _decode_tile(w_ptr, w_q_ptr, w_s_ptr, tile, tiles, outputs, columns, block_rows, block_columns)


@triton.jit
def _add_sums(total_ptr, sums_ptr, chunks, outputs, block: tl.constexpr, width: tl.constexpr):
    """The sums of all chunks of rows, in their order"""
    chunk, column = tl.arange(0, block)[:, None], tl.program_id(0) * width + tl.arange(0, width)[None, :]
    known = column < outputs
    sums = tl.load(sums_ptr + chunk * outputs + column, mask=known & (chunk < chunks), other=0.0)
    total = narrowed(tl.sum(sums, 0, keep_dims=True), total_ptr.dtype.element_ty)
    tl.store(total_ptr + column, total, mask=known)


class LinearStep:
    """The launches of a step, for x of rows x inner and w of outputs x inner, with results in ``dtype``

    Both have symmetric scales for each row, of the row's own range; where w has no grid, it was coded before.
    """

    def __init__(
        self,
        rows: int,
        outputs: int,
        inner: int,
        x_grid: Grid,
        w_grid: Grid | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.rows, self.outputs, self.inner, self.dtype, self.device = rows, outputs, inner, dtype, device
        block_columns = triton.next_power_of_2(inner)
        block_rows = max(1, CODE_TILE // block_columns)
        x_programs, w_programs = (triton.cdiv(size, block_rows) for size in (rows, 0 if w_grid is None else outputs))
        even = block_columns == inner and rows % block_rows == outputs % block_rows == 0
        ends = (float(end) for grid in (x_grid, w_grid or x_grid) for end in (grid.quant_min, grid.quant_max))
        numbers = rows, outputs, inner, x_programs, *ends, even, not knobs.runtime.interpret
        constants, warps = (block_rows, block_columns), max(1, block_rows * block_columns // 1024)
        self._code = Launch(_code_operands, x_programs + w_programs, (*numbers, *constants), warps, device)
        self._product = product_launch(rows, outputs, inner, True, False, True, torch.float32, dtype, device)
        self._sums = _column_sums(rows, outputs, device)
        self._decode: dict[tuple[bool, bool, bool], Launch] = {}

    def forward(self, x: Tensor, w: Tensor, bias: Tensor | None, w_codes: Sequence[Tensor] | None) -> Sequence[Tensor]:
        """y = float(sum_k q_x * q_w) * (s_x * s_w) + b; and q_x, s_x, q_w, s_w"""
        x_codes = self._empty_codes(self.rows)
        if w_codes is None:
            w_codes = self._empty_codes(self.outputs)
            self._code(*x_codes, *w_codes, x, w)
        else:
            self._code(*x_codes, None, None, x, None)
        (q_x, x_scale), (q_w, w_scale) = x_codes, w_codes
        y = torch.empty((self.rows, self.outputs), dtype=self.dtype, device=self.device)
        run_product(self._product, q_x, q_w, y, x_scale, w_scale, None, None, bias)
        return y, *x_codes, *w_codes

    def backward(
        self, g: Tensor, codes: Sequence[Tensor], of_x: bool, of_w: bool, bias: torch.dtype | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The values of x and of w, as far as they are asked for; and the sums of g's columns, in a bias's dtype"""
        x = torch.empty((self.rows, self.inner), dtype=self.dtype, device=self.device) if of_x else None
        w = torch.empty((self.outputs, self.inner), dtype=self.dtype, device=self.device) if of_w else None
        sums = None if bias is None else self._sums.empty()
        key = of_x, of_w, bias is not None
        if key not in self._decode:
            self._decode[key] = self._decode_launch(*key)
        self._decode[key](x, w, sums, *(code.contiguous() for code in codes), g)
        return x, w, None if bias is None or sums is None else self._sums.add(sums, bias)

    def _empty_codes(self, rows: int) -> tuple[Tensor, Tensor]:
        q = torch.empty((rows, self.inner), dtype=torch.int8, device=self.device)
        return q, torch.empty(rows, dtype=torch.float32, device=self.device)

    def _decode_launch(self, of_x: bool, of_w: bool, of_g: bool) -> Launch:
        block_columns = block_of(self.inner, 1024)
        block_rows, tiles = TILE // block_columns, triton.cdiv(self.inner, block_columns)
        sizes = self.rows * of_x, self.outputs * of_w
        x_programs, w_programs = (triton.cdiv(size, block_rows) * tiles for size in sizes)
        numbers = self.rows, self.outputs, self.inner, tiles, x_programs, self._sums.across, self._sums.programs * of_g
        constants = block_rows, block_columns, *self._sums.constants
        programs = self._sums.programs * of_g + x_programs + w_programs
        return Launch(_decode_operands, programs, (*numbers, *constants), WARPS, self.device)


class _ColumnSums:
    """Sums of the columns of a matrix in float32: those of chunks of its rows, and then of these, in their order"""

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        self.rows, self.columns, self.device = rows, columns, device
        block = TILE // WIDTH, min(WIDTH, triton.next_power_of_2(columns))
        self.across, tiles = triton.cdiv(columns, block[1]), triton.cdiv(rows, block[0])
        # A power of two, so that the batches of a training have few kernels.
        steps = triton.next_power_of_2(triton.cdiv(tiles, max(1, PROGRAMS // self.across)))
        self._chunks = triton.cdiv(tiles, steps)
        self.programs, self.constants = self._chunks * self.across, (steps, *block, STAGES)
        width = min(32, block[1])
        numbers = self._chunks, columns, triton.next_power_of_2(self._chunks), width
        self._add = Launch(_add_sums, triton.cdiv(columns, width), numbers, WARPS, device)

    @cached_property
    def alone(self) -> Launch:
        """The sums of chunks, and nothing else."""
        numbers = self.rows, self.columns, 1, 1, 0, self.across, self.programs
        return Launch(_decode_operands, self.programs, (*numbers, 1, 1, *self.constants), WARPS, self.device)

    def empty(self) -> Tensor:
        """For the sums of chunks."""
        return torch.empty((self._chunks, self.columns), dtype=torch.float32, device=self.device)

    def add(self, sums: Tensor, dtype: torch.dtype) -> Tensor:
        """Of all chunks"""
        total = torch.empty(self.columns, dtype=dtype, device=self.device)
        self._add(total, sums)
        return total


def column_sums(g: Tensor, dtype: torch.dtype) -> Tensor:
    """sum_m g[m, n] in this dtype, added up in float32"""
    columns = _column_sums(*g.shape, g.device)
    columns.alone(None, None, sums := columns.empty(), *[None] * 4, g.contiguous())
    return columns.add(sums, dtype)


@cache
def refusal(inner: int, outputs: int, device: torch.device) -> str:
    """Why there is no such step of rows this long; "" where there is."""
    if inner > ONE_READ:
        return f"a program holds rows of {ONE_READ}, not of {inner}"
    if outputs > WIDEST:
        return f"the places of a tile in rows of {outputs} do not fit 32 bits"
    return row_refusal(inner) or (device_refusal(device.index) if device.type == "cuda" else "")


linear_step = lru_cache(maxsize=4096)(LinearStep)
_column_sums = lru_cache(maxsize=4096)(_ColumnSums)
