"""The check before the clock: does a contender compute the right answer?"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lowbit.bench.contenders import Runnable
from lowbit.bench.data import Data, in_steps
from lowbit.bench.registry import Case, Op
from lowbit.ste import SteKind

# The share of elements for which a peer's gradient may be another: under IDENTITY, those that are clipped.
_CLIPPED = 0.01


class Outcome(NamedTuple):
    """What one call computes: the result and, with a backward, the gradients of x and of a learned scale."""

    y: Tensor
    dx: Tensor | None = None
    dscale: Tensor | None = None


def call(runnable: Runnable, case: Case, data: Data) -> Outcome:
    """One call, as it is timed."""
    y = runnable.forward(data.x)
    if not case.has_backward:
        return Outcome(y)
    if runnable.backward is not None:
        return Outcome(y, *runnable.backward(data.grad_output, data.x))
    inputs = (data.x,) if runnable.learned is None else (data.x, runnable.learned)
    return Outcome(y, *torch.autograd.grad(y, inputs, data.grad_output))


def find_difference(case: Case, got: Outcome, reference: Outcome) -> str:
    """Where ours is not the reference to the bit, in words; "" where it is

    TANH: within 8 ulp, each of the two being within 4 of the formula. Sums: within a thousandth of the largest.
    """
    if not torch.equal(got.y, reference.y) or got.y.dtype != reference.y.dtype:
        return f"y differs from the reference in {_share(got.y != reference.y)}"
    if got.dx is not None and reference.dx is not None:
        info, ulps = torch.finfo(reference.dx.dtype), 8 if case.ste is SteKind.TANH else 0
        # A slope below the normal numbers has few bits left, and is multiplied by a gradient of up to 8.
        margin = ulps * info.eps * reference.dx.abs().clamp_min(8 * info.smallest_normal)
        if (wrong := ~((got.dx - reference.dx).abs() <= margin)).any():
            return f"dx differs from the reference in {_share(wrong)}"
    if got.dscale is not None and reference.dscale is not None:
        margin = 1e-3 * reference.dscale.abs().max()
        if (wrong := ~((got.dscale - reference.dscale).abs() <= margin)).any():
            return f"the scale's gradient differs from the reference in {_share(wrong)}"
    return ""


def find_error(case: Case, data: Data, got: Outcome, reference: Outcome, factor: float = 1.0) -> str:
    """Where a peer is not right by its own rule, in words; "" where it is

    - y lies within one step of the reference everywhere, and as far from x as the reference does on average (so that
      neither y = x nor a coarser grid passes)
    - dx is the reference's but for the few elements that are clipped; the scale's gradient times ``factor`` is, too,
      within 2 %
    """
    y = got.y.int_repr() if got.y.is_quantized else got.y
    if y.shape != reference.y.shape or y.dtype != reference.y.dtype:
        return f"y is {y.dtype} of shape {tuple(y.shape)}, not {reference.y.dtype} of {tuple(reference.y.shape)}"
    return (
        _find_y_error(case, data, y, reference.y)
        or _find_dx_error(case, data, got.dx, reference.dx)
        or _find_dscale_error(got.dscale, reference.dscale, factor)
    )


@torch.no_grad()
def _find_y_error(case: Case, data: Data, y: Tensor, reference: Tensor) -> str:
    if case.op is Op.DEQUANTIZE:
        wrong = ~((y - reference).abs() <= torch.finfo(y.dtype).eps * reference.abs())
        return f"y is wrong in {_share(wrong)}" if wrong.any() else ""
    as_steps = (lambda t: t.float()) if case.op is Op.QUANTIZE else (lambda t: in_steps(t.float(), data.scale, case))
    x, steps, wanted = in_steps(data.x.float(), data.scale, case), as_steps(y), as_steps(reference)
    rounding = 0.0 if case.op is Op.QUANTIZE else torch.finfo(y.dtype).eps
    if (wrong := ~((steps - wanted).abs() <= 1.01 + rounding * wanted.abs())).any():
        return f"y is more than a step off in {_share(wrong)}"
    error, fair = (steps - x).abs().mean().item(), (wanted - x).abs().mean().item()
    if not 0.75 * fair <= error <= 1.33 * fair:
        return f"y lies {error:.3g} steps from x on average, not {fair:.3g}"
    return ""


def _find_dx_error(case: Case, data: Data, dx: Tensor | None, reference: Tensor | None) -> str:
    if dx is None or reference is None:
        return ""
    wrong = ~((dx - reference).abs() <= 0.02 * reference.abs() + 1e-5 * data.grad_output.abs())
    # Peers that divide the largest value of a group by 127.5 clip it.
    fair = max(_CLIPPED, 1 / case.per.group_size(case.shape) if case.op.follows_data else 0.0)
    return f"dx is wrong in {_share(wrong)}" if wrong.float().mean() > fair else ""


def _find_dscale_error(dscale: Tensor | None, reference: Tensor | None, factor: float) -> str:
    if dscale is None or reference is None:
        return ""
    wrong = ~((dscale.reshape_as(reference) * factor - reference).abs() <= 0.02 * reference.abs().max())
    return f"the scale's gradient is wrong in {_share(wrong)}" if wrong.any() else ""


def _share(wrong: Tensor) -> str:
    return f"{int(wrong.sum())} of {wrong.numel()} elements"
