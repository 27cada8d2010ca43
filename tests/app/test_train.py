"""train: the whole way from a float model to a verified file, which goes on from wherever it was stopped."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowbit
from commanding import make
from lowbit.app import fit as fitting
from lowbit.app.config import TrainConfig
from lowbit.app.measure import histograms
from lowbit.app.run import Run, RunError, threads
from lowbit.app.sensitivity import measure_sensitivity
from lowbit.app.train import Event, Result, train
from lowbit.preparation import quantizers
from lowbit.recipes import presets

CONFIG = TrainConfig(
    model="commanding:make", recipe="w2a2", float_epochs=2, epochs=2, batch_size=32, calibration_batches=2
)
STEPS = ["float", "calibrate", "quantized", "export", "verify", "measure", "report"]


@pytest.fixture(scope="module")
def events() -> list[Event]:
    return []


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory, events: list[Event]) -> Result:
    """Of a run that nothing stopped."""
    # The mode that conftest sets for each test, but too late for this one.
    torch.use_deterministic_algorithms(True)
    return train(replace(CONFIG, output=str(tmp_path_factory.mktemp("whole") / "run")), on_event=events.append)


def test_every_step_is_told_and_kept(result: Result, events: list[Event]) -> None:
    assert [event.step for event in events if event.kind == "begin"] == STEPS
    assert [event.step for event in events if event.kind == "end"] == STEPS
    assert list(result.metrics) == list(result.seconds) == STEPS
    kept = json.loads((result.folder / "result.json").read_text())
    assert kept["steps"] == result.metrics
    progress = [event for event in events if event.kind == "progress" and event.step == "quantized"]
    assert [(event.done, event.total) for event in progress] == [(step, 12) for step in range(1, 13)]


def test_metrics(result: Result) -> None:
    metrics = result.metrics
    assert result.ok
    for step in ("float", "calibrate", "quantized"):
        for part in ("held_out", "test"):
            found = metrics[step]["accuracy"][part]
            assert found["of"] == 64
            assert found["percent"] == 100 * found["right"] / 64
    assert metrics["float"]["accuracy"]["test"]["percent"] > 60
    for step in ("float", "quantized"):
        assert [len(metrics[step]["history"][key]) for key in ("loss", "accuracy")] == [2, 2]
    assert metrics["quantized"]["history"]["accuracy"][-1] == metrics["quantized"]["accuracy"]["held_out"]["percent"]
    assert {len(values) for values in metrics["quantized"]["scales"].values()} == {2}
    assert set(metrics["quantized"]["scales"]) == set(metrics["calibrate"]["scales"])
    sizes = metrics["export"]["sizes"]
    assert sizes["model.onnx"] == (result.folder / "model.onnx").stat().st_size
    assert sizes["codes"] < sizes["float"] / 4
    assert len(metrics["measure"]["noise"]) == len(metrics["measure"]["histograms"]) == 4
    assert metrics["measure"]["rules"] == ["clipped_identity"]


def test_files_hold_the_model_that_was_measured(result: Result) -> None:
    model, data = Run.open(result.folder).model()
    images, _ = next(iter(data.test))
    loaded = lowbit.load(result.folder / "model.safetensors", make()[0])
    converted = lowbit.convert(model, "integer")
    assert torch.equal(loaded(images), converted(images))
    assert fitting.accuracy(model, data, data.test) == result.metrics["quantized"]["accuracy"]["test"]["percent"]
    assert not any(quantizer.observing for _, _, quantizer in quantizers(model))
    report = (result.folder / "report.html").read_text()
    assert "commanding:make, w2a2" in report
    assert list((result.folder / "tensorboard" / "quantized").glob("events.out.*"))


class StoppedError(Exception):
    pass


def is_at(step: str, kind: str, done: int = 0) -> Callable[[Event], bool]:
    return lambda event: (event.step, event.kind) == (step, kind) and event.done >= done


@pytest.mark.parametrize(
    "moments",
    [
        [is_at("float", "begin")],
        [is_at("float", "progress", 3), is_at("float", "progress", 9), is_at("calibrate", "begin")],
        [is_at("float", "epoch", 12), is_at("quantized", "begin")],
        [is_at("quantized", "progress", 8), is_at("quantized", "epoch", 12)],
        [is_at("export", "begin"), is_at("verify", "begin"), is_at("report", "begin"), is_at("report", "end")],
    ],
    ids=["at once", "float", "between", "quantized", "later"],
)
def test_stopped_and_resumed_is_the_same(
    tmp_path: Path, result: Result, moments: list[Callable[[Event], bool]]
) -> None:
    config = replace(CONFIG, output=str(tmp_path / "run"))
    for is_moment in moments:

        def stop(event: Event, is_moment: Callable[[Event], bool] = is_moment) -> None:
            if is_moment(event):
                raise StoppedError

        with pytest.raises(StoppedError):
            train(config, on_event=stop)
    again = train(config)
    assert again.metrics == result.metrics


def test_a_full_disk_keeps_what_was_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: Result) -> None:
    config = replace(CONFIG, output=str(tmp_path / "run"))

    def refuse(event: Event) -> None:
        def fsync(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        if is_at("quantized", "begin")(event):
            monkeypatch.setattr(os, "fsync", fsync)

    with pytest.raises(OSError, match="No space left"):
        train(config, on_event=refuse)
    assert not list((tmp_path / "run").rglob(".*.partial"))
    assert list(Run.open(tmp_path / "run").steps) == ["float", "calibrate"]
    monkeypatch.undo()
    assert train(config).metrics == result.metrics


def test_a_folder_of_another_run(tmp_path: Path) -> None:
    lowbit.recipes.w8a8().save(tmp_path / "mine.toml")
    config = replace(CONFIG, output=str(tmp_path / "run"), recipe=str(tmp_path / "mine.toml"))
    Run.begin(config)
    assert Run.begin(config).steps == {}
    assert Run.begin(replace(config, epochs=7)).config.epochs == 7  # nothing is lost with a run that did nothing yet
    run = Run.begin(config)
    run.note("float", {}, 0.0)
    run.write()
    with pytest.raises(RunError, match=r"another config: epochs is 5, there 2; style is 'qdq', there 'integer'\. Name"):
        Run.begin(replace(config, epochs=5, style="qdq"))
    lowbit.recipes.w4().save(tmp_path / "mine.toml")
    with pytest.raises(RunError, match=r"the recipe .* has changed since"):
        Run.begin(config)


def test_a_run_goes_on_with_the_threads_it_began_with(tmp_path: Path) -> None:
    own = replace(CONFIG, output=str(tmp_path / "own"))
    with threads(3):
        assert Run.begin(own).threads == 3
        assert Run.begin(TrainConfig(output=str(tmp_path / "digits"))).threads == 1  # too small for more
    with threads(2):
        assert Run.begin(own).threads == 3


def test_a_damaged_folder(tmp_path: Path) -> None:
    config = replace(CONFIG, output=str(tmp_path / "run"))
    run = Run.begin(config)
    with pytest.raises(RunError, match="not finished: there is no quantized model"):
        run.model()
    run.note("quantized", {}, 0.0)
    with pytest.raises(RunError, match=r"quantized\.pt is missing"):
        run.model()
    (tmp_path / "run" / "result.json").write_text('{"format": 1, "ste')
    with pytest.raises(RunError, match=r"result\.json is damaged"):
        Run.begin(config)


@pytest.mark.parametrize("size", [0, 3000])
def test_a_damaged_checkpoint(size: int, tmp_path: Path) -> None:
    config = replace(CONFIG, output=str(tmp_path / "run"), float_epochs=1, epochs=0)
    Run.begin(config)
    path = tmp_path / "run" / "float" / "last.ckpt"
    path.parent.mkdir()
    torch.save({"state_dict": {"weight": torch.zeros(5000)}}, path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"float.last\.ckpt is damaged; delete it, and the training begins anew"):
        train(config)


def without_length() -> Any:
    model, _ = make()
    batch = torch.randn(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64)
    return model, ((batch for _ in range(3)), [batch], [batch])


def test_training_data_without_a_length(tmp_path: Path) -> None:
    config = replace(CONFIG, model="app.test_train:without_length", output=str(tmp_path / "run"))
    with pytest.raises(TypeError, match=r"training data \(generator\) without a length, which the learning rate needs"):
        train(config)


def test_a_recipe_that_does_not_fit_is_told_before_the_training(tmp_path: Path) -> None:
    recipe = lowbit.Recipe(lowbit.QuantSpec(bits=8), rules=[lowbit.Rule("nolayer")])
    recipe.save(tmp_path / "recipe.toml")
    config = replace(CONFIG, recipe=str(tmp_path / "recipe.toml"), output=str(tmp_path / "run"))
    events: list[Event] = []
    with pytest.raises(ValueError, match="matches nothing in the model"):
        train(config, on_event=events.append)
    assert not [event for event in events if event.kind == "progress"]


def test_a_run_killed_before_its_config_begins_anew(tmp_path: Path) -> None:
    config = replace(CONFIG, output=str(tmp_path / "run"))
    Run.begin(config)
    (tmp_path / "run" / "config.toml").unlink()
    assert Run.begin(config).steps == {}


def test_sensitivity_leaves_the_model_as_it_is(result: Result) -> None:
    model, data = Run.open(result.folder).model()
    told: list[str] = []
    found = measure_sensitivity(model, data, lambda layer, done, total: told.append(layer))
    assert sorted(told) == sorted(line.layer for line in found.lines) == ["0", "4"]
    assert found.quantized == result.metrics["quantized"]["accuracy"]["held_out"]["percent"]
    assert all(quantizer.enabled for _, _, quantizer in quantizers(model))
    # There are two layers: with the first in float, only the second is quantized.
    first = {line.layer: line.accuracy for line in found.lines}["0"]
    for path, _, quantizer in quantizers(model):
        quantizer.enabled = path.startswith("4")
    assert fitting.accuracy(model, data, data.held_out) == first


@pytest.mark.parametrize("name", presets())
def test_histograms_count_every_value(name: str) -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4))
    x = torch.randn(8, 4, 4, 4)
    prepared = lowbit.prepare(model, presets()[name](), x)
    lowbit.calibrate(prepared, [x])
    prepared.eval()
    sizes = {("0", "weight"): 288, ("0", "activation"): 512, ("3", "weight"): 512, ("3", "activation"): 1024}
    found = histograms(prepared, x)
    assert found
    for part in found:
        size = sizes[part.layer, part.tensor]
        assert sum(part.counts) == size
        assert part.codes is None or sum(part.codes) == size
        assert part.edges == sorted(part.edges)
        if part.codes is not None and part.beyond == 0:
            assert part.in_use > 1
