"""What Triton's kernels need around them: how programs share out the memory, and calls that cost little Python."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs

from lowbit.granularity import Layout
from lowbit.kernels.ops import OPS
from lowbit.kernels.signature import Signature
from lowbit.ste import SteKind

# What is worth tuning.
TILE_BYTES = 16384  # that a program reads at a time: 16-byte accesses, four to a thread
WARPS = 8
COLUMN_BLOCK = 256  # columns of a tile whose scales lie along its columns
COLUMN_STEPS = 4  # tiles one after the other that share those scales
PROGRAMS = 2048  # of a reduction: enough to fill the device, few enough to make the second pass small
FEW_TILES = 512  # a tensor of fewer tiles takes smaller ones
ONE_READ = 16384  # elements of a scale group that one program holds
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
        return max(1, min(max(WARPS, tile // 1024), tile // 256))

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
    tile = min(TILE_BYTES // _bytes_read(signature), 8192)
    while tile > 1024 and elements < tile * FEW_TILES:
        tile //= 2
    if layout.period == layout.channels * layout.inner or layout.channels == 1 or layout.inner >= _SHORT_RUN:
        return _by_row(layout, elements, tile, reduces=reduces, whole_rows=whole_rows)
    return _by_column(layout, elements, tile, reduces=reduces)


def _bytes_read(signature: Signature) -> int:
    """For each element, of the tensors that are as large as the result."""
    return signature.dtype.itemsize * sum(name in ("grad_output", "x", "q") for name in OPS[signature.op].tensors)


def _by_row(layout: Layout, elements: int, tile: int, *, reduces: bool, whole_rows: bool) -> Tiling:
    # One channel: the group does not depend on inner (see Layout), and the longest run is the period.
    columns = layout.period if layout.channels == 1 else layout.inner
    rows, period = elements // columns, layout.period // columns
    block_columns = triton.next_power_of_2(columns) if whole_rows else _block(columns, tile)
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
    block_columns = _block(columns, min(tile, COLUMN_BLOCK))
    block_rows = min(tile // block_columns, triton.next_power_of_2(rows))
    while block_rows > 1 and block_rows * columns >= 1 << 31:
        block_rows //= 2
    tiles, down = -(-columns // block_columns), -(-rows // block_rows)
    steps = _steps(outer * down * tiles, down)
    steps = steps if reduces else min(steps, COLUMN_STEPS)
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


def _block(size: int, most: int) -> int:
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


class Launch:
    """A kernel with its grid and numbers in place: a call takes the tensors alone.

    Triton's own dispatch costs tens of microseconds. Here it runs once for what it specialises on that may change from
    call to call (dtypes and alignment of the tensors); later calls go straight to what it compiled.
    """

    def __init__(
        self, function: Any, programs: int, arguments: tuple[Any, ...], warps: int, device: torch.device
    ) -> None:
        self.function, self.programs, self.arguments, self.warps = function, programs, arguments, warps
        self.index = device.index
        self.compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def __call__(self, *tensors: Tensor | None) -> None:
        if self.index is not None and self.index != torch.cuda.current_device():
            with torch.cuda.device(self.index):
                return self._run(tensors)
        return self._run(tensors)

    def _run(self, tensors: tuple[Tensor | None, ...]) -> None:
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        key = tuple(
            [
                None if tensor is None or pointer is None else (tensor.dtype, pointer % 16 == 0)
                for tensor, pointer in zip(tensors, pointers, strict=True)
            ]
        )
        run = self.compiled.get(key)
        hooks = knobs.runtime.launch_enter_hook  # a profiler's
        if run is not None and not getattr(hooks, "calls", hooks):
            run(pointers)
            return
        kernel = self.function[(self.programs,)](
            *tensors, *self.arguments, num_warps=self.warps, enable_fp_fusion=False
        )
        if hasattr(kernel, "packed_metadata"):
            self.compiled[key] = self._direct(kernel)

    def _direct(self, kernel: Any) -> Callable[..., Any]:
        """What ``kernel[grid]`` does, less its hooks."""
        run, function, metadata = kernel.run, kernel.function, kernel.packed_metadata
        programs, arguments = self.programs, self.arguments
        index, stream = self.index, triton.runtime.driver.active.get_current_stream

        def direct(pointers: list[int | None]) -> None:
            run(programs, 1, 1, stream(index), function, metadata, None, None, None, *pointers, *arguments)

        return direct


class Kernels(NamedTuple):
    """The jitted functions."""

    map: Any
    reduce: Any
    finish: Any
    quantize_rows: Any


def kernel(signature: Signature, kernels: Kernels) -> Callable[..., Any]:
    """The op's function for tensors of this signature."""
    return MAKERS[signature.op](signature, kernels)


def workspace_size(signature: Signature) -> int:
    """Bytes of temporary memory at the op's peak: partial results, and copies where the memory needs them."""
    elements = math.prod(signature.shape)
    size = elements * _bytes_read(signature) if signature.memory.copies else 0
    arrays = {"abs_max": 1, "min_max": 2, "fake_quantize_per_batch": 2, "learned_fake_quantize_backward": 2}
    if signature.op in arrays and elements:
        tiling = plan_tiles(signature, reduces=True)
        if not tiling.complete:
            size += arrays[signature.op] * math.prod(tiling.partials) * signature.math_dtype.itemsize
    return size


def _forward(signature: Signature, kernels: Kernels) -> Callable[..., Any]:
    """(x, scale, zero_point=None, *, dtype=None) -> y, of every op of that form; dequantize_backward is one."""
    op, memory, own = signature.op, signature.memory, signature.dtype
    default = own if own.is_floating_point and op != "quantize" else signature.math_dtype
    launches = {double: _map(signature, kernels, double=double) for double in (False, True)}

    def run(x: Tensor, scale: Tensor, zero_point: Tensor | None = None, *, dtype: torch.dtype | None = None) -> Tensor:
        y = memory.empty(default if dtype is None else dtype, x.device)
        x = memory.arrange(x) if memory.copies else x
        double = own == torch.float64 or (op == "dequantize" and dtype == torch.float64)
        launches[double](y, None, x, _packed(scale), _packed(zero_point), None, None)
        return y

    return run


def _backward(signature: Signature, kernels: Kernels) -> Callable[..., Any]:
    """(grad_output, x, scale, zero_point=None) -> dx, of every op of that form."""
    memory, own = signature.memory, signature.dtype
    if signature.op == "fake_quantize_backward" and signature.ste is SteKind.IDENTITY:
        return lambda grad_output, *_: grad_output.to(own)
    launch = _map(signature, kernels)

    def run(grad_output: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
        dx = memory.empty(own, x.device)
        x = memory.arrange(x) if memory.copies else x
        launch(dx, memory.arrange(grad_output), x, _packed(scale), _packed(zero_point), None, None)
        return dx

    return run


def _learned_backward(signature: Signature, kernels: Kernels) -> Callable[..., Any]:
    """(grad_output, x, scale, zero_point=None, *, method="lsq") -> dx, ds, dz"""
    memory, own, wide, shape = signature.memory, signature.dtype, signature.math_dtype, signature.scale_shape
    tiling = plan_tiles(signature, reduces=True)
    launches = {method: _map(signature, kernels, method, tiling) for method in ("lsq", "pact")}
    finish = _finish(signature, kernels, tiling, "sum")

    def run(
        grad_output: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None = None, *, method: str = "lsq"
    ) -> tuple[Tensor, Tensor, Tensor]:
        dx = memory.empty(own, x.device)
        x = memory.arrange(x) if memory.copies else x
        ds, dz = (torch.empty(shape, dtype=wide, device=x.device) for _ in range(2))
        sums = (ds, dz) if tiling.complete else _partials(tiling, 2, wide, x.device)
        launches[method](dx, memory.arrange(grad_output), x, _packed(scale), _packed(zero_point), *sums)
        if not tiling.complete:
            finish(ds, dz, *sums)
        return dx, ds, dz

    return run


def _statistics(signature: Signature, kernels: Kernels) -> Callable[..., Any]:
    """(x) -> the maximum, or the minimum and the maximum"""
    memory, measure = signature.memory, _measure(signature, kernels, signature.op)

    def run(x: Tensor) -> Any:
        first, second = measure(memory.arrange(x) if memory.copies else x)
        return first if second is None else (first, second)

    return run


def _per_batch(signature: Signature, kernels: Kernels) -> Callable[..., Any]:
    """(x, *, symmetric=True) -> y, scale, zero_point: in one read where a program can hold a whole group."""
    memory, own, wide, shape = signature.memory, signature.dtype, signature.math_dtype, signature.scale_shape
    one_read = memory.layout.channels == 1 and memory.layout.period <= ONE_READ
    if one_read:
        tiling = plan_tiles(signature, whole_rows=True)
        rows = {kind: _tiled(signature, kernels.quantize_rows, tiling, kind) for kind in ("symmetric", "affine")}
    else:
        measures = {kind: _measure(signature, kernels, kind) for kind in ("symmetric", "affine")}
        quantize = _map(signature, kernels, "fake_quantize")

    def run(x: Tensor, *, symmetric: bool = True) -> tuple[Tensor, Tensor, Tensor | None]:
        kind = "symmetric" if symmetric else "affine"
        y = memory.empty(own, x.device)
        x = memory.arrange(x) if memory.copies else x
        if one_read:
            scale = torch.empty(shape, dtype=wide, device=x.device)
            zero_point = None if symmetric else torch.empty(shape, dtype=torch.int32, device=x.device)
            rows[kind](y, x, scale, zero_point)
        else:
            scale, zero_point = measures[kind](x)
            quantize(y, None, x, scale, zero_point, None, None)
        return y, scale, zero_point

    return run


def _measure(signature: Signature, kernels: Kernels, kind: str) -> Callable[[Tensor], tuple[Tensor, Tensor | None]]:
    """(x) -> the two results of a reduction of kind abs_max or symmetric (the second is None), min_max or affine"""
    shape, wide = signature.scale_shape, signature.math_dtype
    arrays, second_dtype = (2 if kind in ("min_max", "affine") else 1), (torch.int32 if kind == "affine" else wide)
    tiling = plan_tiles(signature, reduces=True)
    reduce = _tiled(signature, kernels.reduce, tiling, kind, tiling.complete)
    finish = _finish(signature, kernels, tiling, kind)

    def run(x: Tensor) -> tuple[Tensor, Tensor | None]:
        first = torch.empty(shape, dtype=wide, device=x.device)
        second = torch.empty(shape, dtype=second_dtype, device=x.device) if arrays == 2 else None
        if tiling.complete:
            reduce(x, first, second)
        else:
            partials = _partials(tiling, arrays, wide, x.device)
            reduce(x, *partials)
            finish(first, second, *partials)
        return first, second

    return run


MAKERS: dict[str, Callable[[Signature, Kernels], Callable[..., Any]]] = {
    "fake_quantize": _forward,
    "fake_quantize_backward": _backward,
    "fake_quantize_per_batch": _per_batch,
    "learned_fake_quantize": _forward,
    "learned_fake_quantize_backward": _learned_backward,
    "quantize": _forward,
    "quantize_backward": _backward,
    "dequantize": _forward,
    "dequantize_backward": _forward,
    "abs_max": _statistics,
    "min_max": _statistics,
}


def _packed(params: Tensor | None) -> Tensor | None:
    return params if params is None or params.is_contiguous() else params.contiguous()


def _partials(tiling: Tiling, arrays: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor | None]:
    memory = torch.empty((arrays, math.prod(tiling.partials)), dtype=dtype, device=device)
    return memory[0], memory[1] if arrays == 2 else None


def _map(
    signature: Signature, kernels: Kernels, op: str = "", tiling: Tiling | None = None, *, double: bool | None = None
) -> Launch:
    op = op or signature.op.removeprefix("learned_")
    tiling = tiling or plan_tiles(signature)
    return _tiled(signature, kernels.map, tiling, op, signature.ste.value, double=double)


def _tiled(signature: Signature, function: Any, tiling: Tiling, *constants: Any, double: bool | None = None) -> Launch:
    double = signature.dtype == torch.float64 if double is None else double
    # The interpreter's fma rounds twice, so that there only the division itself is right.
    fused = not double and not knobs.runtime.interpret
    grid = signature.grid
    arguments = (*tiling.arguments(), *constants, grid.quant_min, grid.quant_max, double, fused)
    return Launch(function, tiling.programs, arguments, tiling.warps, signature.device)


def _finish(signature: Signature, kernels: Kernels, tiling: Tiling, kind: str) -> Launch:
    _, repeats, channels, inner = tiling.partials
    # Neighbours in memory are the groups where inner is 1, else one group's own partial results.
    block = min(32 if inner == 1 else 1024, triton.next_power_of_2(repeats * inner))
    block_groups = min(32, 1024 // block, triton.next_power_of_2(tiling.groups))
    rounds = triton.next_power_of_2(-(-repeats * inner // block))
    wide = math.prod(tiling.partials) >= 1 << 30
    grid, double = signature.grid, signature.dtype == torch.float64
    numbers = (tiling.groups, repeats, channels, inner)
    constants = (kind, block, block_groups, rounds, wide, grid.quant_min, grid.quant_max, double)
    warps = max(1, min(8, block * block_groups // 128))
    return Launch(kernels.finish, -(-tiling.groups // block_groups), (*numbers, *constants), warps, signature.device)
