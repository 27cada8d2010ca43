"""Where the microseconds of a small call go: checks, autograd, plan, kernel, allocation."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit.bench.runner import cpu_clock
from lowbit.functional import fake_quantize
from lowbit.functional.check import check_params
from lowbit.granularity import PerTensor
from lowbit.grid import Grid
from lowbit.kernels import plan
from lowbit.ste import SteKind

_SHAPE = (256, 64)
_REPEATS = 200


class Part(NamedTuple):
    """A part of a call and its microseconds, the median of all rounds."""

    name: str
    microseconds: float


def measure_overhead(device: torch.device, dtype: torch.dtype = torch.float32, seconds: float = 1.0) -> list[Part]:
    """The parts of ``fake_quantize`` of a 256 x 64 tensor, and torch's op and a ReLU beside it.

    Each part is measured by itself, and what only the whole shows is the difference. On a GPU this is the time of the
    host, which for a tensor this small is the time of the call.
    """
    times = {name: seconds * 1e6 for name, seconds in _medians(_calls(device, dtype), device, seconds).items()}
    whole, kernel, run = times["forward"], times["kernel"], times["run"]
    return [
        Part("fake_quantize, forward", whole),
        Part("  checks", times["checks"]),
        Part("  plan: look up, dispatch", run - kernel),
        Part("  kernel, without allocation", kernel - times["allocation"]),
        Part("  allocation", times["allocation"]),
        Part("  autograd and the rest", whole - times["checks"] - run),
        Part("fake_quantize, forward + backward", times["both"]),
        Part("  backward kernel", times["backward kernel"]),
        Part("  autograd and the rest of the backward", times["both"] - whole - times["backward kernel"]),
        Part("torch's op, forward", times["torch forward"]),
        Part("torch's op, forward + backward", times["torch both"]),
        Part("ReLU, forward", times["relu forward"]),
        Part("ReLU, forward + backward", times["relu both"]),
    ]


def _calls(device: torch.device, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    x = torch.randn(_SHAPE, device=device).to(dtype).requires_grad_()
    plain, grad_output = x.detach(), torch.randn(_SHAPE, device=device).to(dtype)
    scale, zero_point = torch.tensor(0.02, device=device), torch.zeros((), dtype=torch.int32, device=device)
    grid, per, ste = Grid(8), PerTensor(), SteKind.CLIPPED_IDENTITY
    forward = plan.Plan.select("fake_quantize", plain)
    backward = plan.Plan.select("fake_quantize_backward", plain, ste=ste)

    def torch_op(x: Tensor) -> Tensor:
        return torch.fake_quantize_per_tensor_affine(x, scale, zero_point, grid.quant_min, grid.quant_max)

    def both(function: Callable[[Tensor], Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(function(x), x, grad_output)

    def without_grad(function: Callable[[], Any]) -> Callable[[], Any]:
        return torch.no_grad()(function)

    return {
        "forward": lambda: fake_quantize(x, scale),
        "both": both(lambda x: fake_quantize(x, scale)),
        "checks": lambda: check_params(x, scale, None, grid, per),
        "run": without_grad(lambda: plan.run("fake_quantize", plain, plain, scale, None, grid=grid, per=per)),
        "kernel": without_grad(lambda: forward.kernel(plain, scale, None)),
        "allocation": without_grad(lambda: torch.empty_like(plain)),
        "backward kernel": without_grad(lambda: backward.kernel(grad_output, plain, scale, None)),
        "torch forward": lambda: torch_op(x),
        "torch both": both(torch_op),
        "relu forward": lambda: torch.relu(x),
        "relu both": both(torch.relu),
        "no_grad": without_grad(lambda: None),
    }


def _medians(calls: dict[str, Callable[[], Any]], device: torch.device, seconds: float) -> dict[str, float]:
    """Median seconds of each call, all in turn; those under no_grad without what entering it costs."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for function in calls.values():
        cpu_clock(function, 3)
    spent = 0.0
    while spent < seconds or len(samples["forward"]) < 3:
        for name, function in calls.items():
            samples[name].append(cpu_clock(function, _REPEATS))
            spent += samples[name][-1] * _REPEATS
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    times = {name: median(values) for name, values in samples.items()}
    for name in ("run", "kernel", "allocation", "backward kernel"):
        times[name] = max(times[name] - times["no_grad"], 0.0)
    return times


def describe_overhead(parts: list[Part]) -> str:
    """The parts as a table."""
    width = max(len(part.name) for part in parts)
    return "\n".join(f"{part.name:{width}}{part.microseconds:>9.2f} us" for part in parts)
