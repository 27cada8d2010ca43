"""The probe: whether this processor multiplies 8-bit integers exactly."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from onnx import numpy_helper

from lowbit.export import probe
from lowbit.export.verification import Probe
from lowbit.export.verify import verify
from verifying import Exports


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
