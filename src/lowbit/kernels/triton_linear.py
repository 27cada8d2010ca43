"""A step of a linear layer on a GPU: both operands to codes in one launch, and back to values in one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property, lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional
from triton import knobs

from lowbit.grid import Grid
from lowbit.kernels.linear_codes import LEAST_GROUP, LinearCodes
from lowbit.kernels.tiling import block_of
from lowbit.kernels.triton_formulas import narrowed, widened
from lowbit.kernels.triton_launch import ONE_READ, ROW_BLOCK, Launch, empty_on
from lowbit.kernels.triton_products import (
    device_refusal,
    grouped_launch,
    has_groups,
    product_launch,
    row_refusal,
    row_sums,
    run_product,
)
from lowbit.kernels.triton_rows import code_row, code_tile, decode_tile
from lowbit.ste import SteKind

# What is worth tuning.
CODE_TILE = 1024  # elements that a program codes, but at least a row
KEPT_OCTETS = 128  # of a row that a warp codes by a scale that is kept
TILE, WARPS = 4096, 4  # elements that a program decodes, or adds to its sums at a time
WIDTH = 64  # columns of such a tile, where they are summed
PROGRAMS = 528  # that sum columns: enough to fill the device
STAGES = 3  # tiles that are on their way while one is added

WIDEST = 2**24  # columns of a matrix: the places of a tile's rows then fit 32 bits


@triton.jit
def _code_operands(
    x_q_ptr, x_s_ptr, x_v_ptr, w_q_ptr, w_s_ptr, w_v_ptr, x_ptr, w_ptr, x_programs,
    x_rows, x_columns, x_min, x_max,
    x_even: tl.constexpr, x_block_rows: tl.constexpr, x_block_columns: tl.constexpr,
    w_rows, w_columns, w_min, w_max,
    w_even: tl.constexpr, w_block_rows: tl.constexpr, w_block_columns: tl.constexpr,
    fused: tl.constexpr,
):  # fmt: skip
    """The codes of the rows of x, and of w if there is one, each by its own range; and values, as far as asked for"""
    program = tl.program_id(0)
    if program < x_programs:
        code_tile(
            x_q_ptr, x_s_ptr, None, x_v_ptr, x_ptr, program, x_rows, x_columns, x_min, x_max,
            x_even, x_block_rows, x_block_columns, fused,
        )  # fmt: skip
    elif w_ptr is not None:
        code_tile(
            w_q_ptr, w_s_ptr, None, w_v_ptr, w_ptr, program - x_programs, w_rows, w_columns, w_min, w_max,
            w_even, w_block_rows, w_block_columns, fused,
        )  # fmt: skip


@triton.jit
def _code_by_kept(
    x_q_ptr, x_s_ptr, bits_ptr, zero_ptr, w_q_ptr, w_s_ptr, w_sums_ptr, x_ptr, w_ptr, s_ptr, z_ptr,
    rows, octets, x_min, x_max, shift, block: tl.constexpr, steps: tl.constexpr, rule: tl.constexpr,
    w_rows, w_columns, w_min, w_max,
    w_even: tl.constexpr, w_block_rows: tl.constexpr, w_block_columns: tl.constexpr,
    fused: tl.constexpr,
):  # fmt: skip
    """The same of an x with a scale and zero point that are kept; its codes, and their zero point, are less by shift"""
    program = tl.program_id(0)
    if program < rows:
        code_row(
            x_q_ptr, bits_ptr, x_s_ptr, zero_ptr, x_ptr, s_ptr, z_ptr, program, 0, shift,
            octets, block, steps, rule, x_min, x_max, False, fused,
        )  # fmt: skip
    elif w_ptr is not None:
        code_tile(
            w_q_ptr, w_s_ptr, w_sums_ptr, None, w_ptr, program - rows, w_rows, w_columns, w_min, w_max,
            w_even, w_block_rows, w_block_columns, fused,
        )  # fmt: skip


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
    x_ptr, w_ptr, sums_ptr, x_q_ptr, x_s_ptr, x_z_ptr, w_q_ptr, w_s_ptr, g_ptr,
    x_programs, x_rows, x_columns, x_tiles, w_rows, w_columns, w_tiles, rows, outputs, across, sum_programs,
    x_block_rows: tl.constexpr, x_block_columns: tl.constexpr,
    w_block_rows: tl.constexpr, w_block_columns: tl.constexpr,
    steps: tl.constexpr, sum_rows: tl.constexpr, sum_columns: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """The sums of g's columns, each over ``steps`` tiles of rows; x = (q - z) * s and w = q * s; as far as there are
    pointers
    """
    program = tl.program_id(0)
    if program < sum_programs:
        if sums_ptr is not None:
            start = program % across * sum_columns
            _sum_tiles(sums_ptr, g_ptr, program // across, start, rows, outputs, steps, sum_rows, sum_columns, stages)
    elif program < sum_programs + x_programs:
        if x_ptr is not None:
            tile = program - sum_programs
            decode_tile(
                x_ptr, x_q_ptr, x_s_ptr, x_z_ptr, tile, x_rows, x_columns, x_tiles, x_block_rows, x_block_columns
            )  # fmt: skip
    else:
        if w_ptr is not None:
            tile = program - sum_programs - x_programs
            decode_tile(
                w_ptr, w_q_ptr, w_s_ptr, None, tile, w_rows, w_columns, w_tiles, w_block_rows, w_block_columns
            )  # fmt: skip


@triton.jit
def _add_sums(total_ptr, sums_ptr, chunks, outputs, block: tl.constexpr, width: tl.constexpr):
    """The sums of all chunks of rows, in their order"""
    chunk, column = tl.arange(0, block)[:, None], tl.program_id(0) * width + tl.arange(0, width)[None, :]
    known = column < outputs
    sums = tl.load(sums_ptr + chunk * outputs + column, mask=known & (chunk < chunks), other=0.0)
    total = narrowed(tl.sum(sums, 0, keep_dims=True), total_ptr.dtype.element_ty)
    tl.store(total_ptr + column, total, mask=known)


class _ScaledRows(NamedTuple):
    """A matrix as rows that have a scale each: its own, or groups of these"""

    rows: int
    columns: int

    def code_numbers(self, grid: Grid, tile: int) -> tuple[int, tuple[float | int, ...]]:
        """Programs that take whole rows, of about so many elements; and what code_tile takes"""
        block_columns = triton.next_power_of_2(self.columns)
        block_rows = max(1, tile // block_columns)
        even = block_columns == self.columns and self.rows % block_rows == 0
        numbers = self.rows, self.columns, float(grid.quant_min), float(grid.quant_max)
        return triton.cdiv(self.rows, block_rows), (*numbers, even, block_rows, block_columns)

    @property
    def blocks(self) -> tuple[int, int]:
        """Of a tile that is decoded"""
        block_columns = block_of(self.columns, 1024)
        return TILE // block_columns, block_columns

    @property
    def tiles(self) -> int:
        """Of a row, where it is decoded"""
        return triton.cdiv(self.columns, self.blocks[1])

    @property
    def decode_programs(self) -> int:
        """One for each tile"""
        return triton.cdiv(self.rows, self.blocks[0]) * self.tiles


class LinearStep:
    """The launches of a step, for x of rows x inner and w of outputs x inner, with results in ``dtype``

    w has symmetric scales for each row, or group of a row, of its own range; where it has no grid, it was coded before.
    So have the rows of x; or x has one scale, which is kept, and follows the rule ``ste``. Where a row of w has many
    short groups, whose sums take long to scale, values are multiplied, and not codes.
    """

    def __init__(
        self,
        rows: int,
        outputs: int,
        inner: int,
        group: int | None,
        x_grid: Grid,
        w_grid: Grid | None,
        ste: SteKind | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.rows, self.outputs, self.inner, self.dtype, self.device = rows, outputs, inner, dtype, device
        self.ste, self.x_grid, self._empty = ste, x_grid, empty_on(device)
        run = inner if group is None else group
        self._groups = None if group is None else inner // group
        self._x_rows, self._w_rows = _ScaledRows(rows, inner), _ScaledRows(outputs * (inner // run), run)
        fused = not knobs.runtime.interpret
        tile = max(CODE_TILE, triton.next_power_of_2(inner))
        w_programs, w_numbers = self._w_rows.code_numbers(w_grid or x_grid, CODE_TILE if run == inner else tile)
        w_programs *= w_grid is not None
        if ste is None:
            x_programs, x_numbers = self._x_rows.code_numbers(x_grid, CODE_TILE)
            numbers, warps = (x_programs, *x_numbers, *w_numbers, fused), max(1, tile // 1024)
            self._code = Launch(_code_operands, x_programs + w_programs, numbers, warps, device)
        else:
            octets = inner // 8
            block = min(ROW_BLOCK, triton.next_power_of_2(octets))
            ends = (float(end - self._shift) for end in (x_grid.quant_min, x_grid.quant_max))
            constants = block, triton.cdiv(octets, block), ste.value
            arguments = rows, octets, *ends, self._shift, *constants, *w_numbers, fused
            warps = max(1, block // KEPT_OCTETS, tile // 2048)
            self._code = Launch(_code_by_kept, rows + w_programs, arguments, warps, device)
        self._product = self._grouped = None
        if run == inner:
            flags = True, False, True, torch.float32, dtype
            self._product = product_launch(rows, outputs, inner, *flags, device)
        elif run >= LEAST_GROUP and has_groups(run):
            self._grouped = grouped_launch(rows, outputs, inner, run, True, False, dtype, device)
        self._sums = _column_sums(rows, outputs, device)
        self._decode: dict[tuple[bool, bool, bool], Launch] = {}

    @property
    def _shift(self) -> int:
        """From the codes of x's grid to those of int8"""
        return 0 if self.x_grid.fits_int8 else 128

    def forward(
        self,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        w_codes: Sequence[Tensor] | None = None,
        kept: tuple[Tensor, Tensor | None] | None = None,
        of_x: bool = True,
    ) -> tuple[Tensor, LinearCodes]:
        """y = float(sum_k (q_x - z) * q_w) * (s_x * s_w) + b, or that of groups or values; and the codes

        ``kept`` are the scale and zero point of x; ``of_x``: whether it takes a gradient.
        """
        if self._product is None and self._grouped is None:
            return self._forward_by_values(x, w, bias, w_codes)
        q_x, x_scale = self._empty_codes(self.rows)
        q_w, w_scale = self._empty_codes(self.outputs, self._groups) if w_codes is None else w_codes
        coded, w_given = ((q_w, w_scale), w) if w_codes is None else ((None, None), None)
        w_sums = zero_point = bits = None
        if kept is None:
            self._code(q_x, x_scale, None, *coded, None, x, w_given)
        else:
            scale, kept_point = kept
            if self._shift or kept_point is not None:
                zero_point = self._empty((), torch.int32)
                w_sums = self._empty((self.outputs,), torch.int32) if w_codes is None else row_sums(q_w)
            if of_x and self.ste is not SteKind.IDENTITY:
                bits = self._empty((self.rows * self.inner // 8,), torch.uint8)
            self._code(
                *(q_x, x_scale, bits, zero_point, *coded, w_sums if w_codes is None else None),
                *(x, w_given, scale, kept_point),
            )
        y = self._empty((*x.shape[:-1], self.outputs), self.dtype)
        if self._product is not None:
            run_product(self._product, q_x, q_w, y, x_scale, w_scale, zero_point, w_sums, bias)
        elif self._grouped is not None:
            run_product(self._grouped, q_x, q_w, y, x_scale, w_scale, None, None, bias)
        return y, LinearCodes(q_x, x_scale, q_w, w_scale, zero_point, bits)

    def _forward_by_values(
        self, x: Tensor, w: Tensor, bias: Tensor | None, w_codes: Sequence[Tensor] | None
    ) -> tuple[Tensor, LinearCodes]:
        x_codes = self._empty_codes(self.rows)
        x_values = self._empty(tuple(x.shape), self.dtype)
        w_values: Tensor | None = None
        if held := w_codes is not None:
            self._code(*x_codes, x_values, *[None] * 3, x, None)
        else:
            w_codes = self._empty_codes(self.outputs, self._groups)
            w_values = self._empty((self.outputs, self.inner), self.dtype)
            self._code(*x_codes, x_values, *w_codes, w_values, x, w)
        codes = LinearCodes(*x_codes, *w_codes)
        if held:
            _, w_values, _ = self.decode(None, codes, False, True, None)
        assert w_values is not None
        with torch.autocast(self.device.type, enabled=False):
            return functional.linear(x_values, w_values, None if bias is None else bias.to(self.dtype)), codes

    def decode(
        self, g: Tensor | None, codes: LinearCodes, of_x: bool, of_w: bool, bias: torch.dtype | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The values of x and of w, as far as they are asked for; and the sums of g's columns, in a bias's dtype"""
        x = self._empty((self.rows, self.inner), self.dtype) if of_x else None
        w = self._empty((self.outputs, self.inner), self.dtype) if of_w else None
        sums = None if bias is None else self._sums.empty()
        key = of_x, of_w, bias is not None
        if key not in self._decode:
            self._decode[key] = self._decode_launch(*key)
        q_x, x_scale, q_w, w_scale = (code.contiguous() for code in codes[:4])
        self._decode[key](x, w, sums, q_x, x_scale, codes.zero_point, q_w, w_scale, g)
        return x, w, None if bias is None or sums is None else self._sums.add(sums, bias)

    def _empty_codes(self, rows: int, groups: int | None = None) -> tuple[Tensor, Tensor]:
        scale = self._empty((rows,) if groups is None else (rows, groups), torch.float32)
        return self._empty((rows, self.inner), torch.int8), scale

    def _decode_launch(self, of_x: bool, of_w: bool, of_g: bool) -> Launch:
        x, w, sums = self._x_rows, self._w_rows, self._sums
        x_programs, w_programs, sum_programs = x.decode_programs * of_x, w.decode_programs * of_w, sums.programs * of_g
        numbers = x_programs, *x, x.tiles, *w, w.tiles, self.rows, self.outputs, sums.across, sum_programs
        constants = *x.blocks, *w.blocks, *sums.constants
        return Launch(
            _decode_operands, sum_programs + x_programs + w_programs, (*numbers, *constants), WARPS, self.device
        )


class _ColumnSums:
    """Sums of the columns of a matrix in float32: those of chunks of its rows, and then of these, in their order"""

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        self.rows, self.columns, self.device, self._empty = rows, columns, device, empty_on(device)
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
        numbers = *[0] * 7, self.rows, self.columns, self.across, self.programs
        return Launch(_decode_operands, self.programs, (*numbers, *[1] * 4, *self.constants), WARPS, self.device)

    def empty(self) -> Tensor:
        """For the sums of chunks."""
        return self._empty((self._chunks, self.columns), torch.float32)

    def add(self, sums: Tensor, dtype: torch.dtype) -> Tensor:
        """Of all chunks"""
        total = self._empty((self.columns,), dtype)
        self._add(total, sums)
        return total


def column_sums(g: Tensor, dtype: torch.dtype) -> Tensor:
    """sum_m g[m, n] in this dtype, added up in float32"""
    columns = _column_sums(*g.shape, g.device)
    columns.alone(None, None, sums := columns.empty(), *[None] * 5, g.contiguous())
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
