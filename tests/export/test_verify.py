"""verify: a file that computes what the model does is ok; of one with a single number changed it says where."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import numpy_helper
from torch import Tensor, nn

import lowbit
from lowbit.export import comparison, probe, runtime
from lowbit.export.comparison import compare_codes, compare_values
from lowbit.export.onnx import export_onnx
from lowbit.export.recording import Given, recording
from lowbit.export.verification import Codes, Layer, Optimised, Output, Probe, Values, Verification
from lowbit.export.verification import Tensor as Line
from lowbit.export.verify import verify
from lowbit.nn.coded import CodedActivation
from models.small import Projections, Tied, all_state, assert_same_states, mlp

STYLES = ("qdq", "integer")


class ConvNet(nn.Module):
    """Folded batch norms, a residual sum, pooling, and an op that is not a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 10)
        self.last = nn.Parameter(torch.randn(5, 10))

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x)).relu()
        x = (self.bn2(self.conv2(x)) + x).relu()
        return F.linear(self.head(self.pool(x).flatten(1)).relu(), self.last)


class Twice(nn.Module):
    """An LSTM and a head that both run twice: the zeros that each begins with are in the file once."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 5, batch_first=True, bidirectional=True), nn.Linear(10, 3)

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.head(self.lstm(left)[0][:, -1]), self.head(self.lstm(right)[0][:, -1])
        return a, a.argmax(-1) + b.argmax(-1)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], str, bool]] = {
    "conv": (ConvNet, lambda: torch.randn(4, 3, 8, 8), "w8a8", True),
    "mlp": (lambda: mlp(64, 32, 32, 10), lambda: torch.randn(6, 64), "w8a8", True),
    "groups": (lambda: mlp(64, 32, 10), lambda: torch.randn(6, 64), "w4a8", True),
    "dynamic": (
        lambda: nn.Sequential(nn.Linear(64, 32), nn.Sigmoid(), nn.Linear(32, 10)),
        lambda: torch.randn(6, 64),
        "w8a8_dynamic",
        True,
    ),
    "clips": (lambda: mlp(64, 32, 32, 10), lambda: torch.randn(6, 64), "w2a2", True),
    "weights": (lambda: mlp(64, 32, 10), lambda: torch.randn(6, 64), "w4", True),
    "lstm": (Twice, lambda: (torch.randn(3, 4, 6), torch.randn(3, 4, 6)), "w8a8", True),
    "untraced": (Projections, lambda: torch.randn(4, 8), "w8a8", False),
    "tied": (Tied, lambda: torch.randint(0, 10, (3, 7)), "w8a8", True),
}


class Exports:
    """Prepared models and their files, each made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.models: dict[str, tuple[nn.Module, Any]] = {}

    def model(self, name: str) -> tuple[nn.Module, Any]:
        if name not in self.models:
            torch.manual_seed(0)
            make, batch_of, recipe, traced = NETWORKS[name]
            model, batch = make(), batch_of()
            args = batch if isinstance(batch, tuple) else (batch,)
            model.train()(*args)  # for the batch norms
            prepared = lowbit.prepare(model, lowbit.recipes.presets()[recipe](), *([batch] if traced else []))
            lowbit.calibrate(prepared, [batch])
            self.models[name] = prepared.eval(), batch
        return self.models[name]

    def __call__(self, name: str, style: str) -> tuple[nn.Module, Path, Any]:
        model, batch = self.model(name)
        path = self.folder / f"{name}-{style}.onnx"
        if not path.exists():
            export_onnx(model, batch, path, style)
        return model, path, batch


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exports:
    return Exports(tmp_path_factory.mktemp("exported"))


def tampered(path: Path, folder: Path, change: Callable[[Any], None]) -> Path:
    """A file in which this was changed."""
    proto = onnx.load(path)
    before = proto.SerializeToString()
    change(proto)
    assert proto.SerializeToString() != before
    other = folder / "tampered.onnx"
    other.write_bytes(proto.SerializeToString())
    return other


def constant(proto: Any, name: str) -> Any:
    return next(tensor for tensor in proto.graph.initializer if tensor.name == name)


def set_constant(proto: Any, name: str, array: Any) -> None:
    constant(proto, name).CopyFrom(numpy_helper.from_array(array, name))


def node_of(proto: Any, quantizer: str) -> Any:
    """The node that gives this quantizer's codes."""
    return next(
        node
        for node in proto.graph.node
        if any((entry.key, entry.value) == ("lowbit.quantizer", quantizer) for entry in node.metadata_props)
    )


def by_name(report: Verification) -> dict[str, Line]:
    return {tensor.name: tensor for tensor in report.tensors}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_good_file_is_ok(name: str, style: str, exported: Exports) -> None:
    model, path, batch = exported(name, style)
    report = verify(model, path, batch)
    assert report.ok, str(report)
    assert (report.style, report.generated, report.missing) == (style, False, ())
    assert report.probe.exact == (not report.probe.wrong)
    quantizers = {module.name for module in lowbit.convert(model).modules() if isinstance(module, CodedActivation)}
    assert set(by_name(report)) == quantizers
    assert (quantizers == set()) == (name == "weights")
    assert all(output.free.agreement == 1 for output in report.outputs)


def test_what_must_be_exact_is_held_to_it(exported: Exports) -> None:
    model, path, batch = exported("conv", "integer")
    report = verify(model, path, batch)
    assert [layer.path for layer in report.layers] == ["conv1", "conv2", "pool", "head"]
    parts: tuple[Any, ...] = (*report.layers, *report.tensors, *report.outputs)
    assert all(part.exact for part in parts)
    assert all(layer.values == Values(layer.values.elements, 0, 0.0, 0.0, math.inf, 1.0) for layer in report.layers)
    assert report.outputs[0].free.differing == 0
    assert report.first == ""
    floats = verify(model, exported("conv", "qdq")[1], batch)
    assert not any(part.exact for part in (*floats.layers, *floats.tensors, *floats.outputs))


def test_softmax_and_its_like_are_not_exact(exported: Exports) -> None:
    model, path, batch = exported("lstm", "integer")
    report = verify(model, path, batch)
    exact = {tensor.name for tensor in report.tensors if tensor.exact}
    assert exact == {"lstm.input_quantizer"}
    assert report.skipped == {"head": "which runs 2 times"}
    assert [output.dtype for output in report.outputs] == ["float32", "int64"]


@pytest.mark.parametrize("style", STYLES)
def test_equal_computations_that_a_file_has_once(style: str, exported: Exports) -> None:
    """Zeros that begin each run of an LSTM; quantizers of one tensor with one scale, by whatever name."""
    lines = by_name(verify(*exported("lstm", style)))
    assert lines["lstm.hidden_quantizer_l0"].calls == 2 * 4
    lines = by_name(verify(*exported("untraced", style)))
    assert list(lines) == ["q.input_quantizer", "k.input_quantizer", "v.input_quantizer"]
    assert all(line.free == Codes(32, 0, 0) for line in lines.values())


def test_which_calls_were_merged_is_found_by_their_codes(exported: Exports) -> None:
    """All begin with zeros, of two quantizers: those of the second run are the ones that the file has dropped."""
    model, path, batch = exported("lstm", "integer")
    file = runtime.File(path)
    converted = lowbit.convert(model)
    with recording(converted) as run, torch.no_grad():
        converted(*batch)
    values = [value for found in file.codes.values() for value in found]
    feeds = {wanted.name: tensor.numpy() for wanted, tensor in zip(file.inputs, batch, strict=True)}
    pairs, missing = comparison.align(run, file, file.run(feeds, values))
    assert missing == []
    for name in ("lstm.hidden_quantizer_l0", "lstm.hidden_quantizer_l0_reverse"):
        assert len(file.codes[name]) == 7
        taken = [pairs[name, number] for number in range(8)]
        assert taken[:4] + taken[5:] == file.codes[name]
        assert taken[4] == taken[0]


@pytest.mark.parametrize("style", STYLES)
def test_scales_of_the_data_are_given_with_their_codes(style: str, exported: Exports, tmp_path: Path) -> None:
    """Behind a sigmoid the scales may differ in a bit, and the product of the same codes is exact all the same."""
    model, path, batch = exported("dynamic", style)
    report = verify(model, path, batch)
    assert report.ok, str(report)
    if style == "integer":
        assert [layer.exact for layer in report.layers] == [True, True]
        assert [tensor.exact for tensor in report.tensors] == [True, False]

    def change(proto: Any) -> None:
        name = next(node.input[1] for node in proto.graph.node if node.op_type == "Div")
        set_constant(proto, name, numpy_helper.to_array(constant(proto, name)) * np.float32(1.01))

    assert verify(model, tampered(path, tmp_path, change), batch).first == "0.input_quantizer"


def test_codes_that_a_file_repeats() -> None:
    few = np.arange(2 * 3 * 4).reshape(2, 3, 4)
    many = few.repeat(2, 1)
    assert np.array_equal(comparison._without_repeats(many, few.shape), few)
    assert comparison._without_repeats(few, few.shape) is few
    many[0, 1, 0] += 1
    assert comparison._without_repeats(many, few.shape) is many
    assert comparison._without_repeats(many, (2, 4, 4)) is many
    assert comparison._without_repeats(many, (2, 24)) is many
    assert comparison._without_repeats(many[:0], few.shape).shape == (0, 6, 4)


@pytest.mark.parametrize("arithmetic", ["float", "integer"])
def test_takes_a_converted_model(arithmetic: str, exported: Exports) -> None:
    model, path, batch = exported("mlp", "qdq" if arithmetic == "float" else "integer")
    assert verify(lowbit.convert(model, arithmetic), path, batch).ok
    other = lowbit.convert(model, "integer" if arithmetic == "float" else "float")
    with pytest.raises(ValueError, match=rf"has style .* is converted to .*; pass the prepared .*{arithmetic}"):
        verify(other, path, batch)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("layer", ["conv1", "conv2", "head"])
def test_one_weight_code_is_found(layer: str, style: str, exported: Exports, tmp_path: Path) -> None:
    model, path, batch = exported("conv", style)

    def change(proto: Any) -> None:
        name = next(t.name for t in proto.graph.initializer if t.name.startswith(f"{layer}.weight_quantizer.codes"))
        codes = numpy_helper.to_array(constant(proto, name)).copy()
        codes.reshape(-1)[0] += -1 if codes.reshape(-1)[0] > 0 else 1
        set_constant(proto, name, codes)

    report = verify(model, tampered(path, tmp_path, change), batch)
    assert not report.ok
    assert report.first == layer
    assert [line.path for line in report.layers if not line.ok] == [layer]
    assert f"they part at {layer};" in " ".join(str(report).split())


@pytest.mark.parametrize("style", STYLES)
def test_what_follows_a_difference_is_not_blamed(style: str, exported: Exports, tmp_path: Path) -> None:
    model, path, batch = exported("conv", style)

    def change(proto: Any) -> None:
        codes = numpy_helper.to_array(constant(proto, "conv1.weight_quantizer.codes"))
        set_constant(proto, "conv1.weight_quantizer.codes", codes[::-1].copy())

    report = verify(model, tampered(path, tmp_path, change), batch)
    lines = by_name(report)
    assert report.first == "conv1"
    assert {name for name, line in lines.items() if line.alone.differing} == {"conv2.input_quantizer"}
    assert {name for name, line in lines.items() if not line.free.differing} == {"conv1.input_quantizer"}


@pytest.mark.parametrize("style", STYLES)
def test_one_scale_is_found(style: str, exported: Exports, tmp_path: Path) -> None:
    model, path, batch = exported("conv", style)

    def change(proto: Any) -> None:
        name = node_of(proto, "conv2.input_quantizer").input[1]
        set_constant(proto, name, numpy_helper.to_array(constant(proto, name)) * np.float32(1.01))

    report = verify(model, tampered(path, tmp_path, change), batch)
    assert not report.ok
    assert report.first == "conv2.input_quantizer"
    assert by_name(report)["conv2.input_quantizer"].alone.largest in (1, 2, 3)


@pytest.mark.parametrize("style", STYLES)
def test_one_clip_bound_is_found(style: str, exported: Exports, tmp_path: Path) -> None:
    model, path, batch = exported("clips", style)

    def change(proto: Any) -> None:
        makers = {output: node for node in proto.graph.node for output in node.output}
        clip = makers[node_of(proto, "2.input_quantizer").input[0]]
        assert clip.op_type == "Clip"
        clip.input[1], clip.input[2] = clip.input[2], clip.input[1]

    report = verify(model, tampered(path, tmp_path, change), batch)
    assert not report.ok
    assert report.first == "2.input_quantizer"


@pytest.mark.parametrize("style", STYLES)
def test_the_last_layer_has_only_the_output_to_show(style: str, exported: Exports, tmp_path: Path) -> None:
    model, path, batch = exported("conv", style)

    def change(proto: Any) -> None:
        name = next(t.name for t in proto.graph.initializer if "linear_0.weight_quantizer.codes" in t.name)
        codes = numpy_helper.to_array(constant(proto, name)).copy()
        codes.reshape(-1)[0] -= 1
        set_constant(proto, name, codes)

    report = verify(model, tampered(path, tmp_path, change), batch)
    assert not report.ok
    assert report.first == f"output {report.outputs[0].name}"
    assert not any(line.alone.differing or line.free.differing for line in report.tensors)


@pytest.mark.parametrize("style", STYLES)
def test_without_activation_quantizers_layers_and_outputs_are_compared(
    style: str, exported: Exports, tmp_path: Path
) -> None:
    model, path, batch = exported("weights", style)

    def change(proto: Any) -> None:
        name = next(t.name for t in proto.graph.initializer if t.name.startswith("0.weight_quantizer.scale"))
        set_constant(proto, name, numpy_helper.to_array(constant(proto, name)) * np.float32(1.01))

    report = verify(model, tampered(path, tmp_path, change), batch)
    assert not report.ok
    assert report.tensors == ()
    assert report.first == "0"
    assert "no quantized activations to compare" in str(verify(model, path, batch))


def test_a_file_of_another_model(exported: Exports) -> None:
    model, _, batch = exported("mlp", "qdq")
    report = verify(model, exported("clips", "qdq")[1], batch)
    assert not report.ok
    assert report.first == "0.input_quantizer"
    other, _ = exported.model("untraced")
    with pytest.raises(RuntimeError, match=r"does not run on inputs generated from .*mlp-qdq.*; pass inputs"):
        verify(other, exported("mlp", "qdq")[1])


def test_what_only_one_side_has(exported: Exports, tmp_path: Path) -> None:
    model, path, batch = exported("mlp", "integer")

    def rename(proto: Any) -> None:
        node = node_of(proto, "2.input_quantizer")
        entry = next(entry for entry in node.metadata_props if entry.key == "lowbit.quantizer")
        entry.value = "other.input_quantizer"

    report = verify(model, tampered(path, tmp_path, rename), batch)
    assert report.missing == (
        "other.input_quantizer is in the file, but not in the model",
        "2.input_quantizer is in the model, but not in the file",
    )
    assert not report.ok
    assert "one has what the other lacks" in str(report)
    assert all(layer.ok for layer in report.layers)

    def repeat(proto: Any) -> None:
        node = node_of(proto, "2.input_quantizer")
        again = copy.deepcopy(node)
        again.output[0], again.name = "again", "again"
        proto.graph.node.append(again)

    report = verify(model, tampered(path, tmp_path, repeat), batch)
    assert report.missing == ("2.input_quantizer quantizes 1 times in the model, 2 times in the file",)

    def double(proto: Any) -> None:
        node, output = onnx.helper.make_node("Add", ["linear"] * 2, ["doubled"]), proto.graph.output[0]
        node.input[:] = [output.name] * 2
        proto.graph.node.append(node)
        added = copy.deepcopy(output)
        added.name = "doubled"
        proto.graph.output.append(added)

    report = verify(model, tampered(path, tmp_path, double), batch)
    assert report.missing == ("the model has 1 outputs, the file 2",)
    assert not report.ok


def test_outputs_of_other_shapes(exported: Exports, tmp_path: Path) -> None:
    model, path, batch = exported("mlp", "qdq")

    def cut(proto: Any) -> None:
        output = proto.graph.output[0]
        proto.graph.initializer.extend(
            numpy_helper.from_array(np.asarray(value, np.int64), name)
            for name, value in (("from", [0]), ("to", [3]), ("along", [1]))
        )
        proto.graph.node.append(onnx.helper.make_node("Slice", [output.name, "from", "to", "along"], ["cut"]))
        output.name = "cut"
        output.type.tensor_type.shape.dim[1].dim_value = 3

    report = verify(model, tampered(path, tmp_path, cut), batch)
    assert report.missing == ("output cut is float32 (6, 10) in the model, float32 (6, 3) in the file",)
    assert report.outputs == ()
    assert not report.ok
    assert "no outputs to compare" in str(report)


def saturating(model: Any, feeds: Any, optimise: bool) -> dict[str, Any]:
    """What a processor without VNNI makes of it: pairs of products in 16 bits."""
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    pairs = feeds["a"].astype(np.int64) * int(weights["w"].reshape(-1)[0])
    pairs = np.pad(pairs, ((0, 0), (0, 1))).reshape(5, -1, 2).sum(-1).clip(-(2**15), 2**15 - 1)
    return {"MatMulInteger": pairs.sum(-1)}


def test_a_processor_that_saturates_is_reported(exported: Exports, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "run_probe", saturating)
    found = probe.probe()
    assert not found.exact
    assert any("255 x 127 (uint8 x int8)" in text and "not 2169795" in text for text in found.wrong)
    assert not any("127 x 127" in text.replace("255 x 127", "") for text in found.wrong)
    report = verify(*exported("mlp", "integer"))
    assert not report.probe.exact
    assert "NOT exact on this processor (some processors saturate" in " ".join(str(report).split())
    assert json.loads(report.to_json())["probe"]["exact"] is False


def test_a_processor_that_is_exact_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def right(model: Any, feeds: Any, optimise: bool) -> dict[str, Any]:
        weight = int(numpy_helper.to_array(model.graph.initializer[0]).reshape(-1)[0])
        return {"MatMulInteger": feeds["a"].astype(np.int64).sum(-1) * weight, "QLinearConv": np.full((1, 2), 100)}

    monkeypatch.setattr(probe, "run_probe", right)
    assert probe.probe() == Probe(True)
    assert str(Probe(True)) == "ONNX Runtime's products of 8-bit integers are exact on this processor"


def test_the_probe_runs_every_operator() -> None:
    feeds = {"a": np.full((5, 67), 1, np.uint8), "c": np.full((1, 67, 4, 4), 1, np.uint8)}
    for optimise in (False, True):
        outputs = probe.run_probe(probe._model("uint8", "int8", 1, 67), feeds, optimise)
        assert set(outputs) == {"MatMulInteger", "ConvInteger", "QLinearMatMul", "QLinearConv"}
        assert all((array == (67 if name.endswith("Integer") else 100)).all() for name, array in outputs.items())


def test_what_the_optimisations_do_is_reported(exported: Exports) -> None:
    report = verify(*exported("conv", "qdq"))
    assert report.optimised.error == ""
    assert list(report.optimised.outputs) == [output.name for output in report.outputs]
    assert report.optimised.removed
    assert report.optimised.added
    assert "ONNX Runtime's optimisations" in str(report)
    assert all(count > 0 for ops in (report.optimised.removed, report.optimised.added) for count in ops.values())


def test_optimisations_that_fail_are_reported(exported: Exports, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("no kernel of that kind")

    monkeypatch.setattr(runtime.File, "run_optimised", fail)
    report = verify(*exported("mlp", "qdq"))
    assert report.ok
    assert report.optimised == Optimised({}, {}, {}, "no kernel of that kind")
    assert "does not run the file: no kernel of that kind" in " ".join(str(report).split())


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", ["conv", "lstm", "tied"])
def test_generated_inputs(name: str, style: str, exported: Exports) -> None:
    model, path, _ = exported(name, style)
    report = verify(model, path)
    assert report.ok, str(report)
    assert report.generated
    assert all(shape[0] == 4 for shape in report.inputs.values())
    assert f"generated inputs {next(iter(report.inputs))} (4, " in " ".join(str(report).split())
    assert verify(model, path) == report


class Masked(nn.Module):
    """Every kind of input, by name only."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(2, 64), nn.Linear(64, 4)

    def forward(self, *, ids: Tensor, attention_mask: Tensor, dropped: Tensor, scale: Tensor) -> Tensor:
        x = self.embedding(ids) * scale.unsqueeze(-1)
        x = x.masked_fill(attention_mask.unsqueeze(-1) == 0, 0).masked_fill(dropped.unsqueeze(-1), 0)
        return self.head(x.sum(1) / (dropped.sum(1, keepdim=True)))


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path, dict[str, Tensor]]:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("masked") / "masked.onnx"
    batch = {
        "ids": torch.randint(0, 2, (3, 6)),
        "attention_mask": torch.ones(3, 6, dtype=torch.int64),
        "dropped": torch.rand(3, 6) > 0.5,
        "scale": torch.rand(3, 6) + 0.5,
    }
    model = lowbit.prepare(Masked(), lowbit.recipes.w8a8(), batch)
    lowbit.calibrate(model, [batch])
    export_onnx(model.eval(), batch, path, "integer")
    return model, path, batch


def test_inputs_by_name(masked: tuple[nn.Module, Path, dict[str, Tensor]]) -> None:
    model, path, batch = masked
    assert verify(model, path, dict(reversed(batch.items()))).ok
    report = verify(model, path)
    assert report.ok, str(report)
    assert report.inputs == dict.fromkeys(("ids", "attention_mask", "dropped", "scale"), (4, 6))


def test_wrong_inputs(masked: tuple[nn.Module, Path, dict[str, Tensor]], exported: Exports) -> None:
    model, path, batch = masked
    with pytest.raises(
        ValueError, match=r"inputs holds 1 tensors, but .* takes 4: ids \(batch, 6\) int64, attention_m"
    ):
        verify(model, path, {"ids": batch["ids"]})
    with pytest.raises(ValueError, match=r"scale has shape \(2, 6\), but .* takes scale \(batch, 6\) float32; pass"):
        verify(model, path, batch | {"scale": batch["scale"][:2]})
    with pytest.raises(TypeError, match=r"inputs: scale is float64, but .* takes scale \(batch, 6\) float32"):
        verify(model, path, batch | {"scale": batch["scale"].double()})
    model, path, batch = exported("conv", "qdq")
    for wrong in (batch[:, :2], batch[0], batch.unsqueeze(0)):
        with pytest.raises(
            ValueError, match=r"x has shape .* takes x \(batch, 3, 8, 8\) float32; pass a batch of that"
        ):
            verify(model, path, wrong)


def test_files_that_are_none(exported: Exports, tmp_path: Path) -> None:
    model, path, batch = exported("mlp", "qdq")
    with pytest.raises(FileNotFoundError, match=r"nothing.onnx: there is no such file; write it with lowbit"):
        verify(model, tmp_path / "nothing.onnx", batch)
    (tmp_path / "text.onnx").write_text("not a file of that kind")
    with pytest.raises(ValueError, match=r"text.onnx is not an ONNX file"):
        verify(model, tmp_path / "text.onnx", batch)
    proto = onnx.load(path)
    del proto.metadata_props[:]
    (tmp_path / "other.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(ValueError, match=r"other.onnx was not written by lowbit.export_onnx: .*'lowbit.style'"):
        verify(model, tmp_path / "other.onnx", batch)
    broken = tampered(path, tmp_path, lambda proto: setattr(proto.graph.node[0], "op_type", "Nonsense"))
    with pytest.raises(RuntimeError, match=r"ONNX Runtime \S+ can't run .*tampered.onnx: .*Nonsense"):
        verify(model, broken, batch)


def test_a_model_that_is_not_ours(exported: Exports) -> None:
    with pytest.raises(ValueError, match="prepare"):
        verify(mlp(64, 32, 10), exported("mlp", "qdq")[1])


def test_nothing_of_the_model_changes(exported: Exports) -> None:
    model, path, batch = exported("conv", "integer")
    converted = lowbit.convert(model)
    state, inputs, seed = all_state(converted), batch.clone(), torch.random.get_rng_state()
    verify(converted, path, batch)
    verify(converted, path)
    assert_same_states(all_state(converted), state)
    assert torch.equal(batch, inputs)
    assert torch.equal(torch.random.get_rng_state(), seed)
    assert_clean(converted)


def assert_clean(model: nn.Module) -> None:
    """No hook, and no attribute of an instance where its class has the method."""
    for module in model.modules():
        assert not module._forward_hooks
        assert not {"forward", "codes"} & set(vars(module))
        if (product := vars(module).get("product")) is not None:
            assert product.__module__ == "lowbit.nn.integer"


def test_recording_ends_with_an_error(exported: Exports) -> None:
    model, batch = exported.model("conv")
    converted = lowbit.convert(model)
    with pytest.raises(AssertionError), recording(converted):
        assert_clean(converted)
    with pytest.raises(RuntimeError), recording(converted):
        converted(batch[:, :2])
    assert_clean(converted)
    assert torch.equal(converted(batch), lowbit.convert(model)(batch))


def test_an_error_of_the_model_is_its_own(exported: Exports, monkeypatch: pytest.MonkeyPatch) -> None:
    model, path, batch = exported("mlp", "qdq")
    converted = lowbit.convert(model, "float")

    def fail(*args: Any) -> None:
        raise KeyError("of the model")

    handle = converted[0].register_forward_pre_hook(fail)
    with pytest.raises(KeyError, match="of the model"):
        verify(converted, path, batch)
    handle.remove()
    assert_clean(converted)
    assert verify(converted, path, batch).ok


def test_given_codes_go_on_and_own_codes_are_kept(exported: Exports) -> None:
    model, batch = exported.model("mlp")
    converted = lowbit.convert(model)
    with recording(converted) as free, torch.no_grad():
        wanted = converted(batch)
    own = free.calls["2.input_quantizer"][0].codes
    given = {("2.input_quantizer", 0): Given(torch.zeros_like(own.q))}
    with recording(converted, given) as alone, torch.no_grad():
        got = converted(batch)
    assert torch.equal(alone.calls["2.input_quantizer"][0].codes.q, own.q)
    assert not torch.equal(alone.calls["4.input_quantizer"][0].codes.q, free.calls["4.input_quantizer"][0].codes.q)
    assert not torch.equal(got, wanted)
    assert alone.integer == {"0", "2", "4"}
    assert [event if isinstance(event, str) else event.name for event in free.events] == [
        text for layer in "024" for text in (f"{layer}.input_quantizer", layer)
    ]


def test_json(exported: Exports) -> None:
    report = verify(*exported("conv", "integer"))
    data = json.loads(report.to_json())
    assert data == report.to_dict()
    assert data["ok"] is True
    assert data["tensors"][0]["free"] == {"elements": 768, "differing": 0, "largest": 0, "share": 0.0}
    assert data["outputs"][0]["free"]["decibels"] == "inf"
    assert data["inputs"] == {"x": [4, 3, 8, 8]}
    assert {field.name for field in dataclasses.fields(report)} <= set(data)


def test_the_table(exported: Exports) -> None:
    text = str(verify(*exported("conv", "integer")))
    flat = " ".join(text.split())
    assert flat.startswith("the file computes what the model computes: given equal codes before them, all ")
    assert "the outputs are equal to the bit" in flat
    assert "style integer, ONNX Runtime" in flat
    for name in ("conv1.input_quantizer", "add_0.input_quantizer", "linear_0.input_quantizer", "pool", "head"):
        assert sum(line.startswith(f"{name} ") for line in text.splitlines()) == 1
    assert max(map(len, text.splitlines())) <= 120


EQUAL = Values(10, 0, 0.0, 0.0, math.inf, 1.0)


def report_of(**fields: Any) -> Verification:
    kept: dict[str, Any] = {
        "path": "m.onnx",
        "style": "qdq",
        "runtime": "1",
        "generated": False,
        "inputs": {},
        "tensors": (),
        "layers": (),
        "outputs": (Output("y", "float32", EQUAL, EQUAL, False),),
        "missing": (),
        "skipped": {},
        "first": "",
        "optimised": Optimised({}, {}, {}),
        "probe": Probe(True),
    }
    return Verification(**{**kept, **fields})


def line(
    name: str = "x", *, differing: int = 0, largest: int = 0, bits: int = 8, exact: bool = False, dtype: str = "float32"
) -> Line:
    codes = Codes(100_000, differing, largest)
    return Line(name, dtype, bits, 1, codes, codes, exact)


def test_a_long_table_shows_what_differs() -> None:
    path = ".".join(["encoder", "layers", "attention", "projection"] * 4)
    tensors = tuple(line(f"{path}.{i}.input_quantizer", differing=i == 70, largest=i == 70) for i in range(100))
    layers = tuple(
        Layer(f"{path}.{i}", "float32", dataclasses.replace(EQUAL, differing=int(i == 9)), False) for i in range(60)
    )
    text = str(report_of(tensors=tensors, layers=layers, first=tensors[70].name)).splitlines()
    assert max(map(len, text)) <= 120
    assert [row.split()[0].endswith("projection.70.input_quantizer") for row in text if "input_quantizer" in row] == [
        True
    ]
    assert "and 99 quantized tensors, 9,900,000 codes, without a difference" in text
    assert "and 59 layers whose outputs are equal to the bit" in text
    few = str(report_of(tensors=tensors[:40])).splitlines()
    assert sum("input_quantizer" in row for row in few) == 40
    assert not any("without a difference" in row for row in few)


def small(*differing: int) -> list[Line]:
    """Tensors of five codes."""
    return [
        Line(f"small {number}", "float32", 8, 1, Codes(5, count, min(count, 1)), Codes(5, count, min(count, 1)), False)
        for number, count in enumerate(differing)
    ]


@pytest.mark.parametrize(
    ("tensors", "bad"),
    [
        ([line()], []),
        ([line(differing=10, largest=1)], []),
        ([line(differing=11, largest=1)], ["x"]),
        ([line(differing=1, largest=2)], ["x"]),
        ([line(differing=1, largest=1, exact=True)], ["x"]),
        ([line(differing=2560, largest=1, bits=16)], []),
        ([line(differing=2561, largest=1, bits=16)], ["x"]),
        ([line(differing=10_000, largest=1, dtype="float16")], []),
        ([line(differing=10_001, largest=1, dtype="float16")], ["x"]),
        ([line(differing=100_000, largest=1, bits=16, dtype="float16")], []),
        (small(1), []),
        (small(2), ["small 0"]),
        ([Line("free only", "float32", 8, 1, Codes(5, 5, 9), Codes(5, 0, 0), True)], []),
        # One share for all codes together, whichever tensors they are of.
        ([line("a"), line("b", differing=20, largest=1)], []),
        ([line("a"), line("b", differing=21, largest=1)], ["b"]),
        ([line("a", differing=9, largest=1), line("b", differing=12, largest=1)], ["b"]),
        ([line("a"), *small(5, 5)], []),
        (small(0, 1, 1), ["small 1", "small 2"]),
        # But not for a larger step, for what is exact, or with codes of finer grids.
        ([line("a"), line("b", differing=1, largest=2)], ["b"]),
        ([line("a"), line("b", differing=1, largest=1, exact=True)], ["b"]),
        ([line("a", bits=16), line("b", differing=11, largest=1)], ["b"]),
    ],
)
def test_the_rule_for_codes(tensors: list[Line], bad: list[str]) -> None:
    report = report_of(tensors=tuple(tensors))
    assert report.ok is (not bad)
    assert [row.split("  ")[0] for row in str(report).splitlines() if row.endswith("<-")] == bad


def test_the_share_of_each_tensor_is_told() -> None:
    report = report_of(tensors=(line("a"), line("b", differing=20, largest=1)))
    assert report.ok
    assert [tensor["alone"]["share"] for tensor in report.to_dict()["tensors"]] == [0.0, 2e-4]
    assert "0.02 %" in str(report)


@pytest.mark.parametrize(
    ("relative", "dtype", "exact", "ok"),
    [
        (0.9e-4, "float32", False, True),
        (1.1e-4, "float32", False, False),
        (0.9e-2, "float16", False, True),
        (1e-9, "float32", True, False),
    ],
)
def test_the_rule_for_values(relative: float, dtype: str, exact: bool, ok: bool) -> None:
    values = dataclasses.replace(EQUAL, differing=1, largest=relative, relative=relative, decibels=80.0)
    assert report_of(layers=(Layer("a", dtype, values, exact),)).ok is ok
    assert report_of(outputs=(Output("y", dtype, EQUAL, values, exact),)).ok is ok
    assert report_of(outputs=(Output("y", dtype, values, EQUAL, exact),)).ok


def test_the_rule_for_outputs() -> None:
    flipped = dataclasses.replace(EQUAL, differing=2, largest=1.0, relative=0.1, decibels=9.0, agreement=0.9)
    report = report_of(outputs=(Output("y", "float32", flipped, EQUAL, False),))
    assert not report.ok
    text = " ".join(str(report).split())
    assert text.startswith("layer by layer the file computes what the model computes, but NOT as a whole")
    assert "argmax agrees on 90 % of the rows" in text
    assert not report_of(missing=("x is in the file, but not in the model",)).ok
    assert report_of(outputs=(Output("i", "int64", EQUAL, flipped, False),)).ok
    assert not report_of(outputs=(Output("i", "int64", flipped, EQUAL, False),)).ok


def test_comparisons_of_codes_can_fail() -> None:
    a = np.asarray([0, 255, 7], np.uint8)
    assert compare_codes(a, a.astype(np.int32)) == Codes(3, 0, 0)
    assert compare_codes(a, np.asarray([255, 0, 7], np.uint8)) == Codes(3, 2, 255)
    assert compare_codes(a, np.asarray([0, 254, 7], np.int32)).share == 1 / 3
    assert compare_codes(a[:0], a[:0]) == Codes(0, 0, 0)
    assert Codes(0, 0, 0).share == 0
    assert Codes(2, 1, 1) + Codes(3, 1, 4) == Codes(5, 2, 4)


def test_comparisons_of_values_can_fail() -> None:
    a = np.asarray([[1.0, 2.0], [4.0, 3.0]], np.float32)
    assert compare_values(a, a) == Values(4, 0, 0.0, 0.0, math.inf, 1.0)
    b = a.copy()
    b[1] = [3.0, 4.0]
    found = compare_values(b, a)
    assert (found.differing, found.largest, found.relative, found.agreement) == (2, 1.0, 0.25, 0.5)
    assert found.decibels == pytest.approx(10 * math.log10(30 / 2))
    nudged = compare_values(np.nextafter(a, np.float32(9)), a)
    assert (nudged.differing, nudged.agreement) == (4, 1.0)
    assert 130 < nudged.decibels < 160


def test_sums_that_cancel_are_as_close_as_their_terms() -> None:
    """s + s - 2 s is 0 in one order, and with a product that is not rounded it is not."""
    a, b = np.asarray([[3e-8, 0.0]], np.float32), np.zeros((1, 2), np.float32)
    assert compare_values(a, b).relative == math.inf
    assert compare_values(a, b, terms=0.5).relative == pytest.approx(6e-8)
    assert compare_values(a, b + 2, terms=0.5).relative == 1.0
    assert compare_values(a, b, terms=0.5).agreement == 1.0


def test_the_terms_of_a_layer(exported: Exports) -> None:
    """The largest input, quantized, times the largest weight; products of integers have no need of them."""
    model, batch = exported.model("mlp")
    converted: Any = lowbit.convert(model, "float")
    wide = batch.clone()
    wide[0, 0], wide[1, 1] = 1e30, math.inf
    with recording(converted) as run, torch.no_grad():
        converted(wide)
        largest = converted[0].input_quantizer(wide).abs().max() * converted[0].weight_quantizer().abs().max()
    assert list(run.terms) == ["0", "2", "4"]
    assert run.terms["0"] == pytest.approx(float(largest))
    assert run.terms["0"] < 100
    converted = lowbit.convert(model)
    with recording(converted) as run, torch.no_grad():
        converted(batch)
    assert run.terms == {}


def test_two_values_that_only_the_order_of_a_sum_tells_apart() -> None:
    eps = float(np.finfo(np.float32).eps)
    row = np.asarray([[3.0, 3.0 * (1 + 4 * eps), -1.0]], np.float32)
    assert compare_values(row[:, [1, 0, 2]], row).agreement == 1.0
    row = np.asarray([[3.0, 3.0 * (1 + 16 * eps), -1.0]], np.float32)
    assert compare_values(row[:, [1, 0, 2]], row).agreement == 0.0


def test_values_that_are_no_numbers() -> None:
    a = np.asarray([np.nan, np.inf, -np.inf, 0.0], np.float32)
    assert compare_values(a, a).differing == 0
    assert compare_values(a * np.float32(1), np.asarray([np.nan, np.inf, -np.inf, -0.0], np.float32)).differing == 0
    found = compare_values(a, np.asarray([1.0, np.inf, np.inf, 0.0], np.float32))
    assert (found.differing, found.largest, found.relative, found.decibels) == (2, math.inf, math.inf, -math.inf)
    assert compare_values(np.ones(3), np.zeros(3)).relative == math.inf
    assert compare_values(np.ones(3), np.zeros(3)).decibels == -math.inf
    for empty in (np.zeros((0, 3)), np.zeros((3, 0))):
        assert compare_values(empty, empty) == Values(0, 0, 0.0, 0.0, math.inf, 1.0)
    assert compare_values(np.asarray(1.0), np.asarray(2.0)).agreement == 0.0
    assert compare_values(np.asarray([1, 2, 3, 4]), np.asarray([1, 2, 3, 5])).agreement == 0.75
    assert compare_values(np.asarray([True, False]), np.asarray([True, True])).differing == 1


@pytest.fixture
def in_place() -> Iterator[nn.Module]:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(64, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x.mul_(2))

    return Adds()


def test_inputs_that_the_model_changes_in_place(in_place: nn.Module, tmp_path: Path) -> None:
    batch = torch.randn(3, 64)
    model = lowbit.prepare(in_place, lowbit.recipes.w8a8(), batch.clone())
    lowbit.calibrate(model, [batch.clone()])
    export_onnx(model.eval(), batch.clone(), tmp_path / "m.onnx", "integer")
    kept = batch.clone()
    assert verify(model, tmp_path / "m.onnx", batch).ok
    assert torch.equal(batch, kept)


def test_half_precision(tmp_path: Path) -> None:
    model, batch = mlp(64, 32, 10).half(), torch.randn(5, 64).half()
    prepared = lowbit.prepare(model, lowbit.recipes.w8a8(), batch)
    lowbit.calibrate(prepared, [batch])
    for style in STYLES:
        export_onnx(prepared.eval(), batch, tmp_path / "half.onnx", style)
        report = verify(prepared, tmp_path / "half.onnx")
        assert report.ok, str(report)
        assert report.outputs[0].dtype == "float16"
