"""export_onnx: every kind of layer and quantizer, and what is in a file and what is not."""

from __future__ import annotations

import itertools
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import lowbit
from converting import prepared
from exporting import STYLES, constants, exported, nodes, verified
from lowbit import EMA, PerBlock, PerChannel, PerGroup, QuantSpec, Recipe, Rule
from lowbit.export import onnx as exporter
from lowbit.export.onnx import export_onnx
from lowbit.export.verify import verify
from lowbit.nn.coded import CodedWeight
from lowbit.scale import NotCalibratedError
from models.networks import Twice
from models.small import Joined, Projections, Residual, Tied, all_state, assert_same_states, images, mlp
from nn.layers import LAYERS, batch_of

PRESETS = lowbit.recipes.presets()
# torch pads an uneven 'same' by a copy, and projects without oneDNN; it says so.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning"),
]


class Many(nn.Module):
    """Layers side by side, each with a batch of its own."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, batches: list[Any]) -> list[Any]:
        pairs = zip(self.layers, batches, strict=True)
        return [layer(*batch) if isinstance(batch, tuple) else layer(batch) for layer, batch in pairs]


# One of each class, small; the rest are ways to call them.
ONE_OF_EACH = [
    *("linear", "conv1d", "conv2d", "conv3d", "conv transpose1d", "conv transpose2d", "conv transpose3d"),
    *("embedding", "bag of means", "transformers conv1d", "avg pool1d", "avg pool2d", "avg pool3d"),
    *("adaptive pool1d", "adaptive pool2d", "adaptive pool3d", "attention", "rnn cell", "lstm cell", "gru cell"),
]
RECURRENT = ["rnn", "lstm", "gru"]
THE_REST = [name for name in LAYERS if name not in [*ONE_OF_EACH, *RECURRENT] and not name.startswith("packed")]


def short(name: str) -> Any:
    """A batch for the layer: of few steps, since a file holds each."""
    batch = batch_of(name)
    return batch[:, :2] if name == "lstm" else batch[:2] if name in ("rnn", "gru", "projected") else batch


def check_layers(names: list[str], recipe: Recipe, style: str, path: Path, drawn: list[str] | None = None) -> None:
    """``drawn``: what is made, in this order, so that a layer has the same weights whichever others are in the file."""
    batches = {name: short(name) for name in drawn or names}
    layers = {name: LAYERS[name]() for name in drawn or names}
    batch = ([batches[name] for name in names],)
    model = prepared(Many([layers[name] for name in names]), recipe, batch)
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


def layers_of(preset: str) -> list[str]:
    """Recurrent layers take long to export; so all of them with one preset, and with the others one in turn."""
    number = list(PRESETS).index(preset)
    return [*ONE_OF_EACH, *(RECURRENT if preset == "w8a8" else [RECURRENT[number % 3]])]


def layers_in(preset: str, style: str) -> list[str]:
    """With one preset all in both styles; with the others each in one style, which changes from preset to preset."""
    names, number, first = layers_of(preset), list(PRESETS).index(preset), STYLES.index(style)
    if preset == "w8a8":
        return names
    recurrent = names[-1:] if (number // 3 + first) % 2 else []
    return [*ONE_OF_EACH[(number + first) % 2 :: 2], *recurrent]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_layer_with_every_preset(preset: str, style: str, tmp_path: Path) -> None:
    check_layers(layers_in(preset, style), PRESETS[preset](), style, tmp_path / "model.onnx", layers_of(preset))


def test_every_pair_is_in_a_file() -> None:
    found = [(preset, style, name) for preset in PRESETS for style in STYLES for name in layers_in(preset, style)]
    names = [*ONE_OF_EACH, *RECURRENT]
    assert {(preset, name) for preset, _, name in found} >= set(itertools.product(PRESETS, ONE_OF_EACH))
    assert {(style, name) for _, style, name in found} == set(itertools.product(STYLES, names))
    assert {(preset, style) for preset, style, _ in found} == set(itertools.product(PRESETS, STYLES))
    others = [each for each in found if each[0] != "w8a8"]
    assert {each[1:] for each in others} == set(itertools.product(STYLES, names))


@pytest.mark.parametrize("style", STYLES)
def test_every_way_to_call_a_layer(style: str, tmp_path: Path) -> None:
    check_layers(THE_REST, PRESETS["w8a8"](), style, tmp_path / "model.onnx")


class Reading(nn.Module):
    """Words, and where they are, to classes; in a dict, with what was left in float."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(20, 16), nn.Embedding(8, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, words: Tensor, places: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        hidden = self.words(words) + self.places(places)
        return {"scores": self.head(hidden) * scale, "rest": (hidden.mean(1), words)}


class SideBySide(nn.Module):
    """Layers, each with a tensor of its own."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        return [layer(x) for layer, x in zip(self.layers, tensors, strict=True)]


class TestForms:
    @pytest.mark.parametrize("style", STYLES)
    def test_arguments_and_outputs_of_any_form(self, style: str, tmp_path: Path) -> None:
        batch = {"words": torch.randint(0, 20, (2, 4)), "places": torch.arange(4).expand(2, 4).int(), "scale": 0.5}
        model = prepared(Reading(), PRESETS["w8a8"](), batch)
        proto = exported(model, batch, tmp_path / "model.onnx", style)
        assert [value.name for value in proto.graph.input] == ["words", "places"]
        assert len(proto.graph.output) == 3
        verified(model, tmp_path / "model.onnx", batch)

    @pytest.mark.parametrize("style", STYLES)
    def test_single_samples(self, style: str, tmp_path: Path) -> None:
        net = SideBySide(
            [
                nn.Linear(8, 4),
                nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"),
                nn.ConvTranspose1d(3, 4, 2),
                nn.AvgPool2d(2, divisor_override=3),
                nn.AvgPool2d(2, 2, 1, ceil_mode=True),
                nn.MaxPool2d(2, 2, 1, ceil_mode=True),
            ]
        )
        samples = ([torch.randn(size) for size in ((8,), (3, 6, 6), (3, 6), (3, 6, 6), (3, 5, 6), (3, 5, 6))],)
        model = prepared(net, PRESETS["w8a8"](), samples)
        exported(model, samples, tmp_path / "model.onnx", style, dynamic_batch=False)
        verified(model, tmp_path / "model.onnx", samples)

    @pytest.mark.parametrize("style", STYLES)
    def test_windows_at_the_end(self, style: str, tmp_path: Path) -> None:
        """With ceil_mode torch leaves out a window that begins in the padding behind, or behind all."""
        sizes = ((2, 2, 1), (2, 2, 0), (3, 2, 1), (1, 2, 0), (2, 3, 1), ((2, 1), (2, 2), (1, 0)))
        net = SideBySide(
            [
                *(
                    nn.AvgPool2d(*size, ceil_mode=True, count_include_pad=count)
                    for size in sizes
                    for count in (False, True)
                ),
                *(nn.MaxPool2d(*size, ceil_mode=True) for size in sizes),
                *(nn.AvgPool1d(2, 2, 1, True), nn.MaxPool1d(2, 2, 1, 2, ceil_mode=True)),
                *(nn.AvgPool3d(2, 2, 1, True), nn.MaxPool3d(2, 2, 1, 1, ceil_mode=True)),
            ]
        )
        batch = ([torch.randn(2, 3, 5, 4)] * 18 + [torch.randn(2, 3, 7)] * 2 + [torch.randn(2, 3, 5, 4, 7)] * 2,)
        model = prepared(net, PRESETS["w8a8"](), batch)
        exported(model, batch, tmp_path / "model.onnx", style)
        verified(model, tmp_path / "model.onnx", batch)

    @pytest.mark.parametrize("style", STYLES)
    @pytest.mark.parametrize("preset", ["w8a8", "w8a8_dynamic", "w2a2"])
    def test_extremes(self, preset: str, style: str, tmp_path: Path) -> None:
        model = prepared(mlp(8, 16, 4), PRESETS[preset](), torch.randn(16, 8))
        exported(model, torch.randn(2, 8), tmp_path / "model.onnx", style)
        rows = [torch.full((8,), value) for value in (0.0, 1e30, -1e30, 1e-30, 1e-42, math.inf, -math.inf)]
        batch = torch.stack([*rows, torch.tensor([math.inf, -1.0, 0.5, -math.inf, 0.0, 1e-3, 2.0, -0.0])])
        verified(model, tmp_path / "model.onnx", batch)
        if preset != "w8a8_dynamic":  # ONNX Runtime takes no scales of no rows
            verified(model, tmp_path / "model.onnx", torch.empty(0, 8))

    @pytest.mark.parametrize("style", STYLES)
    def test_half_precision(self, style: str, tmp_path: Path) -> None:
        net, path = (
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5)),
            tmp_path / "model.onnx",
        )
        for dtype, opset in ((torch.float16, 21), (torch.bfloat16, 22)):
            x = images().to(dtype)
            model = prepared(net.to(dtype), PRESETS["w8a8"](), x)
            proto = exported(model, x, path, style, opset=opset)
            assert {stored.dtype for stored in constants(proto).values() if stored.elements > 5} == {"INT8"}
            if dtype == torch.float16:  # ONNX Runtime has no bfloat16 on processors
                report = verify(model, path, x)
                assert report.ok, str(report)
            else:
                with pytest.raises(ValueError, match=r"ONNX Runtime does not run on processors.*model.float\(\)"):
                    verify(model, path, x)


class TestEdges:
    """One pair of QuantizeLinear and DequantizeLinear for each edge."""

    @pytest.mark.parametrize(
        ("net", "batch", "count"),
        [
            (Projections, (4, 8), 3),  # one tensor that three layers take, and both of a sum
            (Residual, (2, 4, 6, 6), 3),
            (Joined, (2, 3, 6, 6), 5),
            (Twice, (6, 8), 4),
        ],
    )
    def test_what_several_take_is_quantized_once(
        self, net: type[nn.Module], batch: tuple[int, ...], count: int, tmp_path: Path
    ) -> None:
        x = torch.randn(batch)
        model = prepared(net(), PRESETS["w8a8"](), x)
        proto = exported(model, x, tmp_path / "model.onnx")
        quantized = Counter(node.input[0] for node in nodes(proto, "QuantizeLinear"))
        assert set(quantized.values()) == {1}
        values = Counter(node.input[0] for node in nodes(proto, "DequantizeLinear"))
        assert set(values.values()) == {1}
        assert len(quantized) == count
        verified(model, tmp_path / "model.onnx", x)


def code_type(coded: CodedWeight, opset: int) -> str:
    """The smallest type of ONNX that holds the codes"""
    form = coded.form
    bits = form.bits + form.odd
    width = next(width for width in (2, 4, 8, 16, 32) if bits <= width and (width > 2 or opset >= 25))
    return f"{'' if form.signed or form.odd else 'U'}INT{width}"


class TestSizes:
    """A file is what the bits say: codes at their width, and no float weight"""

    WEIGHTS: ClassVar = {
        **{f"{bits} bits": QuantSpec(bits=bits, per=PerChannel(0)) for bits in (2, 3, 4, 5, 8, 9, 16)},
        **{f"{bits} bits, unsigned": QuantSpec(bits=bits, symmetric=False) for bits in (1, 2, 4, 7, 8, 12, 16)},
        **{f"dorefa, {bits} bits": QuantSpec(bits=bits, method="dorefa_weight") for bits in (2, 3, 7, 8, 15, 16)},
        "binary": PRESETS["binary"]().weight,
        "ternary": PRESETS["ternary"]().weight,
        "groups": QuantSpec(bits=4, per=PerGroup(4)),
        "affine groups": QuantSpec(bits=4, per=PerGroup(4), symmetric=False),
        "blocks": QuantSpec(bits=2, per=PerBlock(2, 4)),
        "affine channels": QuantSpec(bits=3, per=PerChannel(0), symmetric=False),
        "signed affine channels": QuantSpec(bits=3, per=PerChannel(0), symmetric=False, signed=True, narrow=True),
    }

    @pytest.mark.parametrize("opset", [21, 25])
    @pytest.mark.parametrize("style", STYLES)
    def test_every_kind_of_weight(self, style: str, opset: int, tmp_path: Path) -> None:
        x_spec = QuantSpec(bits=8, scale_mode=EMA())
        kinds = {name: spec for name, spec in self.WEIGHTS.items() if opset == 21 or spec.bits <= 4}
        rules = [Rule(f"layers.{i}", spec, x_spec) for i, spec in enumerate(kinds.values())]
        batch, path = ([torch.randn(3, 16) for _ in rules],), tmp_path / "model.onnx"
        model = prepared(SideBySide([nn.Linear(16, 12) for _ in rules]), Recipe(rules=rules), batch)
        stored = constants(exported(model, batch, path, style, opset=opset, dynamic_batch=False))
        converted: Any = lowbit.convert(model, exporter.STYLES[style])
        for i, layer in enumerate(converted.layers):
            (codes,) = (
                value for name, value in stored.items() if name.startswith(f"layers.{i}.weight_quantizer.codes")
            )
            wanted = code_type(layer.weight_quantizer, opset)
            assert (codes.dtype, codes.elements) == (wanted, 192), list(kinds)[i]
            assert codes.nbytes == 192 * int(wanted.removeprefix("U").removeprefix("INT")) // 8
        assert max(value.elements for value in stored.values() if value.dtype == "FLOAT") <= 96  # groups of 2
        verified(model, path, batch)

    @pytest.mark.parametrize("style", STYLES)
    def test_what_is_shared_is_there_once(self, style: str, tmp_path: Path) -> None:
        for net, batch, elements in ((Tied(), torch.randint(0, 10, (2, 3)), 80), (Twice(), torch.randn(6, 8), 256)):
            model = prepared(net, PRESETS["w8a8"](), batch)
            stored = constants(exported(model, batch, tmp_path / "model.onnx", style))
            assert [value.elements for value in stored.values()].count(elements) == 1
            verified(model, tmp_path / "model.onnx", batch)


def assert_no_file(folder: Path) -> None:
    assert not list(folder.iterdir())


class Forward(nn.Module):
    """A layer, and what a function makes of its output."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


class TestRefusals:
    @pytest.mark.parametrize(
        ("function", "message"),
        [
            (
                lambda y: y if y.sum() > 0 else -y,
                r"can't export this model: Could not guard on data-dependent.*y.sum\(\) > 0",
            ),
            (lambda y: y * float(y.max()), r"can't export this model: Could not guard on data-dependent.*y.max\(\)"),
            (lambda y: torch.linalg.inv(y.mT @ y), r"No ONNX function found for <OpOverload\(op='aten.linalg_inv_ex'"),
            (lambda y: y.view(4, 4), r"the model runs only with a batch of 4, which its forward makes a constant"),
            (
                lambda y: y if y.shape[0] < 6 else -y,
                r"the model does otherwise with batches above 5; export it with dyn",
            ),
            (lambda y: y[:3] + y[3], r"the model does otherwise with batches below 4"),
        ],
    )
    def test_what_torch_cannot_export(self, function: Any, message: str, tmp_path: Path) -> None:
        model = prepared(Forward(function), PRESETS["w8a8"](), torch.randn(4, 4))
        with pytest.raises(RuntimeError, match=message):
            export_onnx(model, torch.randn(4, 4), tmp_path / "model.onnx")
        assert_no_file(tmp_path)

    def test_layers_without_an_operator(self, tmp_path: Path) -> None:
        for layer, message in (
            (
                nn.AdaptiveAvgPool3d(4),
                r"ONNX has no pooling of windows that differ in size.*\(6, 6, 6\) to \(4, 4, 4\)",
            ),
            (nn.AvgPool3d(2, ceil_mode=True, divisor_override=3), r"AveragePool has no divisor_override"),
        ):
            x = torch.randn(2, 4, 6, 6, 6)
            model = prepared(nn.Sequential(layer), PRESETS["w8a8"](), x)
            with pytest.raises(RuntimeError, match=f"torch {re.escape(torch.__version__)} can't export.*{message}"):
                export_onnx(model, x, tmp_path / "model.onnx")
        assert_no_file(tmp_path)

    def test_inputs(self, tmp_path: Path) -> None:
        path = tmp_path / "model.onnx"
        model = prepared(mlp(4, 4), PRESETS["w8a8"](), torch.randn(2, 4))
        with pytest.raises(ValueError, match="example_inputs is an empty batch; pass at least one sample"):
            export_onnx(model, torch.empty(0, 4), path)
        with pytest.raises(ValueError, match="example_inputs holds no tensor with axes"):
            export_onnx(model, torch.tensor(1.0), path)
        with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
            export_onnx(model, torch.randn(2, 5), path)
        packed = batch_of("packed lstm")
        with pytest.raises(TypeError, match="holds a PackedSequence, which ONNX has no type for"):
            export_onnx(prepared(LAYERS["packed lstm"](), PRESETS["w8a8"](), packed), packed, path)
        assert_no_file(tmp_path)

    def test_models(self, tmp_path: Path) -> None:
        path, x = tmp_path / "model.onnx", torch.randn(2, 4)
        double = prepared(mlp(4, 4).double(), PRESETS["w8a8"](), x.double())
        with pytest.raises(TypeError, match=r"is float64, but ONNX quantizes float32; export model.float\(\)"):
            export_onnx(double, x.double(), path)
        with pytest.raises(ValueError, match=r"not prepared; call lowbit.prepare"):
            export_onnx(mlp(4, 4), x, path)
        with pytest.raises(NotCalibratedError, match=r"no scale yet: 0.input_quantizer"):
            export_onnx(lowbit.prepare(mlp(4, 4), PRESETS["w8a8"](), x), x, path)
        converted = lowbit.convert(prepared(mlp(4, 4), PRESETS["w8a8"](), x), "integer")
        with pytest.raises(ValueError, match="style is 'qdq', but the model is converted to integer arithmetic"):
            export_onnx(converted, x, path)
        half, x = nn.Sequential(nn.Conv2d(3, 4, 3)).bfloat16(), images().bfloat16()
        with pytest.raises(
            RuntimeError, match=r"no model like this one in opset 21: .*Conv.*bfloat16.*; a later opset"
        ):
            export_onnx(prepared(half, PRESETS["w8a8"](), x), x, path)
        assert_no_file(tmp_path)

    def test_options(self, tmp_path: Path) -> None:
        path, x = tmp_path / "model.onnx", torch.randn(2, 4)
        model = prepared(mlp(4, 4), PRESETS["w8a8"](), x)
        with pytest.raises(ValueError, match="style is 'onnx', but it must be one of 'qdq', 'integer'"):
            export_onnx(model, x, path, "onnx")
        for opset in (20, 26):
            with pytest.raises(ValueError, match=f"opset is {opset}, but it must be from 21 to 25"):
                export_onnx(model, x, path, opset=opset)
        assert_no_file(tmp_path)

    def test_without_the_extra(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model = prepared(mlp(4, 4), PRESETS["w8a8"](), torch.randn(2, 4))
        for name in ("onnx_ir", "onnxscript"):
            with monkeypatch.context() as patch:
                patch.setitem(sys.modules, name, None)
                with pytest.raises(ImportError, match=r"pip install 'lowbit\[onnx\]'"):
                    export_onnx(model, torch.randn(2, 4), tmp_path / "model.onnx")
        assert_no_file(tmp_path)


class TestWriting:
    def test_whole_or_not_at_all(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path, x = tmp_path / "model.onnx", torch.randn(2, 4)
        model = prepared(mlp(4, 4), PRESETS["w8a8"](), x)
        export_onnx(model, x, path)
        old = path.read_bytes()

        def fail(*arguments: Any) -> None:
            raise OSError("the disk is full")

        for owner, name in ((os, "fsync"), (Path, "replace")):
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, fail)
                with pytest.raises(OSError, match="the disk is full"):
                    export_onnx(model, x, path, "integer")
        monkeypatch.setattr(exporter, "_LARGEST", 100)
        with pytest.raises(ValueError, match="one ONNX file holds less than 2 GiB"):
            export_onnx(model, x, path, "integer")
        assert path.read_bytes() == old
        assert list(tmp_path.iterdir()) == [path]

    def test_the_model_is_as_it_was(self, tmp_path: Path) -> None:
        """Also a converted one, which may be in training mode: a file has no dropout"""
        net, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4)), torch.randn(2, 8)
        model = prepared(net, PRESETS["w4a8"](), x)
        for given in (model, lowbit.convert(model, "integer").train()):
            before, text = all_state(given), str(given)
            proto = exported(given, x, tmp_path / "model.onnx", "integer")
            assert_same_states(all_state(given), before)
            assert str(given) == text
            assert not nodes(proto, "Dropout")
            verified(given, tmp_path / "model.onnx", x)

    def test_the_same_file_every_time(self, tmp_path: Path) -> None:
        x = torch.randn(2, 8)
        model = prepared(mlp(8, 8, 4), PRESETS["w4a8"](), x)
        for name in ("one", "two"):
            export_onnx(model, x, tmp_path / name, "integer")
        assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()

    def test_what_it_says_of_itself(self, tmp_path: Path) -> None:
        x = torch.randn(2, 8)
        proto = exported(prepared(mlp(8, 4), PRESETS["w8a8"](), x), x, tmp_path / "model.onnx", "integer")
        said = {entry.key: entry.value for entry in proto.metadata_props}
        assert said == {"lowbit.style": "integer", "lowbit.version": lowbit.__version__}
