"""verify: a file that computes what the model does is ok, held to the bit where it must be."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

import lowbit
from exporting import STYLES
from lowbit.export import runtime
from lowbit.export.onnx import export_onnx
from lowbit.export.verification import Codes, Optimised, Values
from lowbit.export.verify import verify
from lowbit.nn.coded import CodedActivation
from models.small import all_state, assert_same_states, mlp
from verifying import NETWORKS, Exports, assert_clean, by_name, constant, set_constant, tampered


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


@pytest.mark.parametrize("arithmetic", ["float", "integer"])
def test_takes_a_converted_model(arithmetic: str, exported: Exports) -> None:
    model, path, batch = exported("mlp", "qdq" if arithmetic == "float" else "integer")
    assert verify(lowbit.convert(model, arithmetic), path, batch).ok
    other = lowbit.convert(model, "integer" if arithmetic == "float" else "float")
    with pytest.raises(ValueError, match=rf"has style .* is converted to .*; pass the prepared .*{arithmetic}"):
        verify(other, path, batch)


def test_half_precision(tmp_path: Path) -> None:
    model, batch = mlp(64, 32, 10).half(), torch.randn(5, 64).half()
    prepared = lowbit.prepare(model, lowbit.recipes.w8a8(), batch)
    lowbit.calibrate(prepared, [batch])
    for style in STYLES:
        export_onnx(prepared.eval(), batch, tmp_path / "half.onnx", style)
        report = verify(prepared, tmp_path / "half.onnx")
        assert report.ok, str(report)
        assert report.outputs[0].dtype == "float16"


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
