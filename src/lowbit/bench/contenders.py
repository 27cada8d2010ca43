"""Contenders: the ways to compute a case, each a function of the case and its data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit.bench.data import Data
from lowbit.bench.registry import GRID, Case, Op
from lowbit.fake_quantize import FakeQuantize
from lowbit.functional import dequantize, fake_quantize, learned_fake_quantize, quantize
from lowbit.granularity import PerChannel, PerTensor
from lowbit.kernels.plan import Plan
from lowbit.scale import EMA, PerBatch
from lowbit.ste import SteKind

EMA_DECAY = EMA().decay
Forward = Callable[[Tensor], Tensor]


class UnfitError(Exception):
    """A contender that cannot compute a case here; the message says why."""


class Runnable(NamedTuple):
    """y = forward(x); where it learns a scale, that scale, and the factor from its gradient to LSQ's.

    ``backward(g, x)`` gives the gradients; None leaves them to autograd.
    """

    forward: Forward
    learned: Tensor | None = None
    factor: float = 1.0
    backward: Callable[[Tensor, Tensor], tuple[Tensor, ...]] | None = None


@dataclass(frozen=True)
class Contender:
    """A way to compute a case; ours must agree with the reference to the bit, a yardstick computes another op.

    ``build`` raises UnfitError where it cannot; ``compiled`` runs its forward through ``torch.compile``.
    """

    name: str
    build: Callable[[Case, Data], Runnable]
    is_ours: bool = False
    is_yardstick: bool = False
    compiled: bool = False

    def prepare(self, case: Case, data: Data) -> Runnable:
        """A fresh Runnable, with state of its own."""
        runnable = self.build(case, data)
        if not self.compiled:
            return runnable
        torch.compiler.reset()  # else the cases of one contender share Dynamo's limit of recompilations
        return runnable._replace(forward=torch.compile(runnable.forward, fullgraph=True, dynamic=False))


def lowbit(case: Case, data: Data) -> Runnable:
    """The functional op, or FakeQuantize where the scale has a rule of its own."""
    scale, per, ste = data.scale, case.per, case.ste
    match case.op:
        case Op.FAKE_QUANTIZE:
            return Runnable(lambda x: fake_quantize(x, scale, grid=GRID, per=per, ste=ste))
        case Op.PER_BATCH:
            return Runnable(FakeQuantize(GRID.bits, per=per, ste=ste, scale_mode=PerBatch()))
        case Op.EMA:
            return Runnable(FakeQuantize(GRID.bits, per=per, ste=ste, scale_mode=EMA()).to(scale.device))
        case Op.LEARNED:
            learned = scale.detach().clone().requires_grad_()
            return Runnable(lambda x: learned_fake_quantize(x, learned, grid=GRID, per=per, ste=ste), learned)
        case Op.QUANTIZE:
            dtype = None if case.has_backward else case.code_dtype
            return Runnable(lambda x: quantize(x, scale, grid=GRID, per=per, dtype=dtype))
        case Op.DEQUANTIZE:
            return Runnable(lambda q: dequantize(q, scale, per=per, dtype=case.dtype))


def kernels(case: Case, data: Data) -> Runnable:
    """The kernels of our plans alone: no checks, no autograd."""
    if case.op is Op.EMA:
        raise UnfitError("an EMA's kernels are measured by the per-batch and the given scale")
    scale = data.scale.detach()
    kept: list[Tensor | None] = [scale, None]

    def select(op: str) -> Callable[..., Any]:
        like = data.grad_output if op == "dequantize_backward" else data.x
        return Plan.select(op, like, grid=GRID, per=case.per, ste=case.ste).run

    def identity(g: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return (g,)

    match case.op:
        case Op.QUANTIZE:
            run, back = select("quantize"), select("quantize_backward")
            dtype = None if case.has_backward else case.code_dtype
            return Runnable(lambda x: run(x, scale, dtype=dtype), backward=lambda g, x: (back(g, x, scale),))
        case Op.DEQUANTIZE:
            run, back = select("dequantize"), select("dequantize_backward")
            return Runnable(
                lambda q: run(q, scale, dtype=case.dtype),
                backward=lambda g, q: (back(g, scale, dtype=q.dtype),),
            )
        case Op.LEARNED:
            run, back, factor = (
                select("learned_fake_quantize"),
                select("learned_fake_quantize_backward"),
                lsq_factor(case),
            )

            def learned_backward(g: Tensor, x: Tensor) -> tuple[Tensor, ...]:
                dx, ds = back(g, x, scale)
                return dx, ds * factor

            return Runnable(lambda x: run(x, scale), backward=learned_backward)
        case Op.PER_BATCH:
            run = select("fake_quantize_per_batch")

            def forward(x: Tensor) -> Tensor:
                y, *kept[:] = run(x)
                return y

        case _:
            run = select("fake_quantize")

            def forward(x: Tensor) -> Tensor:
                return run(x, scale)

    if not case.backward_needs_x:
        return Runnable(forward, backward=identity)
    back = select("fake_quantize_backward")
    return Runnable(forward, backward=lambda g, x: (back(g, x, *kept),))


def torch_op(case: Case, data: Data) -> Runnable:
    """PyTorch's fake_quantize_per_*_affine, its learnable and moving-average kin, and quantize_per_tensor."""
    if case.op is Op.PER_BATCH:
        raise UnfitError("torch has no op that takes the scale from the data")
    if case.op in (Op.QUANTIZE, Op.DEQUANTIZE):
        return _torch_codes(case, data)
    require_clipping_rule(case, "torch's op")
    limits = (GRID.quant_min, GRID.quant_max)
    if case.op is Op.EMA:
        return _torch_moving_average(case, data)
    if case.op is Op.LEARNED:
        return _torch_learnable(case, data)
    zero_point = torch.zeros_like(data.scale, dtype=torch.int32)
    if isinstance(case.per, PerTensor):
        return Runnable(lambda x: torch.fake_quantize_per_tensor_affine(x, data.scale, zero_point, *limits))
    if isinstance(case.per, PerChannel):
        axis = case.per.axis
        return Runnable(lambda x: torch.fake_quantize_per_channel_affine(x, data.scale, zero_point, axis, *limits))
    # Tokens and groups are the channels of a matrix with one row each.
    size, scale, zero_point = case.per.group_size(case.shape), data.scale.flatten(), zero_point.flatten()
    return Runnable(
        lambda x: torch.fake_quantize_per_channel_affine(x.reshape(-1, size), scale, zero_point, 0, *limits).reshape_as(
            x
        )
    )


def _torch_learnable(case: Case, data: Data) -> Runnable:
    learned = data.scale.detach().reshape(-1).clone().requires_grad_()
    zero_point = torch.zeros_like(learned)
    limits = (GRID.quant_min, GRID.quant_max, lsq_factor(case))
    # torch has no public names for these
    if isinstance(case.per, PerTensor):
        per_tensor = torch._fake_quantize_learnable_per_tensor_affine  # noqa: SLF001
        return Runnable(lambda x: per_tensor(x, learned, zero_point, *limits), learned)
    assert isinstance(case.per, PerChannel)
    per_channel, axis = torch._fake_quantize_learnable_per_channel_affine, case.per.axis  # noqa: SLF001
    return Runnable(lambda x: per_channel(x, learned, zero_point, axis, *limits), learned)


def _torch_moving_average(case: Case, data: Data) -> Runnable:
    scale = data.scale.reshape(-1).clone()
    low, high = torch.full_like(scale, torch.inf), torch.full_like(scale, -torch.inf)
    zero_point = torch.zeros_like(scale, dtype=torch.int32)
    on = torch.ones(1, dtype=torch.int64, device=scale.device)
    axis = case.per.axis if isinstance(case.per, PerChannel) else -1
    return Runnable(
        lambda x: torch.fused_moving_avg_obs_fake_quant(
            x,
            on,
            on,
            low,
            high,
            scale,
            zero_point,
            1 - EMA_DECAY,
            GRID.quant_min,
            GRID.quant_max,
            axis,
            isinstance(case.per, PerChannel),
            True,
        )
    )


def _torch_codes(case: Case, data: Data) -> Runnable:
    if not isinstance(case.per, PerTensor) or case.has_backward or case.dtype is not torch.float32:
        raise UnfitError("only torch's per-tensor forward of float32 is measured")
    scale = data.scale.item()
    if case.op is Op.QUANTIZE:
        return Runnable(lambda x: torch.quantize_per_tensor(x.detach(), scale, 0, torch.qint8))
    codes = torch._make_per_tensor_quantized_tensor(data.x, scale, 0)  # noqa: SLF001 (no public name)
    return Runnable(lambda _: codes.dequantize())


def hand_made(case: Case, data: Data) -> Runnable:
    """y = u + (q * s - u).detach(), where u is a function whose derivative is the rule: for IDENTITY, x itself

    In float32, as the law asks: in bf16 one code in ten comes out as its neighbour.
    """
    if case.op is Op.LEARNED:
        return _hand_made_learned(case, data)
    per, like = case.per, case.per.split(data.x)
    given = per.spread(data.scale.detach().clone(), like)

    def scale_of(wide: Tensor) -> Tensor:
        if not case.op.follows_data:
            return given
        magnitude = per.reduce(lambda t, axes: t.amax(axes, keepdim=True), wide.detach().abs())
        batch = (magnitude.reshape(given.shape) / GRID.quant_max).clamp_min(1e-12)
        return batch if case.op is Op.PER_BATCH else given.lerp_(batch, 1 - EMA_DECAY).clone()

    def forward(x: Tensor) -> Tensor:
        wide = per.split(x).float()
        if case.op is Op.DEQUANTIZE:
            return per.join(wide * given, x.shape).to(case.dtype)
        scale = scale_of(wide)
        if case.op is Op.QUANTIZE:
            steps = wide / scale
            codes = (steps + (steps.round() - steps).detach()).clamp(GRID.quant_min, GRID.quant_max)
            return per.join(codes, x.shape).to(case.code_dtype)
        y = (wide / scale).round().clamp(GRID.quant_min, GRID.quant_max) * scale
        u = _surrogate(wide, scale, case.ste)
        return per.join(u + (y - u).detach(), x.shape).to(x.dtype)

    return Runnable(forward)


def _surrogate(x: Tensor, scale: Tensor, ste: SteKind) -> Tensor:
    """The function whose derivative is the rule."""
    match ste:
        case SteKind.IDENTITY:
            return x
        case SteKind.CLIPPED_IDENTITY:
            return torch.clamp(x, GRID.quant_min * scale, GRID.quant_max * scale)
        case SteKind.IN_RANGE:
            codes = (x / scale).detach().round()
            return torch.where((codes >= GRID.quant_min) & (codes <= GRID.quant_max), x, x.detach())
        case SteKind.TANH:
            return scale * torch.tanh(x / scale)
        case SteKind.HARD_TANH:
            bound = torch.where(x >= 0, GRID.quant_max * scale, -GRID.quant_min * scale)
            inside = torch.clamp(x, -bound, bound)
            return inside - inside * inside.abs() / (2 * bound)


def _hand_made_learned(case: Case, data: Data) -> Runnable:
    require_clipping_rule(case, "hand-made LSQ")
    per, learned = case.per, data.scale.detach().clone().requires_grad_()
    factor = lsq_factor(case)

    def forward(x: Tensor) -> Tensor:
        wide = per.split(x).float()
        scale = per.spread((learned - learned * factor).detach() + learned * factor, wide)
        steps = (wide / scale).clamp(GRID.quant_min, GRID.quant_max)
        codes = steps + (steps.round() - steps).detach()
        return per.join(codes * scale, x.shape).to(x.dtype)

    return Runnable(forward, learned)


def copy(case: Case, data: Data) -> Runnable:
    """The floor's rate: x copied to memory that is there already."""
    source = data.x.detach()
    if case.op is Op.DEQUANTIZE:
        source = source.to(case.dtype)
    target = torch.empty_like(source)
    return Runnable(lambda _: target.copy_(source))


def relu(case: Case, data: Data) -> Runnable:
    """max(x, 0): the simplest op of the same tensor that a network has."""
    if case.op in (Op.QUANTIZE, Op.DEQUANTIZE):
        raise UnfitError("a ReLU's result has x's dtype")
    return Runnable(torch.relu)


def lsq_factor(case: Case) -> float:
    """1 / sqrt(n * quant_max)"""
    return 1 / math.sqrt(case.per.group_size(case.shape) * GRID.quant_max)


def require_clipping_rule(case: Case, who: str) -> None:
    """Refuse the rules that scale the gradient. Those that clip, and IDENTITY, differ for 0.3 % of the elements."""
    if not (case.ste.only_clips or case.ste is SteKind.IDENTITY):
        raise UnfitError(f"{who} has no {case.ste.value} rule")
