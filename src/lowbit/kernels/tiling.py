"""Tiling: how the programs of a Triton kernel share out dense memory."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import triton

from lowbit.granularity import Layout
from lowbit.kernels.ops import OPS
from lowbit.kernels.signature import Signature

# What is worth tuning.
TILE_BYTES = 16384  # that a program reads at a time: 16-byte accesses, four to a thread
WARPS = 8
ROW_TILE_BYTES = 2048  # the same where rows are held whole; also what a warp of theirs holds
COLUMN_TILE_BYTES = 8192  # the same where scales differ by column: a thread holds the scales of its columns too
COLUMN_SUM_BYTES = 2048  # and where it also holds the sums of a learned scale's gradient
COLUMN_WARPS = 4
COLUMN_BLOCK = 256  # columns of such a tile
PROGRAMS = 2048  # of a reduction: enough to fill the device, few enough to make the second pass small
FEW_TILES = 512  # a tensor of fewer tiles takes smaller ones
_SHORT_RUN = 32  # runs shorter than this lie along the rows of a tile, and their scales differ by column


class Tiling(NamedTuple):
    """The dense memory as a matrix in row-major order whose scale group follows from the row, or from the column.

    - by row:     a row is one run of ``inner`` elements; group = (row // period) * channels + row % channels
    - by column:  ``rows`` rows make a period; group = (row // rows) * channels + (column // inner) % channels

    A program takes ``steps`` tiles of ``block_rows`` x ``block_columns``, one after the other: along its rows, or down
    its columns; ``chunks`` such strips make a whole row, or a whole period. What it reduces is one number for each
    row, or column, of its strip: all of them are [outer, repeats, channels, inner], reduced over repeats and inner.
    """

    by_row: bool
    rows: int
    columns: int
    period: int
    channels: int
    inner: int
    block_rows: int
    block_columns: int
    steps: int
    chunks: int
    programs: int
    even: bool
    partials: tuple[int, int, int, int]

    @property
    def groups(self) -> int:
        """How many scales there are."""
        outer, _, channels, _ = self.partials
        return outer * channels

    @property
    def complete(self) -> bool:
        """Whether each group lies in one program's strip: then nothing is left to a second pass."""
        _, repeats, _, inner = self.partials
        return repeats * inner == 1

    @property
    def warps(self) -> int:
        """Of a program."""
        tile = self.block_rows * self.block_columns
        return max(1, min(max(WARPS if self.by_row else COLUMN_WARPS, tile // 1024), tile // 256))

    def arguments(self) -> tuple[Any, ...]:
        """What the kernels take of it: numbers, then constants."""
        unit = _factor_of_two(self.columns)
        tiles = -(-self.columns // self.block_columns)
        numbers = (self.rows, self.columns // unit, self.chunks, tiles, self.period, self.channels, self.inner)
        plain = self.period == self.channels
        ordered = self.by_row and not plain and self.channels % self.block_rows == 0
        wide = self.programs * self.steps * self.block_rows * self.block_columns >= 1 << 31
        constants = (self.by_row, self.by_row and self.rows == 1, plain, ordered, wide, unit)
        return *numbers, *constants, self.block_rows, self.block_columns, self.steps, self.even


def plan_tiles(signature: Signature, *, reduces: bool = False, whole_rows: bool = False) -> Tiling:
    """The tiling of the signature's memory; ``whole_rows``: each row of the matrix in one tile."""
    elements, layout = math.prod(signature.shape), signature.memory.layout
    by_row = layout.period == layout.channels * layout.inner or layout.channels == 1 or layout.inner >= _SHORT_RUN
    sums = reduces and OPS[signature.op].sums
    by_column = COLUMN_SUM_BYTES if sums else COLUMN_TILE_BYTES
    size = ROW_TILE_BYTES if whole_rows else TILE_BYTES if by_row else by_column
    tile = min(size // bytes_read(signature), 8192)
    while tile > 1024 and elements < tile * FEW_TILES:
        tile //= 2
    if by_row:
        return _by_row(layout, elements, tile, reduces=reduces, whole_rows=whole_rows)
    return _by_column(layout, elements, tile, reduces=reduces)


def bytes_read(signature: Signature) -> int:
    """For each element, of the tensors that are as large as the result."""
    return signature.dtype.itemsize * sum(name in ("grad_output", "x", "q") for name in OPS[signature.op].tensors)


def _by_row(layout: Layout, elements: int, tile: int, *, reduces: bool, whole_rows: bool) -> Tiling:
    # One channel: the group does not depend on inner (see Layout), and the longest run is the period.
    columns = layout.period if layout.channels == 1 else layout.inner
    rows, period = elements // columns, layout.period // columns
    block_columns = triton.next_power_of_2(columns) if whole_rows else block_of(columns, tile)
    block_rows = min(max(tile // block_columns, 1), triton.next_power_of_2(rows))
    tiles = -(-columns // block_columns)
    steps = _steps(tiles * -(-rows // block_rows), tiles) if reduces else 1
    chunks = -(-tiles // steps)
    if reduces and chunks > 1 and columns <= tile:  # better some padding than a second pass
        return _by_row(layout, elements, tile, reduces=True, whole_rows=True)
    return Tiling(
        by_row=True,
        rows=rows,
        columns=columns,
        period=period,
        channels=layout.channels,
        inner=1,
        block_rows=block_rows,
        block_columns=block_columns,
        steps=steps,
        chunks=chunks,
        programs=-(-rows // block_rows) * chunks,
        even=rows % block_rows == 0 and columns % (block_columns * steps) == 0,
        partials=(rows // period, period // layout.channels, layout.channels, chunks),
    )


def _by_column(layout: Layout, elements: int, tile: int, *, reduces: bool) -> Tiling:
    width = layout.channels * layout.inner
    rows, repeats = layout.period // width, 1
    # Rows too short for a tile, or for 16-byte accesses, are taken several at a time as one longer row.
    while rows % 2 == 0 and (width * repeats < COLUMN_BLOCK or (width * repeats % 16 and repeats < 16)):
        rows, repeats = rows // 2, repeats * 2
    columns, outer = width * repeats, elements // layout.period
    block_columns = block_of(columns, min(tile, COLUMN_BLOCK))
    block_rows = min(tile // block_columns, triton.next_power_of_2(rows))
    while block_rows > 1 and block_rows * columns >= 1 << 31:
        block_rows //= 2
    tiles, down = -(-columns // block_columns), -(-rows // block_rows)
    steps = _steps(outer * down * tiles, down) if reduces else 1
    chunks = -(-down // steps)
    return Tiling(
        by_row=False,
        rows=rows,
        columns=columns,
        period=0,
        channels=layout.channels,
        inner=layout.inner,
        block_rows=block_rows,
        block_columns=block_columns,
        steps=steps,
        chunks=chunks,
        programs=outer * chunks * tiles,
        even=columns % block_columns == 0 and rows % (block_rows * steps) == 0,
        partials=(outer, chunks * repeats, layout.channels, layout.inner),
    )


def block_of(size: int, most: int) -> int:
    """The largest power of two up to ``most`` that pads ``size`` by no more than an eighth, else the least padding."""
    block = min(most, triton.next_power_of_2(size))
    candidates = [block >> shift for shift in range(block.bit_length()) if block >> shift >= min(block, 32)]
    padded = {candidate: -(-size // candidate) * candidate for candidate in candidates}
    return next((c for c in candidates if padded[c] * 8 <= size * 9), min(candidates, key=lambda c: padded[c]))


def _steps(tiles: int, most: int) -> int:
    steps = 1
    while steps < most and tiles >= steps * 2 * PROGRAMS:
        steps *= 2
    return steps


def _factor_of_two(number: int) -> int:
    """The largest power of two, up to 16, that divides the number."""
    return min(number & -number, 16)
