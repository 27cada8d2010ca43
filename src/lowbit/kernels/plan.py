"""Plan: which backend runs an op, what that costs and what it guarantees."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit.granularity import Granularity, PerTensor
from lowbit.grid import Grid
from lowbit.kernels import reference
from lowbit.kernels.precision import PrecisionGuarantee, math_dtype
from lowbit.ste import SteKind


class Verdict(NamedTuple):
    """Whether a plan can run a call, and if not, why, in words."""

    ok: bool
    reason: str


class _Op(NamedTuple):
    """What an op takes: its tensors in order (a zero point may be left out), its numbers, its records."""

    tensors: tuple[str, ...]
    numbers: tuple[str, ...]
    records: tuple[str, ...]
    # How many tensors of the math dtype, each as large as the input, the reference holds at its peak.
    temporaries: int
    sums: bool = False


_X, _PARAMS = ("x",), ("scale", "zero_point")
_FULL, _GRAD = ("grid", "per", "ste"), ("grad_output", "x")

_OPS: dict[str, _Op] = {
    "round": _Op(_X, (), (), 0),
    "ceil": _Op(_X, (), (), 0),
    "floor": _Op(_X, (), (), 0),
    "clamp": _Op(_X, ("min_value", "max_value"), (), 2),
    "clamp_backward": _Op(_GRAD, ("min_value", "max_value"), (), 2),
    "step_quantize": _Op(_X, ("step",), (), 2),
    "k_bit_quantize": _Op(_X, ("k",), (), 2),
    "fake_quantize": _Op(_X + _PARAMS, (), ("grid", "per"), 2),
    "fake_quantize_backward": _Op(_GRAD + _PARAMS, (), _FULL, 5),
    "learned_fake_quantize": _Op(_X + _PARAMS, (), ("grid", "per"), 2),
    "learned_fake_quantize_backward": _Op(_GRAD + _PARAMS, (), _FULL, 8, sums=True),
    "quantize": _Op(_X + _PARAMS, (), ("grid", "per"), 2),
    "quantize_backward": _Op(_GRAD + _PARAMS, (), ("grid", "per"), 4),
    "dequantize": _Op(("q", *_PARAMS), (), ("per",), 2),
    "dequantize_backward": _Op(("grad_output", "scale"), (), ("per",), 1),
    "abs_max": _Op(_X, (), ("per",), 3),
    "min_max": _Op(_X, (), ("per",), 3),
    "mean_abs": _Op(_X, (), ("per",), 5, sums=True),
    "mean_std": _Op(_X, (), ("per",), 10, sums=True),
}


class _Backend(NamedTuple):
    name: str
    kernels: ModuleType | None
    absent: str  # why ``kernels`` is None


# Fastest first. A backend joins by its kernels, which carry the reference's names and signatures.
_BACKENDS = (
    _Backend("triton", None, "this version of lowbit has no Triton kernels"),
    _Backend("native", None, "this version of lowbit has no native kernels"),
    _Backend("reference", reference, ""),
)


@dataclass(frozen=True)
class Plan:
    """select -> can_implement -> run: the dispatcher that every functional op goes through.

    >>> x = torch.randn(4, 8)
    >>> plan = Plan.select("fake_quantize", x)
    >>> plan.backend, plan.run(x, torch.tensor(0.1)).shape
    ('reference', torch.Size([4, 8]))
    """

    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    grid: Grid
    per: Granularity
    ste: SteKind
    backend: str
    kernel: Callable[..., Any]
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
        """The plan for ``op`` on a tensor like this one (its shape, dtype and device).

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
        return _select(str(op), tuple(like.shape), like.dtype, like.device, grid, per, ste, str(prefer))

    def can_implement(self, *args: Tensor | float | None) -> Verdict:
        """Whether ``run`` serves these arguments; if not, the reason in words."""
        spec = _OPS[self.op]
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
        shape = self.per.scale_shape(self.shape) if name in _PARAMS else self.shape
        if tuple(arg.shape) != shape:
            return f"{name} has shape {tuple(arg.shape)}, but the plan was made for {shape}"
        if arg.device != self.device:
            return f"{name} is on {arg.device}, but the plan was made for {self.device}"
        if name in ("x", "q") and arg.dtype != self.dtype:
            return f"{name} is {arg.dtype}, but the plan was made for {self.dtype}"
        if name in ("grad_output", "scale") and not arg.is_floating_point():
            return f"{name} is {arg.dtype}, but it must be a float tensor"
        if name == "zero_point" and (arg.is_floating_point() or arg.dtype == torch.bool):
            return f"{name} is {arg.dtype}, but it must be an integer tensor"
        return None

    @torch.no_grad()
    def run(self, *args: Any, **options: Any) -> Any:
        """The op's result, without a gradient; ``options`` are the op's own, such as the dtype of codes."""
        return self.kernel(*args, **self._records(), **options)

    def _records(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _OPS[self.op].records}


@lru_cache(maxsize=4096)
def _select(
    op: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    grid: Grid,
    per: Granularity,
    ste: SteKind,
    prefer: str,
) -> Plan:
    spec = _OPS.get(op)
    if spec is None:
        raise ValueError(f"op is {op!r}, but it must be one of {', '.join(_OPS)}")
    groups = 0
    if "per" in spec.records:
        groups = math.prod(per.scale_shape(shape))  # raises where the granularity does not fit
        if "x" in spec.tensors and not dtype.is_floating_point:
            raise TypeError(f"like is {dtype}, but {op} takes a float tensor")
    backend = _choose(op, prefer)
    wide = math_dtype(dtype)
    stable = not spec.sums and not (op == "fake_quantize_backward" and ste is SteKind.TANH)
    return Plan(
        op=op,
        shape=shape,
        dtype=dtype,
        device=device,
        grid=grid,
        per=per,
        ste=ste,
        backend=backend.name,
        kernel=getattr(backend.kernels, op),
        workspace_size=(spec.temporaries * math.prod(shape) + 8 * groups) * wide.itemsize,
        precision_guarantee=PrecisionGuarantee(wide, wide if spec.sums else None, True, stable),
    )


def _choose(op: str, prefer: str) -> _Backend:
    """The fastest backend that can run the op, or the one asked for by name."""
    names = [backend.name for backend in _BACKENDS]
    if prefer not in ("auto", *names):
        raise ValueError(f"prefer is {prefer!r}, but it must be one of auto, {', '.join(names)}")
    for backend in _BACKENDS:
        if prefer in ("auto", backend.name) and backend.kernels is not None:
            return backend
    absent = _BACKENDS[names.index(prefer)].absent
    raise ValueError(f"backend {prefer!r} cannot run {op}: {absent}")


def run(
    op: str,
    like: Tensor,
    *args: Any,
    grid: Grid | None = None,
    per: Granularity = PerTensor(),
    ste: SteKind | None = None,
    **options: Any,
) -> Any:
    """Select and run in one call, as ``lowbit.functional`` does.

    The reference runs where its trace is wanted: under torch.compile, for tensors that are traced or otherwise not
    plain, and in grad mode, where the result must itself be differentiable (a second derivative).
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or type(like) not in (Tensor, torch.nn.Parameter):
        records = {"grid": grid, "per": per, "ste": ste}
        return getattr(reference, op)(*args, **{name: records[name] for name in _OPS[op].records}, **options)
    return Plan.select(op, like, grid=grid, per=per, ste=ste).run(*args, **options)
