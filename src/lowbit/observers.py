"""Observers: what a tensor's values look like over time, and the scale that fits them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.functional import fake_quantize, quantize, quantize_backward
from lowbit.functional.check import check_float, check_grid, check_per
from lowbit.functional.statistics import count_finite, min_max
from lowbit.granularity import Granularity, PerChannel, PerTensor
from lowbit.grid import Grid
from lowbit.ranks import Ranks
from lowbit.record import check_choice, check_finite, check_flag, check_integer
from lowbit.scale import EMA, NotCalibratedError, affine_params, symmetric_scale


class Observer(nn.Module, ABC):
    """observe(x) any number of times, then quant_params(grid, symmetric) -> scale, zero_point

    Statistics are kept per scale group and skip non-finite values, which ``nonfinite`` counts. They take their shape
    from the first data; data of another shape is an error. All of it is state: saved, loaded, moved and copied.
    """

    nonfinite: Tensor
    count: Tensor
    low: Tensor
    high: Tensor

    # Buffers with one entry per scale group: name, dtype, value before any data.
    group_state: tuple[tuple[str, torch.dtype, float], ...] = (
        ("count", torch.int64, 0),
        ("low", torch.float32, 0),
        ("high", torch.float32, 0),
    )

    def __init__(self, per: Granularity = PerTensor()) -> None:
        super().__init__()
        check_per(per)
        self.per = per
        self.register_buffer("nonfinite", torch.zeros((), dtype=torch.int64))
        for name, dtype, _ in self.group_state:
            self.register_buffer(name, torch.empty(0, dtype=dtype))

    @torch.no_grad()
    def observe(self, x: Tensor, ranks: Ranks | None = None) -> None:
        """Take the values of ``x`` into the statistics; with ``ranks``, those of every rank's ``x``."""
        check_float("x", x)
        self._take_shape(x)
        x = x.detach()
        fresh = count_finite(x, self.per)
        nonfinite = x.numel() - fresh.sum()
        low, high = min_max(x, self.per)
        if ranks is not None:
            low, high = ranks.range(low, high, fresh > 0)
            counts = ranks.sum(torch.cat([fresh.flatten(), nonfinite.flatten()]))
            fresh, nonfinite = counts[:-1].reshape(fresh.shape), counts[-1]
        self.nonfinite += nonfinite
        self._update(x, low.to(self.low.dtype), high.to(self.high.dtype), fresh > 0, ranks)
        self.count += fresh

    def _widen(self, low: Tensor, high: Tensor, has_data: Tensor) -> None:
        first = self.count == 0
        self.low.copy_(torch.where(has_data, torch.where(first, low, torch.minimum(self.low, low)), self.low))
        self.high.copy_(torch.where(has_data, torch.where(first, high, torch.maximum(self.high, high)), self.high))

    @abstractmethod
    def _update(self, x: Tensor, low: Tensor, high: Tensor, has_data: Tensor, ranks: Ranks | None) -> None:
        """Blend in a batch whose groups range from low to high; groups without data stay as they are.

        x is this rank's part of the batch, the rest of the arguments are of all ``ranks``.
        """

    def quant_params(self, grid: Grid, symmetric: bool) -> tuple[Tensor, Tensor]:
        """The scale (float32) and zero point (int32) that fit what was observed."""
        check_grid(grid)
        check_flag("symmetric", symmetric)
        if not self.is_calibrated:
            raise NotCalibratedError(f"{type(self).__name__} has seen no data; call observe(x) before quant_params")
        return _params(*self._range(grid, symmetric), grid, symmetric)

    def _range(self, grid: Grid, symmetric: bool) -> tuple[Tensor, Tensor]:
        """The range to cover, per scale group."""
        return self.low, self.high

    def reset(self) -> None:
        """Forget all data, and the shape it had."""
        self.nonfinite.zero_()
        for name, dtype, _ in self.group_state:
            setattr(self, name, torch.empty(0, dtype=dtype, device=self.nonfinite.device))

    @property
    def is_calibrated(self) -> bool:
        """Whether any finite value was observed."""
        return bool((self.count > 0).any())

    @property
    def _has_shape(self) -> bool:
        return self.count.shape != (0,)

    def _take_shape(self, x: Tensor) -> None:
        shape = self.per.scale_shape(x.shape)
        if not self._has_shape:
            self._allocate(shape, x.device)
        elif tuple(self.count.shape) != shape:
            raise ValueError(
                f"{self.per} of a {tuple(x.shape)} tensor has scales of shape {shape}, but earlier data had "
                f"{tuple(self.count.shape)}; call reset() first"
            )

    def _allocate(self, shape: tuple[int, ...], device: torch.device) -> None:
        with torch.inference_mode(False):  # state must outlive the mode it was made in
            for name, dtype, value in self.group_state:
                setattr(self, name, torch.full(self._state_shape(name, shape), value, dtype=dtype, device=device))

    def _state_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        count = state_dict.get(prefix + "count")
        if count is not None and count.shape != (0,):
            shape = tuple(count.shape)
            if not self.per.fits_scale(shape):
                args[-1].append(f"{prefix}count: the checkpoint holds shape {shape}, which {self.per} cannot have")
                return
            if not self._has_shape:  # take the shape of the state, as of first data
                self._allocate(shape, self.nonfinite.device)
        super()._load_from_state_dict(state_dict, prefix, *args)
        restore_dtypes(self, {name: dtype for name, dtype, _ in self.group_state})

    def _apply(self, fn: Any, recurse: bool = True) -> Observer:
        return super()._apply(keep_full_precision(fn), recurse)

    def extra_repr(self) -> str:
        return f"per={self.per}"


class MinMax(Observer):
    """low = min of all x,  high = max of all x"""

    def _update(self, x: Tensor, low: Tensor, high: Tensor, has_data: Tensor, ranks: Ranks | None) -> None:
        self._widen(low, high, has_data)


class MovingAverage(Observer):
    """low = decay * low + (1 - decay) * low_batch, and high likewise; a group's first data is copied in"""

    def __init__(self, per: Granularity = PerTensor(), decay: float = 0.99) -> None:
        super().__init__(per)
        self.decay = EMA(decay).decay

    def _update(self, x: Tensor, low: Tensor, high: Tensor, has_data: Tensor, ranks: Ranks | None) -> None:
        first = self.count == 0
        for state, batch in ((self.low, low), (self.high, high)):
            blended = torch.where(first, batch, self.decay * state + (1 - self.decay) * batch)
            state.copy_(torch.where(has_data, blended, state))

    def extra_repr(self) -> str:
        return f"per={self.per}, decay={self.decay}"


class Histogram(Observer):
    """counts[c, b] = how many x of group c lie in bin b of [-limit, limit)

    - ``percentile``  the range that leaves out the largest (100 - ``percentile``) % of abs(x); affine: half of them
      at each end
    - ``mse``         the range, of ``candidates`` shrunken ones, with the least squared error of the bin centres
    - ``entropy``     the range, of ``candidates`` shrunken ones, with the least KL divergence from the quantized counts

    A larger value doubles ``limit`` as often as needed and merges 2^k neighbouring bins: counts move, none is lost.
    """

    counts: Tensor
    limit: Tensor

    group_state = (
        *Observer.group_state,
        ("counts", torch.int64, 0),
        ("limit", torch.float64, 0),
    )

    def __init__(
        self,
        per: Granularity = PerTensor(),
        method: str = "percentile",
        *,
        bins: int = 4096,
        percentile: float = 99.99,
        candidates: int = 100,
    ) -> None:
        super().__init__(per)
        check_choice("method", method, ("percentile", "mse", "entropy"))
        check_integer("bins", bins, 2)
        check_integer("candidates", candidates, 1)
        if bins % 2:
            raise ValueError(f"bins is {bins}, but it must be even, so that 0 is a bin's edge")
        if not 0 < check_finite("percentile", percentile) <= 100:
            raise ValueError(f"percentile is {percentile}, but it must be above 0 and at most 100")
        self.method, self.bins, self.percentile, self.candidates = method, bins, percentile, candidates

    def _state_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape, self.bins) if name == "counts" else shape

    def _update(self, x: Tensor, low: Tensor, high: Tensor, has_data: Tensor, ranks: Ranks | None) -> None:
        self._widen(low, high, has_data)
        self._grow(torch.maximum(low.abs(), high.abs()).double())
        split = self.per.split(x).double()
        finite = split.isfinite()
        limit = self.per.spread(torch.where(self.limit > 0, self.limit, 1), split)
        half = self.bins // 2
        bin_ = torch.where(finite, split / limit * half, 0).floor().long().clamp(-half, half - 1) + half
        groups = torch.arange(self.count.numel(), device=x.device).reshape(self.count.shape)
        index = self.per.spread(groups, split) * self.bins + bin_
        counts = torch.zeros_like(self.counts)
        counts.view(-1).scatter_add_(0, index.flatten(), finite.flatten().long())
        self.counts += counts if ranks is None else ranks.sum(counts)  # with one limit on all ranks, bins agree

    def _grow(self, reach: Tensor) -> None:
        """Double ``limit`` until it holds ``reach``; bin b of 2^k-fold wider bins is floor((b - half) / 2^k) + half."""
        limit = torch.where(self.limit == 0, reach, self.limit)
        doublings = (reach / torch.where(limit > 0, limit, 1)).log2().ceil().clamp_min(0)
        doublings = torch.where(reach > limit * torch.exp2(doublings), doublings + 1, doublings)
        self.limit.copy_(limit * torch.exp2(doublings))
        half = self.bins // 2
        bins = torch.arange(self.bins, device=reach.device) - half
        merged = (bins >> doublings.clamp_max(62).long().unsqueeze(-1)) + half
        self.counts.copy_(torch.zeros_like(self.counts).scatter_add(-1, merged.expand_as(self.counts), self.counts))

    def _range(self, grid: Grid, symmetric: bool) -> tuple[Tensor, Tensor]:
        if self.method == "percentile":
            return self._percentile_range(symmetric)
        low, high = self.low.flatten(), self.high.flatten()
        best = torch.full_like(low, math.inf, dtype=torch.float64)
        share = torch.ones_like(low)
        # From the whole range down, so that the widest of equally good ranges is kept.
        for step in range(self.candidates, 0, -1):
            fraction = step / self.candidates
            scale, zero_point = _params(low * fraction, high * fraction, grid, symmetric)
            loss = self._loss(scale, zero_point, grid)
            share = torch.where(loss < best, fraction, share)
            best = torch.minimum(loss, best)
        return tuple((end * share).reshape(self.count.shape) for end in (low, high))  # type: ignore[return-value]

    def _percentile_range(self, symmetric: bool) -> tuple[Tensor, Tensor]:
        half = self.bins // 2
        width = (self.limit / half).unsqueeze(-1)
        edges = torch.arange(1, half + 1, device=width.device, dtype=torch.float64) * width
        # The values at or beyond each distance from 0, on either side; a symmetric range weighs both together.
        above, below = self.counts[..., half:], self.counts[..., :half].flip(-1)
        sides = (above + below, above + below) if symmetric else (above, below)
        tail = (1 - self.percentile / 100) * self.count * (1.0 if symmetric else 0.5)
        ends = (self.high.clamp_min(0), (-self.low).clamp_min(0))
        reach = []
        for side, end in zip(sides, ends, strict=True):
            beyond = side.flip(-1).cumsum(-1).flip(-1) - side  # counts beyond the bin's outer edge
            first = (beyond <= tail.unsqueeze(-1)).long().argmax(-1, keepdim=True)
            edge = edges.gather(-1, first).squeeze(-1).to(end.dtype)
            reach.append(torch.minimum(edge, torch.maximum(*ends) if symmetric else end))
        high, low = reach
        return -low, high

    def _loss(self, scale: Tensor, zero_point: Tensor, grid: Grid) -> Tensor:
        counts = self.counts.reshape(-1, self.bins)
        centres = torch.arange(self.bins, device=scale.device, dtype=torch.float64) + (0.5 - self.bins // 2)
        x = centres * (self.limit.reshape(-1, 1) / (self.bins // 2))
        per = PerChannel(0)
        if self.method == "mse":
            error = fake_quantize(x, scale, zero_point, grid=grid, per=per) - x
            return (counts * error * error).sum(-1)
        codes = quantize(x, scale, zero_point, grid=grid, per=per)
        inside = quantize_backward(torch.ones_like(x), x, scale, zero_point, grid=grid, per=per) > 0
        return _divergence(counts.double(), codes, inside)

    def extra_repr(self) -> str:
        return f"per={self.per}, method={self.method!r}, bins={self.bins}"


def _params(low: Tensor, high: Tensor, grid: Grid, symmetric: bool) -> tuple[Tensor, Tensor]:
    if not symmetric:
        return affine_params(low, high, grid)
    scale = symmetric_scale(torch.maximum(low.abs(), high.abs()), grid)
    return scale, torch.zeros_like(scale, dtype=torch.int32)


def _divergence(counts: Tensor, codes: Tensor, inside: Tensor) -> Tensor:
    """KL(P || Q) per row: P the counts, the clipped ones moved to the ends; Q the counts of each code, spread evenly

    Q sees only what lies inside the range, so that clipping costs.
    """
    changes = (codes[:, 1:] != codes[:, :-1]).long().cumsum(-1)
    level = torch.cat([torch.zeros_like(changes[:, :1]), changes], -1)

    def per_level(values: Tensor) -> Tensor:
        return torch.zeros_like(values).scatter_add(-1, level, values).gather(-1, level)

    kept = torch.where(inside, counts, 0)
    used = (counts > 0) & inside
    first = inside.long().argmax(-1, keepdim=True)
    last = inside.shape[-1] - 1 - inside.flip(-1).long().argmax(-1, keepdim=True)
    position = torch.arange(counts.shape[-1], device=counts.device)
    below = torch.where(position < first, counts, 0).sum(-1, keepdim=True)
    above = torch.where(position > last, counts, 0).sum(-1, keepdim=True)
    p = kept + torch.where(position == first, below, 0) + torch.where(position == last, above, 0)
    q = torch.where(used, per_level(kept) / per_level(used.double()).clamp_min(1), 0)
    p, q = p / p.sum(-1, keepdim=True).clamp_min(1), q / q.sum(-1, keepdim=True).clamp_min(1)
    floor = torch.finfo(q.dtype).tiny
    return torch.where(p > 0, p * (p.clamp_min(floor) / q.clamp_min(1e-12)).log(), 0).sum(-1)


def keep_full_precision(fn: Any) -> Any:
    """``fn`` as ``nn.Module._apply`` calls it, but no tensor becomes half precision: scales stay float32."""

    def apply(tensor: Tensor) -> Tensor:
        moved: Tensor = fn(tensor)
        return tensor.to(moved.device) if moved.dtype in (torch.float16, torch.bfloat16) else moved

    return apply


def restore_dtypes(module: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Undo what loading with assign=True does to the dtype of a module's state."""
    for name, dtype in dtypes.items():
        tensor = getattr(module, name)
        half = tensor.dtype in (torch.float16, torch.bfloat16)
        if half or (tensor.dtype != dtype and not tensor.is_floating_point()):
            tensor.data = tensor.data.to(dtype)
