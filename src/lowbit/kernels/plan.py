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
    """What an op takes: its tensors in order (those after ``needed`` may be left out), and which records shape it."""

    tensors: tuple[str, ...]
    needed: int
    records: tuple[str, ...]
    # How many tensors of the math dtype, each as large as the input, the reference holds at its peak.
    temporaries: int
    sums: bool = False


_OPS: dict[str, _Op] = {
    "round": _Op(("x",), 1, (), 0),
    "ceil": _Op(("x",), 1, (), 0),
    "floor": _Op(("x",), 1, (), 0),
    "clamp": _Op(("x",), 1, (), 2),
    "clamp_backward": _Op(("grad_output", "x"), 2, (), 2),
    "step_quantize": _Op(("x",), 1, (), 2),
    "k_bit_quantize": _Op(("x",), 1, (), 2),
    "fake_quantize": _Op(("x", "scale", "zero_point"), 2, ("grid", "per"), 2),
    "fake_quantize_backward": _Op(("grad_output", "x", "scale", "zero_point"), 3, ("grid", "per", "ste"), 4),
    "learned_fake_quantize": _Op(("x", "scale", "zero_point"), 2, ("grid", "per"), 2),
    "learned_fake_quantize_backward": _Op(
        ("grad_output", "x", "scale", "zero_point"), 3, ("grid", "per", "ste"), 8, sums=True
    ),
    "quantize": _Op(("x", "scale", "zero_point"), 2, ("grid", "per"), 2),
    "quantize_backward": _Op(("grad_output", "x", "scale", "zero_point"), 3, ("grid", "per"), 4),
    "dequantize": _Op(("q", "scale", "zero_point"), 2, ("per",), 2),
    "dequantize_backward": _Op(("grad_output", "scale"), 2, ("per",), 1),
    "abs_max": _Op(("x",), 1, ("per",), 3),
    "min_max": _Op(("x",), 1, ("per",), 3),
    "mean_abs": _Op(("x",), 1, ("per",), 4, sums=True),
    "mean_std": _Op(("x",), 1, ("per",), 8, sums=True),
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
            raise TypeError(
                f"like is {type(like).__name__}, but Plan.select needs a Tensor to read shape and dtype from"
            )
        return _select(
            op,
            tuple(like.shape),
            like.dtype,
            like.device,
            Grid(8) if grid is None else grid,
            per,
            SteKind.CLIPPED_IDENTITY if ste is None else ste,
            prefer,
        )

    def can_implement(self, *args: Tensor | None) -> Verdict:
        """Whether ``run`` serves these tensors; if not, the reason in words."""
        spec = _OPS[self.op]
        if not spec.needed <= len(args) <= len(spec.tensors):
            wanted = ", ".join(spec.tensors)
            return Verdict(False, f"{self.op} takes ({wanted}), but got {len(args)} tensor(s)")
        params = self.per.scale_shape(self.shape) if "scale" in spec.tensors else ()
        for name, arg in zip(spec.tensors, args, strict=False):
            if arg is None and spec.tensors.index(name) >= spec.needed:
                continue
            if not isinstance(arg, Tensor):
                return Verdict(False, f"{name} is {type(arg).__name__}, but it must be a Tensor")
            wanted_shape = params if name in ("scale", "zero_point") else self.shape
            if tuple(arg.shape) != wanted_shape:
                return Verdict(False, f"{name} has shape {tuple(arg.shape)}, but the plan was made for {wanted_shape}")
            if arg.device != self.device:
                return Verdict(False, f"{name} is on {arg.device}, but the plan was made for {self.device}")
            if name in ("x", "q") and arg.dtype != self.dtype:
                return Verdict(False, f"{name} is {arg.dtype}, but the plan was made for {self.dtype}")
            if name in ("grad_output", "scale") and not arg.is_floating_point():
                return Verdict(False, f"{name} is {arg.dtype}, but it must be a float tensor")
            if name == "zero_point" and (arg.is_floating_point() or arg.dtype == torch.bool):
                return Verdict(False, f"{name} is {arg.dtype}, but it must be an integer tensor")
        return Verdict(True, "")

    def run(self, *args: Any, **options: Any) -> Any:
        """The op's result; ``options`` are the op's own choices (dtype of codes, method of a learned scale)."""
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
    for name, value, kind in (("grid", grid, Grid), ("per", per, Granularity), ("ste", ste, SteKind)):
        if not isinstance(value, kind):
            raise TypeError(f"{name} is {value!r} ({type(value).__name__}), but it must be a {kind.__name__}")
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
    differentiable: bool = False,
    **options: Any,
) -> Any:
    """Select and run in one call, as ``lowbit.functional`` does.

    The reference runs where its trace is wanted: under torch.compile, and where the result must itself be
    ``differentiable`` (a second derivative).
    """
    prefer = "reference" if differentiable else "auto"
    if torch.compiler.is_compiling():
        records = {"grid": grid, "per": per, "ste": ste}
        return getattr(reference, op)(*args, **{name: records[name] for name in _OPS[op].records}, **options)
    return Plan.select(op, like, grid=grid, per=per, ste=ste, prefer=prefer).run(*args, **options)
