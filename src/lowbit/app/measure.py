"""What a report shows of a prepared model: histograms on their grids, noise, sizes, scales as they move."""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lowbit.app.report_parts import Histogram
from lowbit.fake_quantize import FakeQuantize
from lowbit.flow import call, in_eval_mode
from lowbit.functional import dequantize, quantize
from lowbit.grid import Grid
from lowbit.nn.quantizers import DoReFaActivation
from lowbit.noise import noise
from lowbit.preparation import quantizers

_BINS = 60
_CODES = 2**8  # of a finer grid nobody can see which are in use


def tensor_of(role: str) -> str:
    """The word of a report for a quantizer's role: all that is not a weight is an activation."""
    return "weight" if role == "weight" else "activation"


def layer_of(path: str) -> str:
    """The layer of a quantizer's path."""
    return path.rpartition(".")[0]


def noise_rows(model: nn.Module, batch: Any) -> list[dict[str, Any]]:
    """Signal-to-noise of every quantizer, the noisiest first; None where nothing is lost"""
    return [
        {
            "layer": layer_of(line.path),
            "tensor": tensor_of(line.role),
            "snr_db": line.decibels if math.isfinite(line.decibels) else None,
            "quantizer": line.path,
        }
        for line in noise(model, batch).lines
    ]


@torch.no_grad()
def histograms(model: nn.Module, batch: Any) -> list[Histogram]:
    """Of what every quantizer takes on one batch, in eval mode, with its grid"""
    seen: dict[str, Tensor] = {}
    found = list(quantizers(model))

    def keep(path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            seen[path] = args[0].detach()

        return hook

    handles = [quantizer.register_forward_pre_hook(keep(path)) for path, _, quantizer in found]
    try:
        with in_eval_mode(model):
            call(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return [
        _histogram(layer_of(path), tensor_of(role), seen[path].float(), quantizer)
        for path, role, quantizer in found
        if path in seen and seen[path].numel()
    ]


class ScaleRecorder(Callback):
    """scales[path] = the mean of the quantizer's scales after each epoch, of those that keep one"""

    def __init__(self) -> None:
        self.scales: dict[str, list[float]] = {}

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for path, scale in kept_scales(pl_module).items():
            self.scales.setdefault(path.removeprefix("model."), []).append(scale)

    def state_dict(self) -> dict[str, Any]:
        return {"scales": self.scales}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scales = state_dict["scales"]


def kept_scales(model: nn.Module) -> dict[str, float]:
    """The mean of the scales of every quantizer that keeps one"""
    return {
        path: float(quantizer.kept_params()[0].double().mean())
        for path, _, quantizer in quantizers(model)
        if isinstance(quantizer, FakeQuantize) and quantizer.scale is not None and quantizer.is_ready
    }


def _histogram(layer: str, tensor: str, x: Tensor, quantizer: Any) -> Histogram:
    """In units of the values where there is one scale, else of steps"""
    x = torch.where(x.isfinite(), x, 0)
    if isinstance(quantizer, DoReFaActivation):
        scale = quantizer.scale(x)
        return _on_grid(layer, tensor, x, quantizer.grid, float(scale), 0, quantize(x, scale, grid=quantizer.grid))
    if not isinstance(quantizer, FakeQuantize):
        return Histogram(layer, tensor, *_count(x, -math.inf, math.inf))
    scale, zero_point = quantizer.params(x)
    codes = quantize(x, scale, zero_point, grid=quantizer.grid, per=quantizer.per)
    if scale.numel() == 1:
        zero = 0 if zero_point is None else int(zero_point)
        return _on_grid(layer, tensor, x, quantizer.grid, float(scale), zero, codes)
    # (1 - 0) * s and (0 - z) * s, for every element
    steps = dequantize(torch.ones_like(x), scale, per=quantizer.per)
    shift = dequantize(torch.zeros_like(x), scale, zero_point, per=quantizer.per) / steps
    return _on_grid(layer, tensor, x / steps - shift, quantizer.grid, 1.0, 0, codes, "steps of its scale")


def _on_grid(
    layer: str, tensor: str, x: Tensor, grid: Grid, scale: float, zero: int, codes: Tensor, label: str = "value"
) -> Histogram:
    low, high = grid.quant_min, grid.quant_max
    # What is further out than the grid is wide has a bin of its own.
    near = [(q - zero) * scale for q in (2 * low - high, 2 * high - low)]
    used = None
    if high - low < _CODES:
        used = torch.bincount((codes - low).long().flatten(), minlength=high - low + 1).tolist()
    return Histogram(layer, tensor, *_count(x, *near), scale, zero, low, high, used, label)


def _count(x: Tensor, low: float, high: float) -> tuple[list[float | None], list[int]]:
    """Edges of bins of one width between low and high, as far as there are values, and one more for what is beyond"""
    first, last = float(x.min()), float(x.max())
    start, end = max(first, low), min(last, high)
    if not start < end:
        start, end = first - 0.5, first + 0.5
        first, last = start, max(end, last)
    inner = torch.linspace(start, end, _BINS + 1, dtype=torch.float64)
    far = [edge for edge in (first, last) if not start <= edge <= end]
    edges = torch.cat([inner, torch.tensor(far, dtype=torch.float64)]).sort().values
    # A value on the last edge belongs to the last bin.
    places = torch.bucketize(x.flatten().double(), edges[1:-1], right=True)
    return edges.tolist(), torch.bincount(places, minlength=len(edges) - 1).tolist()
