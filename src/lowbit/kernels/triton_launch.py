"""Calls of Triton's kernels that cost little Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs

from lowbit.grid import Grid
from lowbit.kernels.nan import mark_nan
from lowbit.kernels.signature import Signature
from lowbit.kernels.tiling import ROW_TILE_BYTES, Tiling, bytes_read, plan_tiles
from lowbit.ste import SteKind

BITS_BLOCK = 256  # bytes of bits of a program
ROW_BLOCK = 512  # octets of a row that a program takes at a time
EMA_BLOCK = 128  # scale groups of a program that blends states
ONE_READ = 16384  # elements of a scale group that one program holds

# Whether the launcher's own function takes what ``Launch`` gives it.
_IS_KNOWN = torch.version.hip is None and triton.__version__.startswith("3.6.")

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_CODES = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


@cache
def absence() -> str:
    """Why Triton cannot run here at all, with the remedy; "" where it can."""
    if knobs.runtime.interpret or torch.cuda.is_available():
        return ""
    return "Triton needs a CUDA device, and torch sees none; run where there is one, or set TRITON_INTERPRET=1"


def refusal(signature: Signature) -> str:
    """Why this signature has no kernel here; "" where it has."""
    if signature.op not in MAKERS:
        return f"Triton kernels leave {signature.op} to torch"
    if signature.dtype not in (_FLOATS + _CODES if signature.op == "dequantize" else _FLOATS):
        return f"Triton kernels do not take {signature.dtype}"
    if signature.op in ("ema_scale", "ema_range") and signature.dtype != torch.float32:
        return "the state of an EMA is float32, and blends with a batch of float64 in float64"
    if signature.op == "gradient_bits" and not signature.ste.only_clips:
        return f"a gradient of {signature.ste.name} is not one bit"
    if math.prod(signature.shape) == 0:
        return "an empty tensor needs no kernel"
    if knobs.runtime.interpret:
        return ""
    if signature.device.type != "cuda":
        return f"Triton kernels run on CUDA, not on {signature.device}"
    if torch.version.hip is None and torch.cuda.get_device_capability(signature.device) < (8, 0):
        return "the device is older than compute capability 8.0, which the kernels' NaN-keeping minimum needs"
    return ""


class Launch:
    """A kernel with its grid and numbers in place: a call takes the tensors alone.

    Triton's own dispatch costs tens of microseconds. Here it runs once for what it specialises on that may change from
    call to call (dtypes and alignment of the tensors); later calls go straight to what it compiled.
    """

    def __init__(
        self, function: Any, programs: int, arguments: tuple[Any, ...], warps: int, device: torch.device, **options: int
    ) -> None:
        self.function, self.programs, self.arguments = function, programs, arguments
        self.options = {"num_warps": warps, "enable_fp_fusion": False, **options}
        self.index, self.alone = device.index, device.index is None or torch.cuda.device_count() == 1
        self.compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def __call__(self, *tensors: Tensor | None) -> None:
        if not self.alone and self.index != torch.cuda.current_device():
            with torch.cuda.device(self.index):
                return self(*tensors)
        pointers: list[int | None] = []
        kinds: list[Any] = []
        for tensor in tensors:
            if tensor is None:
                pointers.append(None)
                kinds.append(None)
            else:
                pointers.append(pointer := tensor.data_ptr())
                kinds += tensor.dtype, pointer % 16
        run = self.compiled.get(key := tuple(kinds))
        hooks = knobs.runtime.launch_enter_hook  # a profiler's
        if run is not None and not getattr(hooks, "calls", hooks):
            return run(pointers)
        kernel = self.function[(self.programs,)](*tensors, *self.arguments, **self.options)
        if hasattr(kernel, "packed_metadata"):
            self.compiled[key] = self._direct(kernel)
        return None

    def _direct(self, kernel: Any) -> Callable[..., Any]:
        """What ``kernel[grid]`` does, less its hooks."""
        run, function, metadata = kernel.run, kernel.function, kernel.packed_metadata
        programs, arguments = self.programs, self.arguments
        index, stream = self.index, triton.runtime.driver.active.get_current_stream
        if not _IS_KNOWN or run.profile_scratch_size:

            def indirect(pointers: list[int | None]) -> None:
                run(programs, 1, 1, stream(index), function, metadata, None, None, None, *pointers, *arguments)

            return indirect
        launch, flags = run.launch, (run.launch_cooperative_grid, run.launch_pdl)
        size, empty = programs * run.num_ctas * run.global_scratch_size, empty_on(torch.device("cuda", index or 0))
        constants = None, metadata, None, None, None

        def direct(pointers: list[int | None]) -> None:
            held = empty((size,), torch.int8) if size else None  # for descriptors
            scratch = None if held is None else held.data_ptr()
            launch(programs, 1, 1, stream(index), function, *flags, scratch, *constants, *pointers, *arguments)

        return direct


@cache
def empty_on(device: torch.device) -> Callable[[tuple[int, ...], torch.dtype], Tensor]:
    """torch.empty for this device, of memory that a kernel writes in full"""
    # What Inductor's code calls: a third of torch.empty's time, on the current GPU alone.
    quick = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)  # noqa: SLF001
    if quick is None or device.type != "cuda" or torch.cuda.device_count() > 1:
        return lambda shape, dtype: torch.empty(shape, dtype=dtype, device=device)

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if torch.are_deterministic_algorithms_enabled():  # which wants fresh memory filled
            return torch.empty(shape, dtype=dtype, device=device)
        filled: Tensor = quick(shape, _strides(shape), dtype)
        return filled

    return empty


@lru_cache(maxsize=4096)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


class Kernels(NamedTuple):
    """The jitted functions."""

    map: Any
    reduce: Any
    finish: Any
    quantize_rows: Any
    ema: Any
    gradient_bits: Any


def kernel(signature: Signature, kernels: Kernels) -> Callable[..., Any]:
    """The op's function for tensors of this signature."""
    return MAKERS[signature.op](signature, kernels)


def workspace_size(signature: Signature) -> int:
    """Bytes of temporary memory at the op's peak: partial results, and copies where the memory needs them."""
    elements = math.prod(signature.shape)
    copies = signature.memory.copies and not (signature.op.endswith("_per_batch") and _rows_apart(signature))
    size = elements * bytes_read(signature) if copies else 0
    arrays = {"abs_max": 1, "min_max": 2, "learned_fake_quantize_backward": 2}
    arrays |= {"fake_quantize_per_batch": 2, "quantize_per_batch": 2}
    if signature.op in arrays:
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
        double = own == torch.float64 or (op == "dequantize" and dtype == torch.float64)
        launches[double](y, None, memory.arrange(x), _packed(scale), _packed(zero_point), None, None)
        return memory.restore(y, x)

    return run


def _backward(signature: Signature, kernels: Kernels) -> Callable[..., Any]:
    """(grad_output, x, scale, zero_point=None) -> dx, of every op of that form."""
    memory, own = signature.memory, signature.dtype
    if signature.op == "fake_quantize_backward" and signature.ste is SteKind.IDENTITY:
        return lambda grad_output, *_: grad_output.to(own)
    launch = _map(signature, kernels)

    def run(grad_output: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
        dx = memory.empty(own, x.device)
        tensors = memory.arrange(grad_output), memory.arrange(x), _packed(scale), _packed(zero_point)
        launch(dx, *tensors, None, None)
        return memory.restore(dx, x)

    return run


def _learned_backward(signature: Signature, kernels: Kernels) -> Callable[..., Any]:
    """(grad_output, x, scale, zero_point=None, *, method="lsq") -> dx, ds; dz too where there is a zero point"""
    memory, own, wide, shape = signature.memory, signature.dtype, signature.math_dtype, signature.scale_shape
    tiling = plan_tiles(signature, reduces=True)
    launches = {method: _map(signature, kernels, method, tiling) for method in ("lsq", "pact")}
    finish = _gathered(signature, kernels.finish, tiling, "sum")

    def run(
        grad_output: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None = None, *, method: str = "lsq"
    ) -> tuple[Tensor, ...]:
        dx = memory.empty(own, x.device)
        ds, dz = (torch.empty(shape, dtype=wide, device=x.device) for _ in range(2))
        sums = (ds, dz) if tiling.complete else _partials(tiling, 2, wide, x.device)
        tensors = memory.arrange(grad_output), memory.arrange(x), _packed(scale), _packed(zero_point)
        launches[method](dx, *tensors, *sums)
        if not tiling.complete:
            finish(ds, dz, *sums)
        return (memory.restore(dx, x), ds) if zero_point is None else (memory.restore(dx, x), ds, dz)

    return run


def _statistics(signature: Signature, kernels: Kernels) -> Callable[..., Any]:
    """(x) -> the maximum, or the minimum and the maximum"""
    memory, measure = signature.memory, _measure(signature, kernels, signature.op)

    def run(x: Tensor) -> Any:
        first, second = measure(memory.arrange(x))
        return first if second is None else (first, second)

    return run


def _per_batch(signature: Signature, kernels: Kernels) -> Callable[..., Any]:
    """(x, *, symmetric=True) -> y, scale, zero_point: in one read where a program can hold a whole group."""
    memory, wide, shape = signature.memory, signature.math_dtype, signature.scale_shape
    op = signature.op.removesuffix("_per_batch")
    own = torch.int8 if op == "quantize" else signature.dtype
    layout = memory.layout
    # A group that is one run of memory.
    run_length = layout.period if layout.channels == 1 else layout.inner
    one_read = run_length <= ONE_READ and (layout.channels == 1 or layout.period == layout.channels * layout.inner)
    apart = _rows_apart(signature) if memory.copies else None
    if one_read:
        tiling = plan_tiles(signature, whole_rows=True)
        held = tiling.block_rows * tiling.block_columns * signature.dtype.itemsize
        rows = {
            kind: _tiled(
                signature,
                kernels.quantize_rows,
                tiling,
                *(kind, kind == "affine" or not signature.grid.signed),
                *(apart is not None, *(apart or (1, 1, 0, 0, 0, 0, 0, 0))),
                warps=max(1, min(16, held // ROW_TILE_BYTES)),
            )
            for kind in ("symmetric", "affine")
        }
    else:
        measures = {kind: _measure(signature, kernels, kind) for kind in ("symmetric", "affine")}
        quantize = _map(signature, kernels, op)

    def run(x: Tensor, *, symmetric: bool = True) -> tuple[Tensor, Tensor, Tensor | None]:
        kind = "symmetric" if symmetric else "affine"
        if apart is not None:
            y, packed = torch.empty_like(x, dtype=own), x
        else:
            y, packed = memory.empty(own, x.device), memory.arrange(x)
        if one_read:
            scale = torch.empty(shape, dtype=wide, device=x.device)
            zero_point = None if symmetric else torch.empty(shape, dtype=torch.int32, device=x.device)
            rows[kind](y, packed, scale, zero_point)
        else:
            scale, zero_point = measures[kind](packed)
            quantize(y, None, packed, scale, zero_point, None, None)
            scale = mark_nan(scale, x, per=signature.per) if op == "quantize" else scale
        return y if apart is not None else memory.restore(y, x), scale, zero_point

    return run


def _rows_apart(signature: Signature) -> tuple[int, ...] | None:
    """Of rows that lie apart, such as those of an attention's heads: the sizes of two axes, and all strides of x and y

    None where they do not: where an element's neighbour is not the next of its row, a row is too long for one program,
    or there are more axes.
    """
    like = torch.empty_strided(signature.shape, signature.stride, device="meta")
    result = torch.empty_like(like)
    if not 1 < like.dim() <= 4 or (like.stride(-1), result.stride(-1)) != (1, 1) or 0 in like.stride():
        return None
    span = sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
    if signature.scale_shape != tuple(like.shape[:-1]) or like.shape[-1] > ONE_READ or span >= 1 << 31:
        return None
    more = 4 - like.dim()
    sizes = [1] * more + list(like.shape)
    strides = ([0] * more + list(tensor.stride()) for tensor in (like, result))
    x, y = (stride[:-1] for stride in strides)
    return *sizes[1:3], *x, *y


def _gradient_bits(signature: Signature, kernels: Kernels) -> Callable[..., Any]:
    """(x, scale, zero_point=None) -> a bit for each element in the order of memory"""
    memory, grid, elements = signature.memory, signature.grid, math.prod(signature.shape)
    layout, double = memory.layout, signature.dtype == torch.float64
    constants = signature.ste.value, *_ends(grid), double
    single = math.prod(signature.scale_shape) == 1
    launch = bits_launch(kernels.gradient_bits, elements, (*layout, single), signature.device, constants)

    def run(x: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
        bits = torch.empty(-(-elements // 8), dtype=torch.uint8, device=x.device)
        launch(bits, memory.arrange(x), _packed(scale), _packed(zero_point))
        return bits

    return run


@lru_cache(maxsize=4096)
def bits_launch(
    function: Any, elements: int, numbers: tuple[Any, ...], device: torch.device, constants: tuple[Any, ...] = ()
) -> Launch:
    """A kernel over the bytes that hold a bit for each element."""
    arguments = elements, *numbers, elements >= 1 << 31, BITS_BLOCK, *constants
    return Launch(function, -(-elements // (8 * BITS_BLOCK)), arguments, 4, device)


@lru_cache(maxsize=4096)
def row_launch(
    function: Any,
    rows: int,
    columns: int,
    single: bool,
    grid: Grid,
    ste: SteKind | None,
    double: bool,
    device: torch.device,
) -> Launch:
    """A kernel that takes a row of whole octets a program"""
    octets = columns // 8
    block = min(ROW_BLOCK, triton.next_power_of_2(octets))
    rule, fused = "identity" if ste is None else ste.value, not double and not knobs.runtime.interpret
    numbers = octets, single, block, -(-octets // block)
    return Launch(function, rows, (*numbers, rule, *_ends(grid), double, fused), max(1, min(8, block // 64)), device)


@lru_cache(maxsize=16)
def weights_launch(
    function: Any, places: tuple[tuple[int, int, int], ...], dtype: torch.dtype, grid: Grid, device: torch.device
) -> tuple[Tensor, Launch]:
    """A kernel over the rows of matrices at ``places``, (address, rows, columns); and its table of rows"""
    parts, start, steps = [], 0, [16]
    for address, rows, columns in places:
        row = torch.arange(rows, device="cpu")
        way = (address - places[0][0]) // dtype.itemsize  # from the first: its alignment is known to the compiler
        steps += [way, start, columns]
        parts.append(torch.stack([way + row * columns, start + row * columns, columns + 0 * row]))
        start += rows * columns
    table = torch.cat(parts, 1)
    block = triton.next_power_of_2(max(columns for _, _, columns in places))
    aligned = math.gcd(*steps)
    numbers = table.shape[1], block, aligned, *_ends(grid), not knobs.runtime.interpret
    return table.to(device), Launch(function, table.shape[1], numbers, max(1, block // 1024), device)


def _measure(signature: Signature, kernels: Kernels, kind: str) -> Callable[[Tensor], tuple[Tensor, Tensor | None]]:
    """(x) -> the two results of a reduction of kind abs_max or symmetric (the second is None), min_max or affine"""
    shape, wide = signature.scale_shape, signature.math_dtype
    arrays, second_dtype = (2 if kind in ("min_max", "affine") else 1), (torch.int32 if kind == "affine" else wide)
    tiling = plan_tiles(signature, reduces=True)
    reduce = _tiled(signature, kernels.reduce, tiling, kind, tiling.complete)
    finish = _gathered(signature, kernels.finish, tiling, kind)

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


def _ema(signature: Signature, kernels: Kernels) -> Callable[..., Sequence[Tensor]]:
    """(what the batch says, the state, decay, *, into=None) -> the state, new, in memory of its own or in this"""
    groups, grid, device = math.prod(signature.shape), signature.grid, signature.device
    symmetric = signature.op == "ema_scale"
    constants = "abs_max" if symmetric else "min_max", 1, EMA_BLOCK, 1, False, False, *_ends(grid)

    @cache
    def launch(decay: float) -> Launch:
        numbers = groups, 1, groups, 1
        return Launch(kernels.ema, -(-groups // EMA_BLOCK), (*numbers, *constants, decay, 1 - decay), 1, device)

    def ema(*args: Any, into: Sequence[Tensor] | None = None) -> Sequence[Tensor]:
        *given, decay = args
        tensors = [tensor.contiguous() for tensor in given]
        batch, state = ((tensors[0], None), tensors[1:]) if symmetric else (tensors[:2], tensors[2:])
        results = [torch.empty_like(tensor) for tensor in state] if into is None else into
        launch(decay)(*batch, *_ema_state(state), *_ema_state(results))
        return results

    return ema


def _ema_state(state: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """low, high, scale, zero point, initialized; a symmetric state has but two of them"""
    return (None, None, state[0], None, state[1]) if len(state) == 2 else state


@lru_cache(maxsize=4096)
def follow_launches(signature: Signature, kernels: Kernels, decay: float) -> Callable[[Tensor, Sequence[Tensor]], None]:
    """(x, state): the statistic of x, and the state of an EMA that takes it in, in its own memory"""
    arrays = 1 if signature.op == "abs_max" else 2
    memory, tiling, device = signature.memory, plan_tiles(signature, reduces=True), signature.device
    reduce = _tiled(signature, kernels.reduce, tiling, signature.op, False)
    blend = _gathered(signature, kernels.ema, tiling, signature.op, decay, 1 - decay)

    def follow(x: Tensor, state: Sequence[Tensor]) -> None:
        partials = _partials(tiling, arrays, torch.float32, device)
        reduce(memory.arrange(x), *partials)
        blend(*partials, *_ema_state(state), *_ema_state(state))

    return follow


MAKERS: dict[str, Callable[[Signature, Kernels], Callable[..., Any]]] = {
    "fake_quantize": _forward,
    "fake_quantize_backward": _backward,
    "fake_quantize_per_batch": _per_batch,
    "quantize_per_batch": _per_batch,
    "gradient_bits": _gradient_bits,
    "learned_fake_quantize": _forward,
    "learned_fake_quantize_backward": _learned_backward,
    "quantize": _forward,
    "quantize_backward": _backward,
    "dequantize": _forward,
    "dequantize_backward": _forward,
    "abs_max": _statistics,
    "min_max": _statistics,
    "ema_scale": _ema,
    "ema_range": _ema,
}


def _packed(params: Tensor | None) -> Tensor | None:
    return params if params is None or params.is_contiguous() else params.contiguous()


def _partials(tiling: Tiling, arrays: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor | None]:
    empty, shape = empty_on(device), (math.prod(tiling.partials),)
    return empty(shape, dtype), empty(shape, dtype) if arrays == 2 else None


def _map(
    signature: Signature, kernels: Kernels, op: str = "", tiling: Tiling | None = None, *, double: bool | None = None
) -> Launch:
    op = op or signature.op.removeprefix("learned_")
    tiling = tiling or plan_tiles(signature)
    return _tiled(signature, kernels.map, tiling, op, signature.ste.value, double=double)


def _tiled(
    signature: Signature,
    function: Any,
    tiling: Tiling,
    *constants: Any,
    double: bool | None = None,
    warps: int | None = None,
) -> Launch:
    double = signature.dtype == torch.float64 if double is None else double
    # The interpreter's fma rounds twice, so that there only the division itself is right; and where scales differ by
    # column, a thread would hold too many numbers for each.
    fused = not double and not knobs.runtime.interpret and tiling.by_row
    arguments = (*tiling.arguments(), *constants, *_ends(signature.grid), double, fused)
    return Launch(function, tiling.programs, arguments, warps or tiling.warps, signature.device)


def _gathered(signature: Signature, function: Any, tiling: Tiling, kind: str, *numbers: float) -> Launch:
    """A kernel of a few scale groups a program, whose partial results it puts together"""
    _, repeats, channels, inner = tiling.partials
    # Neighbours in memory are the groups where inner is 1, else one group's own partial results.
    block = min(32 if inner == 1 else 1024, triton.next_power_of_2(repeats * inner))
    block_groups = min(32, 1024 // block, triton.next_power_of_2(tiling.groups))
    rounds = triton.next_power_of_2(-(-repeats * inner // block))
    wide = math.prod(tiling.partials) >= 1 << 30
    sizes, double = (tiling.groups, repeats, channels, inner), signature.dtype == torch.float64
    arguments = *sizes, kind, block, block_groups, rounds, wide, double, *_ends(signature.grid), *numbers
    warps = max(1, min(8, block * block_groups // 128))
    return Launch(function, -(-tiling.groups // block_groups), arguments, warps, signature.device)


def _ends(grid: Grid) -> tuple[float, float]:
    return float(grid.quant_min), float(grid.quant_max)
