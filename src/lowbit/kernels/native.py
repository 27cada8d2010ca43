"""The fused CPU loops of native.c, through ctypes."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Sequence
from ctypes import c_char_p, c_double, c_int, c_int32, c_int64, c_void_p
from functools import cache, partial
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.granularity import Layout
from lowbit.kernels.nan import mark_nan, may_hold_nan
from lowbit.kernels.precision import math_dtype
from lowbit.kernels.signature import Memory, Signature
from lowbit.scale import affine_params, symmetric_scale
from lowbit.ste import SteKind

# Sums are kept in the arithmetic's dtype inside a block, in float64 from block to block.
ACCUMULATOR = torch.float64

# The order of native.c's types of memory.
TYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
)
_ABS_MAX, _MIN_MAX, _LEARNED = range(3)
_ADD, _MIN, _MAX = range(3)
_FOLDS = {_ABS_MAX: (_MAX,), _MIN_MAX: (_MIN, _MAX), _LEARNED: (_ADD, _ADD)}

# Runs at least this long are reduced one by one, shorter ones side by side.
_LONG_RUN = 128
# Short runs are reduced in about this many units for each period, whatever the number of threads.
_UNITS = 64
# A scale group of at most this many bytes is read once from memory, and the second time from the cache.
_CACHE = 256 * 1024


class _Layout(ctypes.Structure):
    _fields_ = [(name, c_int64) for name in ("elements", "period", "channels", "inner")]


class _Reduce(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in ("periods", "rows", "channels", "inner")),
        *((name, c_int64) for name in ("chunks", "shares", "pieces", "piece", "units")),
        ("fold", c_int32 * 2),
        ("two", c_int32),
        ("partial", c_void_p * 2),
    ]


class _Call(ctypes.Structure):
    _fields_ = [
        ("layout", _Layout),
        ("reduce", _Reduce),
        *((name, c_double) for name in ("quant_min", "quant_max")),
        *((name, c_int32) for name in ("map", "reduction", "pact", "wide")),
        *((name, c_int32) for name in ("y_type", "g_type", "x_type", "threads", "marks_nan")),
        *((name, c_void_p) for name in ("y", "g", "x", "scale", "zero_point", "first", "own_zero_point")),
    ]


class Sums(ctypes.Structure):
    """The C file's own, of the same name."""

    _fields_ = [
        *((name, c_int64) for name in ("rows", "columns")),
        *((name, c_int32) for name in ("scale_by_row", "zero_by_row", "scale_by_column", "y_type", "wide", "threads")),
        *((name, c_void_p) for name in ("y", "sums", "zero_point", "column_sums", "x_scale", "w_scale", "bias")),
    ]


class Library:
    """The functions of native.c, and the level (instruction set) that they run at: the highest the processor has."""

    def __init__(self, path: Path) -> None:
        self.path, library = path, ctypes.CDLL(str(path))
        for name, result, arguments in (
            ("lowbit_map", None, [ctypes.POINTER(_Call), *[c_void_p] * 5, c_int]),
            ("lowbit_reduce", None, [ctypes.POINTER(_Call), *[c_void_p] * 8, c_int]),
            ("lowbit_per_batch", None, [ctypes.POINTER(_Call), *[c_void_p] * 4, c_int]),
            ("lowbit_gradient_bits", None, [ctypes.POINTER(_Call), *[c_void_p] * 4, c_int]),
            ("lowbit_select", None, [c_int64, c_int, *[c_void_p] * 3, c_int]),
            ("lowbit_scale_sums", None, [ctypes.POINTER(Sums)]),
            ("lowbit_transpose", None, [*[c_int64] * 3, *[c_int] * 2, *[c_void_p] * 2, c_int]),
            ("lowbit_ema_scale", None, [c_int64, *[c_double] * 4, *[c_void_p] * 5]),
            ("lowbit_ema_range", None, [c_int64, *[c_double] * 4, *[c_void_p] * 12]),
            ("lowbit_levels", c_int, []),
            ("lowbit_is_intel", c_int, []),
            ("lowbit_level_name", c_char_p, [c_int]),
            ("lowbit_set_level", None, [c_int]),
            ("lowbit_map_name", c_char_p, [c_int]),
            ("lowbit_call_size", c_int64, []),
            ("lowbit_block", c_int64, []),
            ("lowbit_chunk", c_int64, []),
        ):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        if library.lowbit_call_size() != ctypes.sizeof(_Call) + ctypes.sizeof(Sums):
            raise OSError(f"{path.name} was built from other sources")
        self.map, self.reduce, self.per_batch = library.lowbit_map, library.lowbit_reduce, library.lowbit_per_batch
        self.ema_scale, self.ema_range = library.lowbit_ema_scale, library.lowbit_ema_range
        self.gradient_bits, self.select = library.lowbit_gradient_bits, library.lowbit_select
        self.scale_sums, self.transpose = library.lowbit_scale_sums, library.lowbit_transpose
        self.is_intel = bool(library.lowbit_is_intel())
        self.block, self.chunk = library.lowbit_block(), library.lowbit_chunk()
        self.levels = [library.lowbit_level_name(i).decode() for i in range(library.lowbit_levels())]
        names = itertools.takewhile(bool, map(library.lowbit_map_name, itertools.count()))
        self.maps = {name.decode(): index for index, name in enumerate(names)}
        self._set_level = library.lowbit_set_level
        self.set_level(self.levels[-1])

    def set_level(self, name: str) -> None:
        """Run at another level that the processor has; all give the same bits."""
        self._set_level(self.levels.index(name))
        self.level = name


@cache
def library() -> Library | str:
    """The library that the install built, or why there is none."""
    here = Path(__file__).parent
    paths = [path for suffix in EXTENSION_SUFFIXES if (path := here / f"_native{suffix}").exists()]
    try:
        return Library(paths[0]) if paths else "they were not built, since the install found no C compiler"
    except (OSError, AttributeError) as error:
        return f"they do not load ({error})"


def absence() -> str:
    """Why there are no native kernels, and the remedy."""
    found = library()
    if isinstance(found, Library):
        return ""
    return (
        f"lowbit's CPU kernels are missing: {found}; with a C compiler there (gcc or clang), install lowbit again: "
        "pip install --force-reinstall --no-deps lowbit"
    )


def refusal(signature: Signature) -> str:
    """Why this signature is left to the reference."""
    if signature.op not in _KERNELS:
        return f"native kernels leave {signature.op} to torch"
    if signature.device.type != "cpu":
        return f"native kernels run on the CPU, not on {signature.device}"
    if signature.dtype not in TYPES:
        return f"native kernels do not take {signature.dtype}"
    if signature.op in ("ema_scale", "ema_range") and signature.dtype != torch.float32:
        return "the state of an EMA is float32, and blends with a batch of float64 in float64"
    if signature.op == "gradient_bits" and not signature.ste.only_clips:
        return f"a gradient of {signature.ste.name} is not one bit"
    if math.prod(signature.shape) == 0:
        return "an empty tensor needs no kernel"
    return ""


def kernel(signature: Signature) -> Callable[..., Any]:
    """The op's function for this signature."""
    return _KERNELS[signature.op](signature)


def workspace_size(signature: Signature) -> int:
    """Copies of tensors that lie otherwise in memory, and of the parameters; the partial results of a reduction."""
    memory, elements = signature.memory, math.prod(signature.shape)
    copies = 3 * elements * signature.math_dtype.itemsize if memory.copies else 0
    params = 8 * math.prod(signature.scale_shape) * signature.math_dtype.itemsize
    partials = 2 * ACCUMULATOR.itemsize * _partials(_reduce(memory, _LEARNED)) if signature.op in _REDUCTIONS else 0
    return copies + params + partials


def loaded() -> Library:
    """The library, which is there."""
    found = library()
    assert isinstance(found, Library), "refused before"
    return found


def _call(signature: Signature, wide: torch.dtype, formula: str | None = None, **types: torch.dtype) -> _Call:
    """A Call with all that the signature says; ``types`` are those of y, g and x."""
    memory, grid = signature.memory, signature.grid
    call = _Call(layout=_Layout(math.prod(memory.shape), *memory.layout), wide=wide == torch.float64)
    call.quant_min, call.quant_max = grid.quant_min, grid.quant_max
    if formula is not None:
        call.map = loaded().maps[formula]
    for name, dtype in types.items():
        setattr(call, f"{name}_type", TYPES.index(dtype))
    return call


def _pointers(scale: Tensor, zero_point: Tensor | None, wide: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point as C reads them: contiguous, in the dtype of the arithmetic."""
    if scale.dtype != wide or not scale.is_contiguous():
        scale = scale.to(wide).contiguous()
    return scale, None if zero_point is None else zero_point.to(wide).contiguous()


def address(tensor: Tensor | None) -> int | None:
    """Where its memory starts."""
    return None if tensor is None else tensor.data_ptr()


def _forward(signature: Signature) -> Callable[..., Tensor]:
    memory, dtype, wide, run = signature.memory, signature.dtype, signature.math_dtype, loaded().map
    call = _call(signature, wide, "fake_quantize", y=dtype, x=dtype)

    def fake_quantize(x: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
        own = memory.arrange(x)
        y = torch.empty_like(own)
        s, z = _pointers(scale, zero_point, wide)
        run(call, y.data_ptr(), None, own.data_ptr(), s.data_ptr(), address(z), torch.get_num_threads())
        return memory.restore(y, x)

    return fake_quantize


def _backward(signature: Signature, formula: str) -> Callable[..., Tensor]:
    """The kernel of a gradient; grad_output may have another float dtype than x."""
    memory, dtype, wide, run = signature.memory, signature.dtype, signature.math_dtype, loaded().map
    calls = {g: _call(signature, wide, formula, y=dtype, g=g, x=dtype) for g in TYPES[:4]}

    def backward(grad_output: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
        own, g = memory.arrange(x), memory.arrange(grad_output)
        dx = torch.empty_like(own)
        s, z = _pointers(scale, zero_point, wide)
        addresses = dx.data_ptr(), g.data_ptr(), own.data_ptr(), s.data_ptr(), address(z)
        run(calls[g.dtype], *addresses, torch.get_num_threads())
        return memory.restore(dx, x)

    return backward


def _fake_quantize_backward(signature: Signature) -> Callable[..., Tensor]:
    if signature.ste is SteKind.IDENTITY:
        dtype = signature.dtype
        return lambda grad_output, *_: grad_output.to(dtype)
    return _backward(signature, signature.ste.value)


def _convert(
    signature: Signature, formula: Callable[[torch.dtype | None], tuple[str, torch.dtype, torch.dtype]]
) -> Callable[..., Tensor]:
    """The kernel of an op whose result has a dtype of its own choice: formula(dtype) -> name, result, arithmetic"""
    memory, run = signature.memory, loaded().map

    @cache
    def made(dtype: torch.dtype | None) -> tuple[_Call, torch.dtype, torch.dtype]:
        name, result, wide = formula(dtype)
        return _call(signature, wide, name, y=result, x=signature.dtype), result, wide

    def convert(
        x: Tensor, scale: Tensor, zero_point: Tensor | None = None, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        call, result, wide = made(dtype)
        own = memory.arrange(x)
        y = torch.empty_like(own, dtype=result)
        s, z = _pointers(scale, zero_point, wide)
        run(call, y.data_ptr(), None, own.data_ptr(), s.data_ptr(), address(z), torch.get_num_threads())
        return memory.restore(y, x)

    return convert


def _quantize(signature: Signature) -> Callable[..., Tensor]:
    wide = signature.math_dtype
    return _convert(
        signature, lambda dtype: ("quantize", wide, wide) if dtype is None else ("quantize_integer", dtype, wide)
    )


def _dequantize(signature: Signature) -> Callable[..., Tensor]:
    own = signature.dtype if signature.dtype.is_floating_point else torch.float32

    def formula(dtype: torch.dtype | None) -> tuple[str, torch.dtype, torch.dtype]:
        result = own if dtype is None else dtype
        wide = torch.float64 if torch.float64 in (signature.dtype, result) else torch.float32
        return "dequantize", result, wide

    return _convert(signature, formula)


def _dequantize_backward(signature: Signature) -> Callable[..., Tensor]:
    own = signature.dtype
    return _convert(signature, lambda dtype: ("dequantize_backward", dtype or own, math_dtype(own)))


def _reduce(memory: Memory, reduction: int) -> _Reduce:
    """How the memory is cut into units, by its shape alone."""
    layout: Layout = memory.layout
    library = loaded()
    periods = math.prod(memory.shape) // layout.period
    rows, channels, inner = layout.period // (layout.channels * layout.inner), layout.channels, layout.inner
    if rows == 1:
        periods, channels = 1, periods * channels
    folds = _FOLDS[reduction]
    reduce = _Reduce(periods, rows, channels, inner, two=len(folds) == 2)
    reduce.fold[0], reduce.fold[1] = folds[0], folds[-1]
    if inner >= _LONG_RUN:
        reduce.chunks, reduce.shares = -(-inner // library.chunk), rows
        reduce.units = periods * rows * channels * reduce.chunks
    else:
        reduce.piece = library.block // inner * inner
        reduce.pieces = -(-channels * inner // reduce.piece)
        reduce.shares = min(rows, -(-_UNITS // reduce.pieces))
        reduce.units = periods * reduce.shares * reduce.pieces
    return reduce


def _partials(reduce: _Reduce) -> int:
    return int(reduce.periods * reduce.shares * reduce.channels * max(reduce.chunks, 1))


def _statistic(signature: Signature, reduction: int, results: int) -> Callable[[Tensor], Any]:
    memory, shape, wide, run = signature.memory, signature.scale_shape, signature.math_dtype, loaded().reduce
    call = _call(signature, wide, y=wide, x=signature.dtype)
    call.reduction, call.reduce = reduction, _reduce(memory, reduction)
    room = _partials(call.reduce) * (1 + call.reduce.two)

    def statistic(x: Tensor) -> Any:
        own = memory.arrange(x)
        found = tuple(torch.empty(shape, dtype=wide, device="cpu") for _ in range(results))
        partial = torch.empty(room, dtype=torch.float64, device="cpu")
        first, second = found[0].data_ptr(), found[1].data_ptr() if results == 2 else None
        inputs = None, None, own.data_ptr(), None, None
        run(call, *inputs, first, second, partial.data_ptr(), torch.get_num_threads())
        return found if results == 2 else found[0]

    return statistic


def _learned_backward(signature: Signature) -> Callable[..., tuple[Tensor, ...]]:
    memory, shape, wide, run = signature.memory, signature.scale_shape, signature.math_dtype, loaded().reduce
    dtype, reduce = signature.dtype, _reduce(memory, _LEARNED)
    room = 2 * _partials(reduce)

    @cache
    def made(g: torch.dtype, method: str, two: bool) -> _Call:
        call = _call(signature, wide, signature.ste.value, y=dtype, g=g, x=dtype)
        call.reduction, call.reduce, call.pact = _LEARNED, reduce, method == "pact"
        call.reduce.two = two
        return call

    def backward(
        grad_output: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None = None, *, method: str = "lsq"
    ) -> tuple[Tensor, ...]:
        own, g = memory.arrange(x), memory.arrange(grad_output)
        dx = torch.empty_like(own)
        sums = [torch.empty(shape, dtype=wide, device="cpu") for _ in range(1 if zero_point is None else 2)]
        s, z = _pointers(scale, zero_point, wide)
        partial = torch.empty(room, dtype=torch.float64, device="cpu")
        inputs = dx.data_ptr(), g.data_ptr(), own.data_ptr(), s.data_ptr(), address(z)
        results = sums[0].data_ptr(), sums[1].data_ptr() if len(sums) == 2 else None, partial.data_ptr()
        run(made(g.dtype, method, len(sums) == 2), *inputs, *results, torch.get_num_threads())
        return memory.restore(dx, x), *sums

    return backward


def _per_batch(signature: Signature, codes: torch.dtype | None = None) -> Callable[..., Any]:
    """x with the scale of its own range: its values; or its codes in this dtype, the scale being NaN where x is"""
    memory, shape, dtype, wide = signature.memory, signature.scale_shape, signature.dtype, signature.math_dtype
    reduce, run = _reduce(memory, _MIN_MAX), loaded().per_batch
    if reduce.rows > 1 or reduce.inner * dtype.itemsize > _CACHE:
        return _per_batch_in_two(signature, codes)
    calls, formula, result = {}, "quantize_integer" if codes else "fake_quantize", codes or dtype
    for symmetric, reduction in ((True, _ABS_MAX), (False, _MIN_MAX)):
        call = calls[symmetric] = _call(signature, wide, formula, y=result, x=dtype)
        call.reduction, call.reduce, call.marks_nan = reduction, _reduce(memory, reduction), codes is not None
        if call.reduce.chunks:
            call.reduce.units = call.reduce.channels  # a whole group is a unit

    def per_batch(x: Tensor, *, symmetric: bool = True) -> tuple[Tensor, Tensor, Tensor | None]:
        own = memory.arrange(x)
        y, scale = torch.empty_like(own, dtype=result), torch.empty(shape, dtype=wide, device="cpu")
        zero_point = None if symmetric else torch.empty(shape, dtype=torch.int32, device="cpu")
        addresses = y.data_ptr(), own.data_ptr(), scale.data_ptr(), address(zero_point)
        run(calls[symmetric], *addresses, torch.get_num_threads())
        return memory.restore(y, x), scale, zero_point

    return per_batch


def _per_batch_in_two(signature: Signature, codes: torch.dtype | None) -> Callable[..., Any]:
    """The statistics in one pass over memory, y in a second."""
    abs_max, min_max = _statistic(signature, _ABS_MAX, 1), _statistic(signature, _MIN_MAX, 2)
    quantize: Any = partial(_quantize(signature), dtype=codes) if codes else _forward(signature)
    grid = signature.grid

    def per_batch(x: Tensor, *, symmetric: bool = True) -> tuple[Tensor, Tensor, Tensor | None]:
        zero_point = None
        if symmetric:
            scale = symmetric_scale(abs_max(x), grid)
        else:
            low, high = min_max(x)
            scale, zero_point = affine_params(low, high, grid)
        y = quantize(x, scale, zero_point)
        return y, mark_nan(scale, x, per=signature.per) if codes and may_hold_nan(x) else scale, zero_point

    return per_batch


def _gradient_bits(signature: Signature) -> Callable[..., Tensor]:
    """A bit for each element in the order of memory, the lowest of a byte first."""
    memory, wide, run = signature.memory, signature.math_dtype, loaded().gradient_bits
    call = _call(signature, wide, signature.ste.value, x=signature.dtype)

    def gradient_bits(x: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
        own = memory.arrange(x)
        bits = torch.empty(-(-x.numel() // 8), dtype=torch.uint8, device="cpu")
        s, z = _pointers(scale, zero_point, wide)
        run(call, bits.data_ptr(), own.data_ptr(), s.data_ptr(), address(z), torch.get_num_threads())
        return bits

    return gradient_bits


def _ema(signature: Signature) -> Callable[..., Sequence[Tensor]]:
    """(what the batch says, the state, decay, *, into=None) -> the state, new, in memory of its own or in this"""
    elements, grid, library = math.prod(signature.shape), signature.grid, loaded()
    batch, run = (1, library.ema_scale) if signature.op == "ema_scale" else (2, library.ema_range)

    def ema(*args: Any, into: Sequence[Tensor] | None = None) -> Sequence[Tensor]:
        *tensors, decay = args
        inputs = [tensor.contiguous() for tensor in tensors]
        results = tuple(torch.empty_like(tensor) for tensor in inputs[batch:]) if into is None else into
        addresses = [tensor.data_ptr() for tensor in (*inputs, *results)]
        run(elements, grid.quant_min, grid.quant_max, decay, 1 - decay, *addresses)
        return results

    return ema


_REDUCTIONS = ("abs_max", "min_max", "fake_quantize_per_batch", "quantize_per_batch", "learned_fake_quantize_backward")

_KERNELS: dict[str, Callable[[Signature], Callable[..., Any]]] = {
    "fake_quantize": _forward,
    "fake_quantize_backward": _fake_quantize_backward,
    "fake_quantize_per_batch": _per_batch,
    "quantize_per_batch": partial(_per_batch, codes=torch.int8),
    "gradient_bits": _gradient_bits,
    "learned_fake_quantize": _forward,
    "learned_fake_quantize_backward": _learned_backward,
    "quantize": _quantize,
    "quantize_backward": lambda signature: _backward(signature, "quantize_backward"),
    "dequantize": _dequantize,
    "dequantize_backward": _dequantize_backward,
    "ema_scale": _ema,
    "ema_range": _ema,
    "abs_max": lambda signature: _statistic(signature, _ABS_MAX, 1),
    "min_max": lambda signature: _statistic(signature, _MIN_MAX, 2),
}

# The ops that are not left to torch.
SERVED = frozenset(_KERNELS)
