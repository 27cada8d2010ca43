"""verify: of a file with a single number changed it says where."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from exporting import STYLES
from lowbit.export.verify import verify
from verifying import Exports, by_name, constant, node_of, set_constant, tampered


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
