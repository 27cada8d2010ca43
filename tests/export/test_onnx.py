"""export_onnx: every kind of layer and quantizer, and what is in a file and what is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import lowbit
from converting import prepared
from exporting import STYLES, exported, verified
from lowbit import Recipe
from lowbit.export import onnx as exporter
from nn.layers import LAYERS, batch_of

PRESETS = lowbit.recipes.presets()
# torch pads an uneven 'same' by a copy, and projects without oneDNN; it says so.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning"),
]


class Many(nn.Module):
    """Layers side by side, each with a batch of its own."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LAYERS[name]() for name in names)

    def forward(self, batches: list[Any]) -> list[Any]:
        pairs = zip(self.layers, batches, strict=True)
        return [layer(*batch) if isinstance(batch, tuple) else layer(batch) for layer, batch in pairs]


# One of each class, small; the rest are ways to call them.
ONE_OF_EACH = [
    *("linear", "conv1d", "conv2d", "conv3d", "conv transpose1d", "conv transpose2d", "conv transpose3d"),
    *("embedding", "bag of means", "transformers conv1d", "avg pool1d", "avg pool2d", "avg pool3d"),
    *("adaptive pool1d", "adaptive pool2d", "adaptive pool3d", "attention", "rnn", "lstm", "gru"),
    *("rnn cell", "lstm cell", "gru cell"),
]
THE_REST = [name for name in LAYERS if name not in ONE_OF_EACH and not name.startswith("packed")]


def short(name: str) -> Any:
    """A batch for the layer: of few steps, since a file holds each."""
    batch = batch_of(name)
    return batch[:, :2] if name == "lstm" else batch[:2] if name in ("rnn", "gru", "projected") else batch


def check_layers(names: list[str], recipe: Recipe, style: str, path: Path) -> None:
    batch = ([short(name) for name in names],)
    model = prepared(Many(names), recipe, batch)
    exported(model, batch, path, style, dynamic_batch=False)
    report = verified(model, path, batch)
    assert not report.skipped
    assert {layer.path for layer in report.layers if layer.exact} == {
        path
        for path, how in converted_products(model, style).items()
        if how == "integer" and path.startswith("layers.")
    }


def converted_products(model: nn.Module, style: str) -> dict[str, str]:
    converted: Any = lowbit.convert(model, exporter.STYLES[style])
    return converted.__dict__["_lowbit_converted"].products


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_layer_with_every_preset(preset: str, style: str, tmp_path: Path) -> None:
    check_layers(ONE_OF_EACH, PRESETS[preset](), style, tmp_path / "model.onnx")


@pytest.mark.parametrize("style", STYLES)
def test_every_way_to_call_a_layer(style: str, tmp_path: Path) -> None:
    check_layers(THE_REST, PRESETS["w8a8"](), style, tmp_path / "model.onnx")
