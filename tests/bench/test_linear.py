"""The benchmark of the linear layer: it runs, checks before it times, and counts what is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lowbit.bench import __main__ as command
from lowbit.bench.linear import LAYERS, QUICK_SHAPES, Layer, Shape, run_linear
from lowbit.kernels import float_products
from lowbit.nn import linear

CPU = torch.device("cpu")


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float_products, "_has_faster", lambda: True)
    path = tmp_path / "linear.json"
    assert command.main(["--linear", "--quick", "--device", "cpu", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    eager = [layer.name for layer in LAYERS if not layer.compiled]
    assert [(row["network"], row["contender"]) for row in report["rows"]] == [
        (str(shape), name) for shape in QUICK_SHAPES for name in eager
    ]
    out = capsys.readouterr().out
    for row in report["rows"]:
        assert row["contender"] in out
        assert row["status"] == "ok" or row["contender"] == "torchao", row["note"]


def test_two_benchmarks_at_once_are_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        command.main(["--linear", "--models", "--quick", "--device", "cpu"])
    assert exit_.value.code == 2
    assert "--models measures whole networks" in capsys.readouterr().err


def rows_of(*layers: Layer) -> dict[str, Any]:
    rows = run_linear([Shape(64, 96, 32)], [LAYERS[0], *layers], CPU, 1e-9, lambda function, repeats: 1e-3)
    return {row.contender: row for row in next(rows)}


def test_what_is_wrong_is_not_timed() -> None:
    def double(model: nn.Module) -> nn.Module:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= 2
        return model

    def fail(model: nn.Module) -> nn.Module:
        raise RuntimeError("no such thing")

    rows = rows_of(Layer("doubled", double, 25.0), Layer("failing", fail))
    assert (rows["doubled"].status, rows["doubled"].seconds) == ("wrong", None)
    assert rows["failing"].note == "RuntimeError: no such thing"
    assert rows["float"].ratio_to_float == 1


def test_codes_are_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_LEAST", {"cpu": 0})
    ours = next(layer for layer in LAYERS if layer.name == "lowbit w8a8_dynamic")
    rows = rows_of(ours)
    assert rows["float"].kept_bytes == 4 * (64 * 96 + 32 * 96)
    assert rows[ours.name].kept_bytes == 64 * 96 + 32 * 96 + 4 * (64 + 32)
