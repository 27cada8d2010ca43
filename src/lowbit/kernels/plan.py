"""Plan: which backend runs an op, what that costs and what it guarantees."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lowbit import granularity
from lowbit.granularity import Granularity, PerTensor
from lowbit.grid import Grid
from lowbit.kernels import native, reference
from lowbit.kernels.ops import OPS, PARAMS
from lowbit.kernels.precision import PrecisionGuarantee
from lowbit.kernels.signature import Signature
from lowbit.ste import SteKind
from lowbit.tracing import at_trace_time, is_exporting, opaque


class Verdict(NamedTuple):
    """Whether a plan can run a call, and if not, why, in words."""

    ok: bool
    reason: str


# Fastest first, each with the type of device it is written for. A backend is a module with:
#   absence() -> str            why it cannot run here at all, with the remedy; "" where it can
#   refusal(signature) -> str   why it cannot serve this signature; "" where it can
#   kernel(signature)           a function of the op's tensors, numbers and options; where the results are a state,
#                               one option is ``into``: the memory that they go to
#   workspace_size(signature)   bytes of temporary memory at the kernel's peak
#   ACCUMULATOR                 the dtype of sums; None: that of the arithmetic
_BACKENDS = {"triton": "cuda", "native": "cpu", "reference": "any"}

_ALL = tuple(_BACKENDS)
_candidates = _ALL


@contextmanager
def prefer(backend: str) -> Iterator[None]:
    """Run every op on one backend while the context lasts, what it refuses on the reference: to compare backends."""
    global _candidates
    before, _candidates = _candidates, (_check_backend(backend), "reference")
    try:
        yield
    finally:
        _candidates = before


@dataclass(frozen=True)
class Plan:
    """select -> can_implement -> run: the dispatcher that every functional op goes through.

    >>> x = torch.randn(4, 8)
    >>> plan = Plan.select("fake_quantize", x, prefer="reference")
    >>> plan.backend, plan.run(x, torch.tensor(0.1)).shape
    ('reference', torch.Size([4, 8]))
    """

    signature: Signature
    backend: str
    kernel: Callable[..., Any]
    copies: bool
    workspace_size: int
    precision_guarantee: PrecisionGuarantee

    @staticmethod
    def select(
        op: str,
        like: Tensor,
        *,
        grid: Grid | None = None,
        per: Granularity = PerTensor(),
        ste: SteKind | None = None,
        prefer: str = "auto",
    ) -> Plan:
        """The plan for ``op`` on a tensor like this one (its shape, strides, dtype and device).

        ``auto`` takes the fastest backend that can; one asked for by name that cannot raises with its reason. grid and
        ste default to those of ``lowbit.functional``.
        """
        if not isinstance(like, Tensor):
            raise TypeError(f"like is {type(like).__name__}, but Plan.select needs a Tensor, for its shape and dtype")
        grid = Grid(8) if grid is None else grid
        ste = SteKind.CLIPPED_IDENTITY if ste is None else ste
        for name, value, kind in (("grid", grid, Grid), ("per", per, Granularity), ("ste", ste, SteKind)):
            if not isinstance(value, kind):
                raise TypeError(f"{name} is {value!r} ({type(value).__name__}), but it must be a {kind.__name__}")
        candidates = _ALL if prefer == "auto" else (_check_backend(prefer),)
        return _select(str(op), like.shape, like.stride(), like.dtype, like.device, grid, per, ste, candidates)

    @property
    def op(self) -> str:
        """The op's name."""
        return self.signature.op

    def can_implement(self, *args: Tensor | float | None) -> Verdict:
        """Whether ``run`` serves these arguments; if not, the reason in words."""
        spec = OPS[self.op]
        names = spec.tensors + spec.numbers
        needed = len(names) - ("zero_point" in names)
        if not needed <= len(args) <= len(names):
            return Verdict(False, f"{self.op} takes ({', '.join(names)}), but got {len(args)} argument(s)")
        for name, arg in zip(names, args, strict=False):
            if name in spec.tensors and (reason := self._refusal(name, arg)) is not None:
                return Verdict(False, reason)
            if name in spec.numbers and not isinstance(arg, int | float):
                return Verdict(False, f"{name} is {type(arg).__name__}, but it must be a number")
        return Verdict(True, "")

    def _refusal(self, name: str, arg: object) -> str | None:
        if name == "zero_point" and arg is None:
            return None
        if not isinstance(arg, Tensor):
            return f"{name} is {type(arg).__name__}, but it must be a Tensor"
        made_for = self.signature
        by_group = name in PARAMS and "per" in OPS[self.op].records
        shape = made_for.scale_shape if by_group else made_for.shape
        if tuple(arg.shape) != tuple(shape):
            return f"{name} has shape {tuple(arg.shape)}, but the plan was made for {tuple(shape)}"
        if arg.device != made_for.device:
            return f"{name} is on {arg.device}, but the plan was made for {made_for.device}"
        if name == _like_name(self.op):
            if arg.dtype != made_for.dtype:
                return f"{name} is {arg.dtype}, but the plan was made for {made_for.dtype}"
            if arg.stride() != made_for.stride:
                return f"{name} has strides {arg.stride()}, but the plan was made for {made_for.stride}"
        if name in ("grad_output", "scale") and not arg.is_floating_point():
            return f"{name} is {arg.dtype}, but it must be a float tensor"
        if name == "zero_point" and (arg.is_floating_point() or arg.dtype == torch.bool):
            return f"{name} is {arg.dtype}, but it must be an integer tensor"
        return None

    def run(self, *args: Any, **options: Any) -> Any:
        """The op's result, without a gradient; ``options`` are the op's own, such as the dtype of codes."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.kernel(*args, **options)
        return self.kernel(*args, **options)


def _like_name(op: str) -> str:
    """The tensor that the plan was made like."""
    tensors = OPS[op].tensors
    return "x" if "x" in tensors else tensors[0]


@lru_cache(maxsize=4096)
def _select(
    op: str,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    grid: Grid,
    per: Granularity,
    ste: SteKind,
    candidates: tuple[str, ...],
) -> Plan:
    spec = OPS.get(op)
    if spec is None:
        raise ValueError(f"op is {op!r}, but it must be one of {', '.join(OPS)}")
    signature = Signature(op, shape, stride, dtype, device, grid, per, ste)
    if "per" in spec.records:
        _ = signature.scale_shape  # raises where the granularity does not fit
        if "x" in spec.tensors and not dtype.is_floating_point:
            raise TypeError(f"like is {dtype}, but {op} takes a float tensor")
    name = _choose(signature, candidates)
    backend = _backend(name)
    wide = signature.math_dtype
    stable = not spec.sums and not (op == "fake_quantize_backward" and ste is SteKind.TANH)
    return Plan(
        signature=signature,
        backend=name,
        kernel=backend.kernel(signature),
        copies=backend is not reference and signature.memory.copies,
        workspace_size=backend.workspace_size(signature),
        precision_guarantee=PrecisionGuarantee(
            wide, (backend.ACCUMULATOR or wide) if spec.sums else None, deterministic=True, bit_stable=stable
        ),
    )


def _choose(signature: Signature, candidates: tuple[str, ...]) -> str:
    """The first of the candidates, fastest first, that can serve the signature."""
    reason = ""
    for name in candidates:
        if len(candidates) > 2 and _BACKENDS[name] not in (signature.device.type, "any"):
            continue
        reason = absence(name) or _backend(name).refusal(signature)
        if not reason:
            return name
        if absence(name) and len(candidates) > 1:
            _warn_once(f"lowbit runs its reference kernels, which are slower: {reason}")
    raise ValueError(f"backend {candidates[0]!r} cannot run {signature.op}: {reason}")


def _backend(name: str) -> ModuleType:
    if name == "triton":
        from lowbit.kernels import triton  # half a second, which only users of a GPU should spend

        return triton
    return {"native": native, "reference": reference}[name]


@lru_cache
def absence(name: str) -> str:
    """Why a backend cannot run here at all; "" where it can."""
    try:
        return _backend(name).absence()
    except ImportError as error:
        return f"{error}; install it: pip install triton"


def _check_backend(name: str) -> str:
    if name not in _BACKENDS:
        raise ValueError(f"prefer is {name!r}, but it must be one of auto, {', '.join(_BACKENDS)}")
    return name


@lru_cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def run(
    op: str,
    like: Tensor,
    *args: Any,
    grid: Grid = Grid(8),
    per: Granularity = PerTensor(),
    ste: SteKind = SteKind.CLIPPED_IDENTITY,
    differentiable: bool = False,
    **options: Any,
) -> Any:
    """Select and run in one call, as ``lowbit.functional`` does.

    The reference runs where its trace is wanted: under torch.compile or another tracer, for tensors that are not
    plain, and where the result must itself be differentiable (a second derivative; ``differentiable``: a call outside
    of any autograd Function). A compiler gets some kernels as an op of its own (``is_opaque``).
    """
    if torch.compiler.is_compiling():
        if not differentiable and is_opaque(op, like):
            return _run_opaque(op, like, args, grid, per, ste, options)
        return _run_reference(op, args, grid, per, ste, options)
    if is_traced(*args) or (torch.is_grad_enabled() and _requires_grad(args)):
        return _run_reference(op, args, grid, per, ste, options)
    plan = _select(op, like.shape, like.stride(), like.dtype, like.device, grid, per, ste, _candidates)
    return plan.run(*args, **options)


def follow(state: Sequence[Tensor], x: Tensor, per: Granularity, decay: float, grid: Grid) -> bool:
    """Take x's range into the state of an EMA, in that state's own memory; whether a backend does so in one call"""
    if is_traced(x, *state) or torch.float64 in (x.dtype, state[0].dtype):
        return False
    like = x.shape, x.stride(), x.dtype, x.device
    statistic = "abs_max" if len(state) == 2 else "min_max"
    plan = _select(statistic, *like, grid, per, SteKind.CLIPPED_IDENTITY, _candidates)
    if plan.backend != "triton" or not all(_is_writable(held) for held in state):
        return False
    _backend("triton").follow(plan.signature, x, state, decay)
    torch.autograd.graph.increment_version(state)
    return True


def update(state: Sequence[Tensor], op: str, like: Tensor, *args: Any, grid: Grid) -> None:
    """What ``run`` gives of an op whose results are the state of an EMA, in that state's own memory"""
    if not is_traced(*args) and all(_is_writable(held) for held in state):
        records = grid, PerTensor(), SteKind.CLIPPED_IDENTITY
        plan = _select(op, like.shape, like.stride(), like.dtype, like.device, *records, _candidates)
        if plan.backend != "reference":
            plan.run(*args, into=state)
            torch.autograd.graph.increment_version(state)
            return
    for held, new in zip(state, run(op, like, *args, grid=grid), strict=True):
        held.copy_(new)


def _is_writable(state: Tensor) -> bool:
    return state.is_contiguous() and not state.is_inference()


def runs(backend: str, tensor: Tensor) -> bool:
    """Whether this backend runs on a tensor, for what is no op of a plan."""
    fits = _candidates is not _ALL or _BACKENDS[backend] == tensor.device.type
    return fits and backend in _candidates and not absence(backend) and tensor.numel() > 0


def settle(op: str, like: Tensor, grid: Grid, per: Granularity, ste: SteKind) -> tuple[Plan, Plan]:
    """The plans of an op and of its backward, for a tensor like this one, where neither is traced."""
    return _settle(op, like.shape, like.stride(), like.dtype, like.device, grid, per, ste, _candidates)


@lru_cache(maxsize=4096)
def _settle(op: str, *like_and_records: Any) -> tuple[Plan, Plan]:
    backward = op.removesuffix("_per_batch") + "_backward"
    return _select(op, *like_and_records), _select(backward, *like_and_records)


def _run_reference(
    op: str, args: tuple[Any, ...], grid: Grid, per: Granularity, ste: SteKind, options: dict[str, Any]
) -> Any:
    records = {"grid": grid, "per": per, "ste": ste}
    return getattr(reference, op)(*args, **{name: records[name] for name in OPS[op].records}, **options)


def is_opaque(op: str, like: Tensor) -> bool:
    """Whether code that is being compiled should call the op's kernel instead of tracing the reference

    A compiler of CPU code would not fuse the reference into anything as fast. On a GPU it would, but for codes with the
    scales of their own rows: it reads a long row twice, and keeps x for the backward instead of its codes.
    """
    if not torch.compiler.is_compiling() or is_exporting() or not is_plain(like):
        return False
    backend = {"cpu": "native", "cuda": "triton"}.get(like.device.type, "")
    served = op == "quantize_per_batch" if backend == "triton" else op in native.SERVED and "x" in OPS[op].tensors
    return served and can_be_opaque(backend)


@at_trace_time
def can_be_opaque(backend: str) -> bool:
    """Its kernels are there and wanted, and no function transform, to which the op would have no rule."""
    return backend in _candidates and not absence(backend) and not torch._C._are_functorch_transforms_active()  # noqa: SLF001


def _run_opaque(
    op: str, like: Tensor, args: tuple[Any, ...], grid: Grid, per: Granularity, ste: SteKind, options: dict[str, Any]
) -> Any:
    results = torch.ops.lowbit.kernel(
        op,
        list(args),
        *encode(grid, per, ste),
        options.get("dtype"),
        options.get("method"),
        options.get("symmetric"),
    )
    if options.get("symmetric"):
        return *results, None  # no zero point
    return results[0] if len(results) == 1 else tuple(results)


def _kernel(
    op: str,
    args: Sequence[Tensor | None],
    numbers: Sequence[int],
    per: str,
    ste: str,
    dtype: torch.dtype | None,
    method: str | None,
    symmetric: bool | None,
) -> list[Tensor]:
    like = args[OPS[op].tensors.index("x")]
    assert like is not None
    records, options = decode(tuple(numbers), per, ste), _options(dtype=dtype, method=method, symmetric=symmetric)
    plan = _select(op, like.shape, like.stride(), like.dtype, like.device, *records, _ALL)
    results = plan.run(*args, **options)
    results = results if isinstance(results, tuple) else (results,)
    # An op of torch's gives no argument back as its result.
    found = [result for result in results if result is not None]
    return [result.clone() if any(result is arg for arg in args) else result for result in found]


def _fake_kernel(op: str, args: Sequence[Tensor | None], *encoded: Any) -> list[Tensor]:
    numbers, per, ste, dtype, method, symmetric = encoded
    like = args[OPS[op].tensors.index("x")]
    assert like is not None
    fixed = tuple(int(number) for number in numbers)  # tracers like to make a second value a symbol
    options = _options(dtype=dtype, method=method, symmetric=symmetric)
    results = _run_reference(op, tuple(args), *decode(fixed, per, ste), options)
    results = [result for result in (results if isinstance(results, tuple) else (results,)) if result is not None]
    groups = [torch.empty(result.shape, dtype=result.dtype, device=like.device) for result in results]
    # As kernels make them: what is elementwise, which comes first, in the strides of the input.
    if op in ("abs_max", "min_max", "gradient_bits"):
        return groups
    return [torch.empty_like(like, dtype=results[0].dtype), *groups[1:]]


opaque("kernel", _kernel, _fake_kernel)


def encode(grid: Grid, per: Granularity, ste: SteKind) -> tuple[list[int], str, str]:
    """The three in what an op of torch's may take"""
    return [*encode_grid(grid), *per.numbers], type(per).__name__, ste.value


@lru_cache(maxsize=4096)
def decode(numbers: tuple[int, ...], per: str, ste: str) -> tuple[Grid, Granularity, SteKind]:
    """The reverse of ``encode``"""
    return decode_grid(numbers[:3]), getattr(granularity, per)(*numbers[3:]), SteKind(ste)


def encode_grid(grid: Grid) -> list[int]:
    """Three numbers"""
    return [grid.bits, int(grid.signed), int(grid.narrow)]


def decode_grid(numbers: Sequence[int]) -> Grid:
    """The reverse of ``encode_grid``"""
    bits, signed, narrow = numbers
    return Grid(bits, bool(signed), bool(narrow))


def _options(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _requires_grad(args: tuple[Any, ...]) -> bool:
    return any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)


def is_traced(*args: Any) -> bool:
    """Whether someone watches the ops themselves, or a tensor among the arguments is not what its memory says."""
    if is_tracing():
        return True
    for arg in args:  # noqa: SIM110 (a generator would take longer than all of this)
        if isinstance(arg, Tensor) and is_odd(arg):
            return True
    return False


def is_tracing() -> bool:
    """Whether someone watches the ops themselves."""
    return (
        torch.compiler.is_compiling()
        # torch has no public names for these
        or torch._C._are_functorch_transforms_active()  # noqa: SLF001
        or torch._C._len_torch_dispatch_stack() > 0  # noqa: SLF001
        or torch._C._get_tracing_state() is not None  # noqa: SLF001
        or forward_ad._current_level >= 0  # noqa: SLF001
    )


def is_odd(tensor: Tensor) -> bool:
    """Whether a tensor is not what its memory says."""
    return (
        not is_plain(tensor)
        or torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # noqa: SLF001
        or torch._C._functorch.is_legacy_batchedtensor(tensor)  # noqa: SLF001
        or tensor.is_neg()
    )


def is_plain(x: object) -> bool:
    """Whether x is a tensor, and no subclass, which may have no rule for ops of ours."""
    return type(x) in (Tensor, torch.nn.Parameter)
