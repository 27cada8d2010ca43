"""FakeQuantize: grid + gradient + scale + state, as an nn.Module."""

from __future__ import annotations

from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.functional import fake_quantize, fake_quantize_backward, learned_fake_quantize
from lowbit.functional.check import check_grad, check_per, check_ste
from lowbit.functional.fake_quantize import fake_quantize_per_batch
from lowbit.functional.linear import Coded, code, code_per_batch
from lowbit.granularity import Granularity, PerChannel, PerGroup, PerTensor, PerToken
from lowbit.grid import Grid
from lowbit.observers import Observer
from lowbit.ranks import Ranks
from lowbit.record import check_flag
from lowbit.scale import EMA, Fixed, Learned, PerBatch, ScaleMode, nearest_zero_point
from lowbit.scale_state import ScaleState
from lowbit.ste import SteKind


class FakeQuantize(ScaleState):
    """y = (q - z) * s,  q = clamp(round(x / s) + z, quant_min, quant_max)

    dx = the rule named by ``ste``; s and z follow ``scale_mode``.

    - ``enabled``: off, the module is the identity. ``observing``: off, no statistics change, as in eval mode.
    - ``scale`` and ``zero_point`` are numbers, or tensors of the shape that ``per`` asks for. ``scale=None`` is 1 for
      Fixed; EMA and Learned then start from the first data. PerBatch has no state: its scale and zero point are None.
    - ``signed=None`` is signed if symmetric. A symmetric quantizer has zero point 0.
    - ``observer`` watches the inputs while observing; ``update_params_from_observer`` puts its verdict in place.
    - ``across_ranks``: in training mode, while observing, statistics are those of the whole batch, of which each rank
      of ``process_group`` (None: torch.distributed's default) holds a part. Off, or with scales for each row of a
      batch (PerBatch with PerToken, PerGroup or PerBlock), each rank keeps to its own data.

    >>> quantizer = FakeQuantize(bits=4, scale=0.5)
    >>> quantizer(torch.tensor([0.26, -9.0]))
    tensor([ 0.5000, -4.0000])
    """

    def __init__(
        self,
        bits: int = 8,
        symmetric: bool = True,
        scale: Tensor | float | None = None,
        zero_point: Tensor | int = 0,
        *,
        per: Granularity = PerTensor(),
        ste: SteKind = SteKind.CLIPPED_IDENTITY,
        scale_mode: ScaleMode = Fixed(),
        narrow: bool = False,
        signed: bool | None = None,
        observer: Observer | None = None,
    ) -> None:
        check_flag("symmetric", symmetric)
        check_per(per)
        check_ste(ste)
        grid = Grid(bits, symmetric if signed is None else signed, narrow)
        super().__init__(grid, per, symmetric, scale_mode, scale, zero_point)
        self._check_observer(observer)
        self.ste, self.observer = ste, observer
        self.enabled = self.observing = self.across_ranks = True
        self.process_group: dist.ProcessGroup | None = None

    @classmethod
    def with_defaults(cls, bits: int, symmetric: bool) -> Self:
        """A Fixed, per-tensor quantizer with scale 1 and zero point 0."""
        return cls(bits, symmetric)

    @property
    def bits(self) -> int:
        """The number of bits of a code."""
        return self.grid.bits

    def quant_range(self) -> tuple[int, int]:
        """quant_min, quant_max"""
        return self.grid.quant_min, self.grid.quant_max

    def forward(self, x: Tensor) -> Tensor:
        """Quantize x; in training mode, while observing, take its statistics in first."""
        ranks = self._take_in(x)
        return self._quantize(x, ranks) if self.enabled else x

    def code(self, x: Tensor) -> Coded:
        """What forward does, as codes; ``codes_refusal`` says of which quantizers there are none."""
        ranks, ste = self._take_in(x), self._effective_ste
        if self._takes_own_range(ranks) and ste is SteKind.IDENTITY and self.grid.fits_int8:
            return code_per_batch(x, grid=self.grid, per=self.per, symmetric=self.symmetric)
        scale, zero_point = self._params(x, ranks)
        if isinstance(self.scale_mode, Fixed):  # which the backward needs, whatever becomes of the state
            scale, zero_point = scale.clone(), None if zero_point is None else zero_point.clone()
        return code(x, scale, zero_point, grid=self.grid, per=self.per, ste=ste)

    def codes_refusal(self) -> str:
        """Why this quantizer gives no codes for a product of integers; "" where it does."""
        if not self.enabled:
            return "it is switched off"
        if type(self) is not FakeQuantize:
            return f"a {type(self).__name__} may have a forward of its own"
        if self._forward_hooks or self._forward_pre_hooks:
            return "it has hooks, which want its values"
        if self.bits > 8:
            return f"it has {self.bits} bits, and the product takes 8"
        if isinstance(self.scale_mode, Learned):
            return "its scale is learned, and takes a gradient from the values"
        if not (self._effective_ste is SteKind.IDENTITY or self._effective_ste.only_clips):
            return f"its gradient {self.ste.name} is computed from the values"
        return ""

    @property
    def settings(self) -> tuple[Any, ...]:
        """All that its choices below depend on: as long as this is equal, so are they."""
        hooked = bool(self._forward_hooks or self._forward_pre_hooks)
        kinds = self.grid, self.per, self.symmetric, self.scale_mode, self.ste, self.scale is None or self.scale.dtype
        return type(self), self.enabled, hooked, self._modules.get("observer"), self._ranks(), *kinds

    @property
    def is_repeatable(self) -> bool:
        """Whether what it gives depends on x alone, and its backward on nothing: then one result serves many passes."""
        hooked = self._forward_hooks or self._forward_pre_hooks or self.observer is not None
        if hooked or type(self) is not FakeQuantize:
            return False
        return self.enabled and self._takes_own_range(self._ranks()) and self._effective_ste is SteKind.IDENTITY

    @property
    def takes_own_rows(self) -> bool:
        """Whether each row of a matrix has the symmetric scale of its own range, and nothing else asks for the data."""
        return (self.per == PerToken() or self.per == PerChannel(0)) and self._takes_own_symmetric_range

    @property
    def takes_own_groups(self) -> bool:
        """The same for each group of a row."""
        return isinstance(self.per, PerGroup) and self._takes_own_symmetric_range

    @property
    def _takes_own_symmetric_range(self) -> bool:
        return self.symmetric and self.grid.fits_int8 and self.grid.signed and self.is_repeatable

    @property
    def keeps_scale(self) -> bool:
        """Whether its state is one scale for a whole tensor, in float32."""
        is_state = isinstance(self.scale_mode, EMA | Fixed) and self.per == PerTensor()
        return is_state and self.scale.dtype == torch.float32

    def follow(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Take x in; the scale and zero point (None for 0), in the state's own memory."""
        self._take_in(x)
        return self.scale, None if self.symmetric else self.zero_point

    def _take_in(self, x: Tensor) -> Ranks | None:
        """Check x and take its statistics in; the ranks that share them."""
        self._check_input(x)
        if self.training:
            self._take_shape(x)
        ranks = self._ranks()
        if self.training and self.observing:
            if not is_recomputing():
                if self.observer is not None:
                    self.observer.observe(x, ranks)
                if isinstance(self.scale_mode, EMA | Learned):
                    self._follow(x, ranks)
        elif self.enabled:
            self._check_ready()
        return ranks

    def backward(self, grad_output: Tensor, x: Tensor) -> Tensor:
        """dx = the rule named by ``ste`` at the current scale; a PerBatch scale is taken from x again."""
        self._check_input(x)
        check_grad(grad_output, x)
        if not self.enabled:
            return grad_output
        self._check_ready()
        with torch.no_grad():
            scale, zero_point = self._params(x, self._ranks())
            if zero_point is not None:
                zero_point = nearest_zero_point(zero_point, self.grid)
            return fake_quantize_backward(
                grad_output, x, scale, zero_point, grid=self.grid, per=self.per, ste=self._effective_ste
            )

    @torch.no_grad()
    def quantization_noise(self, x: Tensor) -> Tensor:
        """mean((forward(x) - x)^2), 0 for an empty tensor; changes no state, and asks no other rank"""
        self._check_input(x)
        if not self.enabled or x.numel() == 0:
            return torch.zeros((), device=x.device)
        self._check_ready()
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        return (self._quantize(x).to(wide) - x.to(wide)).square().mean()

    def update_params_from_observer(self) -> None:
        """Set scale and zero point to what the observer says of the data it saw."""
        if self.observer is None:
            raise ValueError("this FakeQuantize has no observer; build it with observer=lowbit.observers.MinMax()")
        self.update_params(*self.observer.quant_params(self.grid, self.symmetric))

    def extra_repr(self) -> str:
        ends = f"[{self.grid.quant_min}, {self.grid.quant_max}]"
        flags = "".join(f", {name}=False" for name in ("enabled", "observing") if not getattr(self, name))
        scheme = "symmetric" if self.symmetric else "affine"
        return f"{self.bits} bits {ends}, {scheme}, {self.per}, {self.ste.name}, {self.scale_mode}{flags}"

    def get_extra_state(self) -> Tensor:
        """The flags and what the state belongs to, as a tensor, so that a state_dict holds nothing else."""
        return torch.tensor([self.enabled, self.observing, *self._identity()], dtype=torch.int32)

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the flags."""
        self.enabled, self.observing = (bool(flag) for flag in state.tolist()[:2])

    def _ranks(self) -> Ranks | None:
        """The ranks whose data a statistic is taken of; None for this process's own."""
        if not (self.training and self.observing and self.across_ranks):
            return None
        by_row = isinstance(self.scale_mode, PerBatch) and (self.per.shape_follows_batch or self.per.splits)
        return None if by_row else Ranks.of(self.process_group)

    def _quantize(self, x: Tensor, ranks: Ranks | None = None) -> Tensor:
        mode, per, grid, ste = self.scale_mode, self.per, self.grid, self._effective_ste
        if self._takes_own_range(ranks):
            return fake_quantize_per_batch(x, grid=grid, per=per, ste=ste, symmetric=self.symmetric)
        scale, zero_point = self._params(x, ranks)
        if not isinstance(mode, Learned):
            return fake_quantize(x, scale, zero_point, grid=grid, per=per, ste=ste)
        return learned_fake_quantize(
            x,
            scale,
            zero_point,
            grid=grid,
            per=per,
            ste=ste,
            grad_scale=mode.grad_scale,
            method="pact" if mode.method == "pact" else "lsq",
            batch_axis=mode.batch_axis,
        )

    def _takes_own_range(self, ranks: Ranks | None) -> bool:
        """Whether the scale is that of x's own range, with no other rank's."""
        mode = self.scale_mode
        return isinstance(mode, PerBatch) and mode.statistic == "abs_max" and ranks is None

    @property
    def _effective_ste(self) -> SteKind:
        """A rule that only clips is the identity where the range holds the data: nothing need be saved."""
        mode = self.scale_mode
        own_range = (
            isinstance(mode, PerBatch) and mode.statistic == "abs_max" and (self.grid.signed or not self.symmetric)
        )
        return SteKind.IDENTITY if own_range and self.ste.only_clips else self.ste

    def _check_observer(self, observer: Observer | None) -> None:
        if observer is None:
            return
        if not isinstance(observer, Observer):
            raise TypeError(f"observer is {observer!r}, but it must be one of lowbit.observers, such as MinMax()")
        if observer.per != self.per:
            raise ValueError(
                f"observer watches {observer.per}, but this FakeQuantize is {self.per}; give both the same"
            )


def is_recomputing() -> bool:
    """Inside a backward pass, activation checkpointing runs the forward of a batch already taken in."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1  # noqa: SLF001
