"""A step of a linear layer on a GPU: both operands to codes in one launch, and back to values in one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from lowbit.grid import Grid
from lowbit.kernels.tiling import block_of
from lowbit.kernels.triton_formulas import by_own_params, narrowed, row_params, widened
from lowbit.kernels.triton_launch import ONE_READ, Launch
from lowbit.kernels.triton_products import device_refusal, product_launch, row_refusal, run_product

# What is worth tuning.
CODE_TILE = 1024  # elements that a program codes, but at least a row
TILE, WARPS = 4096, 4  # elements that a program decodes, or adds to its sums at a time
WIDTH = 64  # columns of such a tile, where they are summed
PROGRAMS = 528  # that sum columns: enough to fill the device
STAGES = 3  # tiles that are on their way while one is added


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
    s, _, most, plainly = row_params(x, inside, "symmetric", even, block_rows, quant_min, quant_max, False)
    q = by_own_params(x, s, tl.zeros_like(s), plainly, True, False, quant_min, quant_max, False, fused)
    tl.store(s_ptr + first + down, tl.where(most == most, s, float("nan")), known)  # codes know no NaN
    tl.store(q_ptr + base + offsets, q, None if even else inside)


@triton.jit
def _code_operands(
    q_ptr, s_ptr, x_ptr, w_ptr, rows, outputs, columns, x_programs, x_min, x_max, w_min, w_max,
    even: tl.constexpr, fused: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    """The codes of the rows of x and then of w, if there is one, each by its own range"""
    program = tl.program_id(0)
    if program < x_programs:
        _code_tile(
            x_ptr, q_ptr, s_ptr, program, rows, columns, even, x_min, x_max, fused, block_rows, block_columns
        )  # fmt: skip
    elif w_ptr is not None:
        q_ptr += tl.cast(rows, tl.int64) * columns
        _code_tile(
            w_ptr, q_ptr, s_ptr + rows, program - x_programs, outputs, columns, even, w_min, w_max, fused,
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
    x_ptr, w_ptr, sums_ptr, q_ptr, s_ptr, w_q_ptr, w_s_ptr, g_ptr,
    rows, outputs, columns, tiles, x_programs, across, sum_programs,
    block_rows: tl.constexpr, block_columns: tl.constexpr,
    steps: tl.constexpr, sum_rows: tl.constexpr, sum_columns: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """The sums of g's columns, each over ``steps`` tiles of rows; x and w = q * s; as far as there are pointers

    Without pointers to the codes and scales of w, they come after those of x.
    """
    if w_ptr is not None and w_q_ptr is None:
        w_q_ptr, w_s_ptr = q_ptr + tl.cast(rows, tl.int64) * columns, s_ptr + rows
    program = tl.program_id(0)
    if program < sum_programs:
        if sums_ptr is not None:
            start = program % across * sum_columns
            _sum_tiles(sums_ptr, g_ptr, program // across, start, rows, outputs, steps, sum_rows, sum_columns, stages)
    elif program < sum_programs + x_programs:
        if x_ptr is not None:
            tile = program - sum_programs
            _decode_tile(x_ptr, q_ptr, s_ptr, tile, tiles, rows, columns, block_rows, block_columns)
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

    Codes and scales are those of the rows of x, and then of w: q [rows + outputs, inner], scale [rows + outputs];
    unless w was coded before.
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
        self._coded_rows = rows + (0 if w_grid is None else outputs)
        block_columns = triton.next_power_of_2(inner)
        block_rows = max(1, CODE_TILE // block_columns)
        programs = [triton.cdiv(size, block_rows) for size in (rows, self._coded_rows - rows)]
        even = block_columns == inner and rows % block_rows == outputs % block_rows == 0
        ends = (float(end) for grid in (x_grid, w_grid or x_grid) for end in (grid.quant_min, grid.quant_max))
        numbers = rows, outputs, inner, programs[0], *ends, even, not knobs.runtime.interpret
        warps = max(1, block_rows * block_columns // 1024)
        self._code = Launch(_code_operands, sum(programs), (*numbers, block_rows, block_columns), warps, device)
        self._product = product_launch(rows, outputs, inner, True, False, True, torch.float32, dtype, device)
        self._decode: dict[tuple[bool, bool, bool], Launch] = {}
        self._sums = ColumnSums(rows, outputs, device)

    def forward(
        self, x: Tensor, w: Tensor | None, bias: Tensor | None, w_codes: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """y = float(sum_k q_x * q_w) * (s_x * s_w) + b; the codes, and their scales"""
        q = torch.empty((self._coded_rows, self.inner), dtype=torch.int8, device=self.device)
        scale = torch.empty(self._coded_rows, dtype=torch.float32, device=self.device)
        w_q, w_scale = w_codes or (None, None)
        self._code(q, scale, x, w if w_codes is None else None)
        y = torch.empty((self.rows, self.outputs), dtype=self.dtype, device=self.device)
        run_product(self._product, q, w_q, y, scale, w_scale, None, None, bias)
        return y, q, scale

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
        self._decode[key](x, w, sums, *(codes if len(codes) == 4 else (*codes, None, None)), g)
        return x, w, None if bias is None or sums is None else self._sums.add(sums, bias)

    def _decode_launch(self, of_x: bool, of_w: bool, of_g: bool) -> Launch:
        block_columns = block_of(self.inner, 1024)
        block_rows, tiles = TILE // block_columns, triton.cdiv(self.inner, block_columns)
        sizes = self.rows * of_x, self.outputs * of_w
        x_programs, w_programs = (triton.cdiv(size, block_rows) * tiles for size in sizes)
        blocks = block_rows, block_columns
        return self._sums.launch(of_g, (self.inner, tiles, x_programs), blocks, x_programs + w_programs)


class ColumnSums:
    """Sums of the columns of a matrix in float32: those of chunks of its rows, and then of these, in their order"""

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        self.rows, self.columns, self.device = rows, columns, device
        self._block = TILE // WIDTH, min(WIDTH, triton.next_power_of_2(columns))
        self._across, tiles = triton.cdiv(columns, self._block[1]), triton.cdiv(rows, self._block[0])
        # A power of two, so that the batches of a training have few kernels.
        self._steps = triton.next_power_of_2(triton.cdiv(tiles, max(1, PROGRAMS // self._across)))
        self._chunks = triton.cdiv(tiles, self._steps)
        width = min(32, self._block[1])
        numbers = self._chunks, columns, triton.next_power_of_2(self._chunks), width
        self._add = Launch(_add_sums, triton.cdiv(columns, width), numbers, WARPS, device)
        self._alone = self.launch(True, (1, 1, 0), (1, 1), 0)

    def launch(self, sums: bool, numbers: tuple[int, int, int], blocks: tuple[int, int], programs: int) -> Launch:
        """Of _decode_operands, with these sums or without"""
        sum_programs = self._chunks * self._across * sums
        sizes = self.rows, self.columns, *numbers, self._across, sum_programs
        constants = *blocks, self._steps, *self._block, STAGES
        return Launch(_decode_operands, sum_programs + programs, (*sizes, *constants), WARPS, self.device)

    def run(self, g: Tensor, dtype: torch.dtype) -> Tensor:
        """sum_m g[m, n]"""
        self._alone(None, None, sums := self.empty(), *[None] * 4, g)
        return self.add(sums, dtype)

    def empty(self) -> Tensor:
        """For the sums of chunks."""
        return torch.empty((self._chunks, self.columns), dtype=torch.float32, device=self.device)

    def add(self, sums: Tensor, dtype: torch.dtype) -> Tensor:
        """Of all chunks"""
        total = torch.empty(self.columns, dtype=dtype, device=self.device)
        self._add(total, sums)
        return total


@cache
def refusal(inner: int, device: torch.device) -> str:
    """Why there is no such step of rows this long; "" where there is."""
    if inner > ONE_READ:
        return f"a program holds rows of {ONE_READ}, not of {inner}"
    return row_refusal(inner) or (device_refusal(device.index) if device.type == "cuda" else "")


linear_step = lru_cache(maxsize=4096)(LinearStep)
column_sums = lru_cache(maxsize=4096)(ColumnSums)
