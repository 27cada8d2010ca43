"""ScaleState: the scale and zero point of every scale group, as tensors that follow the data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lowbit.division import divide
from lowbit.functional.check import (
    check_float,
    check_scale_number,
    check_scale_values,
    check_zero_point_number,
    check_zero_point_values,
    values_are_readable,
)
from lowbit.functional.learned import floor_scale
from lowbit.functional.statistics import (
    abs_max,
    follow,
    least_error_params,
    mean_abs,
    mean_std,
    min_max,
    params_from_data,
)
from lowbit.granularity import Granularity, PerTensor
from lowbit.grid import Grid
from lowbit.kernels.plan import is_traced
from lowbit.observers import keep_full_precision, restore_dtypes
from lowbit.ranks import Ranks
from lowbit.scale import (
    EMA,
    Learned,
    NotCalibratedError,
    PerBatch,
    ScaleMode,
    affine_params,
    lsq_plus_scale,
    lsq_scale,
    nearest_zero_point,
)

# A learned scale acts as if it never sank below this share of its first value.
_LEARNED_FLOOR = 1e-3
# PACT's first clip point.
_PACT_CLIP = 10.0


class ScaleState(nn.Module):
    """s, z = the state, as ``scale_mode`` says; every state tensor has the shape that ``per`` asks for, or ()

    - Fixed:    scale, zero_point
    - EMA:      scale, zero_point, initialized; affine: low and high too, from which the first two follow
    - Learned:  scale (a Parameter), zero_point (a Parameter for an affine ``lsq+``), initial_scale, initialized
    - PerBatch: none; scale and zero_point are None

    A tensor of shape () serves every scale group until data or a checkpoint says how many there are.
    """

    scale: Any  # a Tensor; a Parameter where learned, None for PerBatch
    zero_point: Any
    initialized: Tensor
    low: Tensor
    high: Tensor
    initial_scale: Tensor

    def __init__(
        self,
        grid: Grid,
        per: Granularity,
        symmetric: bool,
        scale_mode: ScaleMode,
        scale: Tensor | float | None,
        zero_point: Tensor | int,
    ) -> None:
        super().__init__()
        self.grid, self.per, self.symmetric, self.scale_mode = grid, per, symmetric, scale_mode
        self._check_scale_mode()
        self._build_state()
        pact = isinstance(scale_mode, Learned) and scale_mode.method == "pact"
        # What ``initialized`` says, where it cannot be read: on a GPU, and under torch.compile.
        self._started = False
        default = scale is None or (isinstance(scale, int | float) and scale == 1)
        if isinstance(scale_mode, PerBatch):
            if not default or isinstance(zero_point, Tensor) or zero_point != 0:
                raise ValueError(f"{scale_mode} takes scale and zero_point from each batch; leave them out")
        elif (isinstance(scale_mode, EMA) and default) or (
            isinstance(scale_mode, Learned) and scale is None and not pact
        ):
            if isinstance(zero_point, Tensor) or zero_point != 0:
                raise ValueError(
                    f"zero_point is {zero_point}, but there is no scale; give both, or leave both to the data"
                )
        else:
            first = _PACT_CLIP / grid.quant_max if pact else 1.0
            self.update_params(first if scale is None else scale, zero_point)

    @torch.no_grad()
    def update_params(self, scale: Tensor | float, zero_point: Tensor | int = 0) -> None:
        """Set scale and zero point; numbers serve every scale group."""
        if isinstance(self.scale_mode, PerBatch):
            raise ValueError("PerBatch() takes its scale from each batch; use Fixed() or EMA() to set one")
        new_scale, new_zero_point = self._checked_params(scale, zero_point)
        self._resize(tuple(new_scale.shape))
        for name, value in self._derived_state(new_scale, new_zero_point).items():
            getattr(self, name).copy_(value)
        self._started = True

    @torch.no_grad()
    def start(self, x: Tensor) -> None:
        """Take scale and zero point from x, as if it were the first data; PerBatch has nothing to start."""
        mode = self.scale_mode
        if isinstance(mode, PerBatch):
            return
        self._resize(self.per.scale_shape(x.shape))
        if not isinstance(mode, EMA | Learned):
            scale, zero_point = params_from_data(x, grid=self.grid, per=self.per, symmetric=self.symmetric)
            self.update_params(scale, 0 if zero_point is None else zero_point)
            return
        self.initialized.zero_()
        self._started = False
        if not (isinstance(mode, Learned) and mode.method == "pact"):
            self._follow(x)

    @torch.no_grad()
    def params(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The scale and zero point (None for 0) that quantize x as things are; nothing is taken in."""
        self._check_ready()
        scale, zero_point = self._params(x)
        return scale, None if zero_point is None else nearest_zero_point(zero_point, self.grid)

    @torch.no_grad()
    def kept_params(self) -> tuple[Tensor, Tensor | None]:
        """The scale and zero point (None for 0) of the state as it is; PerBatch keeps none"""
        self._check_ready()
        scale, zero_point = self._state_params()
        return scale.detach(), None if self.symmetric else nearest_zero_point(zero_point, self.grid)

    @property
    def is_ready(self) -> bool:
        """Whether the state holds a scale; PerBatch and Fixed always do."""
        return self._is_ready()

    def float_range(self) -> tuple[Tensor, Tensor]:
        """lo, hi = (quant_min - z) * s, (quant_max - z) * s"""
        if isinstance(self.scale_mode, PerBatch):
            raise ValueError("PerBatch() takes its range from each batch; there is no float_range without data")
        self._check_ready()
        with torch.no_grad():
            scale, zero_point = self._state_params()
            zero_point = nearest_zero_point(zero_point, self.grid)
            return (self.grid.quant_min - zero_point) * scale, (self.grid.quant_max - zero_point) * scale

    def _build_state(self) -> None:
        mode, affine = self.scale_mode, not self.symmetric
        if isinstance(mode, PerBatch):
            self.register_buffer("scale", None)
            self.register_buffer("zero_point", None)
            return
        learned_zero_point = isinstance(mode, Learned) and mode.method == "lsq+" and affine
        if isinstance(mode, Learned):
            self.scale = nn.Parameter(torch.ones(()))
            self.register_buffer("initial_scale", torch.ones(()))
        else:
            self.register_buffer("scale", torch.ones(()))
        if learned_zero_point:
            self.zero_point = nn.Parameter(torch.zeros(()))
        else:
            self.register_buffer("zero_point", torch.zeros((), dtype=torch.int32))
        if isinstance(mode, EMA | Learned):
            self.register_buffer("initialized", torch.zeros((), dtype=torch.bool))
        if isinstance(mode, EMA) and affine:
            self.register_buffer("low", torch.zeros(()))
            self.register_buffer("high", torch.zeros(()))

    def _group_state(self) -> dict[str, Tensor]:
        """The state tensors, all of the scale's shape."""
        return {**dict(self.named_parameters(recurse=False)), **dict(self.named_buffers(recurse=False))}

    def _derived_state(self, scale: Tensor, zero_point: Tensor) -> dict[str, Any]:
        """Every state tensor, as it follows from a scale and zero point that were set from outside."""
        state = {"scale": scale, "zero_point": zero_point, "initial_scale": scale, "initialized": torch.tensor(True)}
        state["low"] = (self.grid.quant_min - zero_point) * scale
        state["high"] = (self.grid.quant_max - zero_point) * scale
        return {name: state[name] for name in self._group_state()}

    @property
    def _has_shape(self) -> bool:
        return isinstance(self.per, PerTensor) or (self.scale is not None and self.scale.dim() > 0)

    def _resize(self, shape: tuple[int, ...]) -> None:
        for name, tensor in self._group_state().items():
            if tuple(tensor.shape) == shape:
                continue
            with torch.inference_mode(False):  # state must outlive the mode it was made in
                grown = tensor.detach().expand(shape).clone()
            if isinstance(tensor, nn.Parameter):
                _refuse_where_shapes_are_settled()
                tensor.data = grown  # the optimizer may hold it already
            else:
                setattr(self, name, grown)

    def _take_shape(self, x: Tensor) -> None:
        if not self._has_shape and isinstance(self.scale_mode, EMA | Learned):
            self._resize(self.per.scale_shape(x.shape))

    @torch.no_grad()
    def _follow(self, x: Tensor, ranks: Ranks | None = None) -> None:
        """Take x into the state: an EMA on every call, a learned scale at its start.

        With ``ranks``, x is this rank's part of a batch, and every rank's state follows the whole batch.
        """
        if isinstance(self.scale_mode, EMA):
            self._blend(x, self.scale_mode.decay, ranks)
        elif isinstance(self.scale_mode, Learned) and not self._has_started(ranks):
            self._start(x, self.scale_mode, ranks)
        if not self._started and (x.numel() > 0 or ranks is not None):
            self._started = True

    def _has_started(self, ranks: Ranks | None) -> bool:
        if ranks is not None and not self._started and not is_traced(self.initialized):
            # The state may have come from another rank. All must agree, or some would wait for others for ever: so
            # this reads the value, even from a GPU, until there is a scale.
            self._started = bool(self.initialized.any())
        return self._is_ready()

    def _blend(self, x: Tensor, decay: float, ranks: Ranks | None) -> None:
        """state = decay * state + (1 - decay) * batch, for groups with data; a group's first data is copied in"""
        names = ("scale", "initialized") if self.symmetric else ("low", "high", "scale", "zero_point", "initialized")
        follow([getattr(self, name) for name in names], x, self.per, decay, self.grid, ranks)

    def _start(self, x: Tensor, mode: Learned, ranks: Ranks | None) -> None:
        """The first value of a learned scale; a group without data starts at the mean of the others"""
        has_data = abs_max(x, self.per, ranks) > 0
        zero_point, is_plus = self.zero_point, mode.method == "lsq+"
        if is_plus and (not self.symmetric or mode.batch_axis is not None):
            scale, found = least_error_params(x, grid=self.grid, per=self.per, symmetric=self.symmetric, ranks=ranks)
            zero_point = zero_point if found is None else found
        elif not self.symmetric:
            scale, zero_point = affine_params(*min_max(x, self.per, ranks, with_zero=True), self.grid)
        elif is_plus:
            scale = lsq_plus_scale(*mean_std(x, self.per, ranks), self.grid)
        else:
            scale = lsq_scale(mean_abs(x, self.per, ranks), self.grid)
        live = has_data.sum().clamp_min(1)
        scale = torch.where(has_data, scale, divide((scale * has_data).sum(), live))
        self.initialized.copy_(has_data.any())
        self.scale.copy_(torch.where(self.initialized, scale, self.scale))
        self.zero_point.copy_(torch.where(self.initialized, zero_point, self.zero_point))
        self.initial_scale.copy_(self.scale)

    def _params(self, x: Tensor, ranks: Ranks | None = None) -> tuple[Tensor, Tensor | None]:
        """The scale and zero point (None for 0) that quantize x."""
        if isinstance(self.scale_mode, PerBatch):
            statistic = self.scale_mode.statistic
            return params_from_data(
                x, grid=self.grid, per=self.per, symmetric=self.symmetric, statistic=statistic, ranks=ranks
            )
        shape = self.per.scale_shape(x.shape)
        scale, zero_point = self._state_params()
        return scale.expand(shape), None if self.symmetric else zero_point.expand(shape)

    def _state_params(self) -> tuple[Tensor, Tensor]:
        if isinstance(self.scale_mode, Learned):
            return floor_scale(self.scale, _LEARNED_FLOOR * self.initial_scale), self.zero_point
        if isinstance(self.scale_mode, EMA):
            # A copy: the next batch changes the state, and the backward of this one needs this scale.
            return self.scale.clone(), self.zero_point if self.symmetric else self.zero_point.clone()
        return self.scale, self.zero_point

    def _is_ready(self) -> bool:
        """Whether the state holds a scale."""
        if not isinstance(self.scale_mode, EMA | Learned):
            return True
        return bool(self.initialized.any()) if values_are_readable(self.initialized) else self._started

    def _check_ready(self) -> None:
        if not self._is_ready():
            raise NotCalibratedError(
                f"this quantizer ({self.scale_mode}) has seen no data; run a batch in training mode while observing, "
                "or call update_params"
            )

    def _check_input(self, x: Tensor) -> None:
        check_float("x", x)
        if self.scale is not None and self.scale.device != x.device:
            raise ValueError(f"x is on {x.device}, but this quantizer is on {self.scale.device}; move one to the other")
        shape = self.per.scale_shape(x.shape)
        if self.scale is not None and self._has_shape and tuple(self.scale.shape) != shape:
            raise ValueError(
                f"{self.per} of a {tuple(x.shape)} tensor needs scales of shape {shape}, but this quantizer holds "
                f"{tuple(self.scale.shape)}; build a new one for data of another shape"
            )

    def _check_scale_mode(self) -> None:
        mode = self.scale_mode
        if not isinstance(mode, ScaleMode):
            raise TypeError(f"scale_mode is {mode!r}, but it must be PerBatch(), EMA(), Fixed() or Learned()")
        if self.per.shape_follows_batch and not isinstance(mode, PerBatch):
            raise ValueError(
                f"{self.per} has as many scales as the batch has rows, so scale_mode must be PerBatch(), not {mode}"
            )
        if isinstance(mode, PerBatch) and mode.statistic == "mean_abs" and not self.symmetric:
            raise ValueError(
                "statistic='mean_abs' gives no range for an affine quantizer; use symmetric=True or 'abs_max'"
            )
        if isinstance(mode, Learned) and mode.method == "pact" and (self.grid.signed or not self.symmetric):
            raise ValueError("method='pact' clips to [0, a]; use symmetric=True with signed=False")

    def _checked_params(self, scale: Tensor | float, zero_point: Tensor | int) -> tuple[Tensor, Tensor]:
        """Both as tensors of one shape, which the state can take; the scale positive and finite, z inside the grid."""
        dtype, device = self.scale.dtype, self.scale.device
        # Values are checked where they are, before they move: on a GPU they are not read.
        if isinstance(scale, Tensor):
            check_scale_values(scale, dtype)
        else:
            check_scale_number(scale, dtype)
        if isinstance(zero_point, Tensor):
            zero_point = check_zero_point_values(zero_point, self.grid)
        else:
            check_zero_point_number(zero_point, self.grid)
        if self.symmetric and _is_known_nonzero(zero_point):
            raise ValueError(
                f"zero_point is {zero_point}, but a symmetric quantizer has zero point 0; use symmetric=False"
            )
        new_scale = torch.as_tensor(scale, dtype=dtype, device=device)
        new_zero_point = torch.as_tensor(zero_point, dtype=torch.int32, device=device)
        shape = tuple(new_scale.shape)
        if not shape and self._has_shape:
            shape = tuple(self.scale.shape)
        if (self._has_shape and shape != tuple(self.scale.shape)) or (shape and not self.per.fits_scale(shape)):
            held = tuple(self.scale.shape) if self._has_shape else "no such scale"
            raise ValueError(f"scale has shape {shape}, but this quantizer ({self.per}) holds {held}")
        if tuple(new_zero_point.shape) not in ((), shape):
            raise ValueError(
                f"zero_point has shape {tuple(new_zero_point.shape)}, but scale has {shape}; give both the same"
            )
        return new_scale.expand(shape), new_zero_point.expand(shape)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        saved = {name: state_dict[prefix + name] for name in self._group_state() if prefix + name in state_dict}
        problem = self._state_problem(saved) or self._other_quantizer(state_dict.get(f"{prefix}_extra_state"))
        if problem is not None:
            error_msgs.append(f"{prefix}{problem}")
            return
        if "scale" in saved:
            self._resize(tuple(saved["scale"].shape))
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        dtypes = {name: torch.float32 if tensor.is_floating_point() else torch.int32 for name, tensor in saved.items()}
        restore_dtypes(self, dtypes | {"initialized": torch.bool} if "initialized" in saved else dtypes)
        if "initialized" in saved:
            self._started = bool(saved["initialized"].any())

    def _identity(self) -> list[int]:
        """What a checkpoint's state is the state of, in numbers."""
        grid, modes, granularities = self.grid, list(ScaleMode.members), list(Granularity.members)
        kinds = modes.index(self.scale_mode.kind), granularities.index(self.per.kind)
        return [grid.bits, int(grid.signed), int(grid.narrow), int(self.symmetric), *kinds, *self.per.numbers]

    def _other_quantizer(self, extra_state: Tensor | None) -> str | None:
        """How the quantizer of a checkpoint differs from this one, in words, or None."""
        if extra_state is None or extra_state.numel() <= 2:
            return None
        bits, signed, narrow, symmetric, mode, per, *numbers = extra_state.tolist()[2:]
        if [bits, signed, narrow, symmetric, mode, per, *numbers] == self._identity():
            return None
        there = Grid(bits, bool(signed), bool(narrow))
        granularity: Any = list(Granularity.members.values())[per]
        scheme = {True: "symmetric", False: "affine"}
        return (
            f"scale: the checkpoint's quantizer is {there}, {scheme[bool(symmetric)]}, {granularity(*numbers)}, "
            f"{list(ScaleMode.members)[mode]}, but this one is {self.grid}, {scheme[self.symmetric]}, {self.per}, "
            f"{self.scale_mode.kind}; prepare the model with the checkpoint's recipe"
        )

    def _state_problem(self, saved: dict[str, Tensor]) -> str | None:
        """Why this state cannot be loaded, in words, or None."""
        held = self._group_state()
        shapes = {tuple(tensor.shape) for tensor in saved.values()}
        if len(shapes) > 1:
            return f"scale: the checkpoint's tensors have different shapes, {sorted(shapes)}; it is damaged"
        if (shape := next(iter(shapes), ())) and not self.per.fits_scale(shape):
            return f"scale: the checkpoint holds shape {shape}, which {self.per} cannot have"
        for name, tensor in saved.items():
            if self._has_shape and tensor.shape != held[name].shape:
                return (
                    f"{name}: the checkpoint holds shape {tuple(tensor.shape)}, but this quantizer ({self.per}) "
                    f"holds {tuple(held[name].shape)}; build it for the shape of the checkpoint"
                )
            if tensor.is_floating_point() != held[name].is_floating_point():
                return f"{name}: the checkpoint holds {tensor.dtype}, but {self.scale_mode} holds {held[name].dtype}"
        try:
            for name in ("scale", "initial_scale"):
                # A learned scale may sink below 0; its floor, a share of the initial scale, holds it up.
                if name in saved and not (name == "scale" and isinstance(self.scale_mode, Learned)):
                    check_scale_values(saved[name], torch.float32)
            if "zero_point" in saved and not saved["zero_point"].is_floating_point():
                check_zero_point_values(saved["zero_point"], self.grid)
        except ValueError as error:
            return str(error)
        if self.symmetric and "zero_point" in saved and _is_known_nonzero(saved["zero_point"]):
            return (
                "zero_point: the checkpoint's is not 0, but this quantizer is symmetric; build it with symmetric=False"
            )
        for name in ("low", "high"):
            if name in saved and values_are_readable(saved[name]) and not saved[name].isfinite().all():
                return f"{name}: the checkpoint holds a value that is not finite; it is damaged"
        return None

    def _apply(self, fn: Any, recurse: bool = True) -> ScaleState:
        return super()._apply(keep_full_precision(fn), recurse)


def _is_known_nonzero(zero_point: Tensor | int) -> bool:
    if isinstance(zero_point, Tensor):
        return values_are_readable(zero_point) and bool(zero_point.any())
    return zero_point != 0


def _refuse_where_shapes_are_settled() -> None:
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "a learned scale cannot start inside torch.compile; run one batch before, or give it a scale"
        )
    if nn.parallel.DistributedDataParallel._active_ddp_module is not None:  # noqa: SLF001 (torch has no public name)
        raise RuntimeError(
            "a learned scale cannot take its shape inside DistributedDataParallel, which has laid out its gradient; "
            "run one batch before wrapping the model, or give it a scale"
        )
