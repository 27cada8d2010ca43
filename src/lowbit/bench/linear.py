"""The linear layer: what its forward and backward cost in units of the float layer's, and what is kept between them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lowbit import recipes
from lowbit.bench.contenders import UnfitError
from lowbit.bench.models import FLOAT, ModelRow, fill_in, multiply_faster, quantize_by_torchao, signal_to_noise
from lowbit.bench.networks import DTYPES
from lowbit.bench.runner import Clock, alternate, count_saved, cpu_clock, cuda_clock, cuda_peak_bytes
from lowbit.model import prepare
from lowbit.recipe import Recipe

# On a GPU long enough that the first launch, for which it waits, does not count.
_SAMPLE_SECONDS = {"cpu": 0.02, "cuda": 0.25}

LEGEND = (
    "step: median time of forward and backward. /float: the median of the rounds' own ratios; spread: their "
    "interquartile range over it.\npeak: most bytes at once in a step, on a GPU. kept: bytes that autograd saves for "
    "the backward, weights included.\nSNR: the least of output and gradients, float's being the signal."
)


class Shape(NamedTuple):
    """``rows`` x ``inputs`` times ``inputs`` x ``outputs``, in each of ``layers`` layers"""

    rows: int
    inputs: int
    outputs: int
    layers: int = 1

    def __str__(self) -> str:
        stack = f"{self.layers} layers of " if self.layers > 1 else ""
        return f"{stack}{self.rows} x {self.inputs} x {self.outputs}"


SHAPES = {
    "cuda": (
        Shape(16384, 4096, 14336),
        Shape(16384, 4096, 4096),
        Shape(8192, 2048, 8192),
        Shape(16384, 4096, 4096, layers=8),
    ),
    "cpu": (Shape(2048, 1024, 1024), Shape(2048, 1024, 1024, layers=3)),
}
QUICK_SHAPES = (Shape(32, 64, 48), Shape(32, 64, 64, layers=2))


@dataclass(frozen=True)
class Layer:
    """A way to quantize a linear layer, in place, and the signal to noise, in decibels, that it must have."""

    name: str
    quantize: Callable[[nn.Module], nn.Module]
    least_snr: float = 0.0
    is_ours: bool = False
    compiled: bool = False


class Step:
    """Forward, and backward of a given gradient: y, dx, every dw and db"""

    def __init__(self, model: nn.Module, x: Tensor, g: Tensor) -> None:
        self.model, self.x, self.g = model, x.detach().requires_grad_(), g
        self.parameters = list(model.parameters())

    def __call__(self) -> tuple[Tensor, ...]:
        y: Tensor = self.model(self.x)
        return y.detach(), *torch.autograd.grad(y, [self.x, *self.parameters], self.g)


def run_linear(
    shapes: Sequence[Shape], layers: Sequence[Layer], device: torch.device, seconds: float, clock: Clock | None = None
) -> Iterator[list[ModelRow]]:
    """The rows of each shape, as soon as they are there; float must be the first layer."""
    clock = clock or (cuda_clock if device.type == "cuda" else cpu_clock)
    for shape in shapes:
        rows, steps = _check_layers(shape, layers, device)
        fill_in(rows, alternate(dict(steps), clock, seconds, _SAMPLE_SECONDS[device.type]))
        yield rows


def _check_layers(
    shape: Shape, layers: Sequence[Layer], device: torch.device
) -> tuple[list[ModelRow], dict[str, Step]]:
    """Each layer's first step, compared with float's."""
    dtype, generator = DTYPES[device.type], torch.Generator(device).manual_seed(0)
    x, g = (
        torch.randn(shape.rows, width, device=device, generator=generator).to(dtype)
        for width in (shape.inputs, shape.outputs)
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(shape.inputs, shape.outputs) for _ in range(shape.layers))).to(device, dtype)
    signal = Step(model, x, g)()
    rows, steps = [], {}
    for layer in layers:
        row = ModelRow(str(shape), layer.name)
        rows.append(row)
        try:
            quantized = layer.quantize(copy.deepcopy(model)).train()
            if layer.compiled:
                quantized.compile()
            step = Step(quantized, x, g)
            found, row.kept_bytes = count_saved(step)
            if layer.name != FLOAT:
                row.snr_db = min(signal_to_noise(*pair) for pair in zip(found, signal, strict=True))
                if not row.snr_db >= layer.least_snr:
                    row.status, row.note = "wrong", f"{row.snr_db:.1f} dB of signal to noise, of {layer.least_snr:.0f}"
            del found
        except UnfitError as unfit:
            row.status, row.note = "skipped", str(unfit)
        except Exception as error:  # whatever a contender raises is its result
            row.status, row.note = "failed", f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        if row.status == "ok":
            row.peak_bytes = cuda_peak_bytes(step, device) if device.type == "cuda" else None
            steps[layer.name] = step
    return rows, steps


def _lowbit(recipe: Callable[[], Recipe]) -> Callable[[nn.Module], nn.Module]:
    return lambda model: prepare(model, recipe(), inplace=True)


LAYERS = (
    Layer(FLOAT, lambda model: model),
    Layer("float by oneDNN", multiply_faster, 60.0),
    Layer("lowbit w8a8_dynamic", _lowbit(recipes.w8a8_dynamic), 25.0, is_ours=True),
    Layer("lowbit w8a8", _lowbit(recipes.w8a8), 20.0, is_ours=True),
    Layer("lowbit w4a8", _lowbit(recipes.w4a8), 10.0, is_ours=True),
    Layer("lowbit w8a8_dynamic compiled", _lowbit(recipes.w8a8_dynamic), 25.0, is_ours=True, compiled=True),
    Layer("torchao", quantize_by_torchao),
    Layer("torchao compiled", quantize_by_torchao, compiled=True),
)
