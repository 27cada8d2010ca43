"""``lowbit train`` under torchrun: the same weights in every process, and those of one process with the whole batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from commanding import command, metrics_of
from compare import assert_same_bits
from lowbit.app.config import TrainConfig
from lowbit.app.processes import Processes, processes
from lowbit.app.run import Run, RunError
from lowbit.app.sharing import rows_of
from lowbit.app.train import train
from lowbit.cli import main

HERE = Path(__file__).parent.parent
ARGUMENTS = ["--model=commanding:make_shared", "--recipe=w8a8", "--float-epochs=2", "--epochs=2"]
TOLERANCE = 1e-5  # of the largest value of a tensor


def torchrun(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE), "GLOO_SOCKET_IFNAME": "lo"}
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    line = [*start, *rendezvous, "-m", "lowbit.cli", "train", *arguments]
    return subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a run of two processes, "two", what it said, and the same run of one, "one"."""
    folder = tmp_path_factory.mktemp("processes")
    done = torchrun(folder, *ARGUMENTS, "--output=two", "--json")
    assert done.returncode == 0, done.stderr
    (folder / "out.json").write_text(done.stdout)
    (folder / "words.txt").write_text(done.stderr)
    answer = command(folder / "alone", "train", *ARGUMENTS, "--output=../one")
    assert answer.code == 0, answer.err
    return folder


def state(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def test_both_end_with_the_same_weights(folder: Path) -> None:
    first, second, kept = (state(folder / name) for name in ("rank0.pt", "rank1.pt", "two/quantized.pt"))
    assert len(first) > 10
    for name, value in first.items():
        assert_same_bits(second[name], value)
        assert_same_bits(kept[name], value)


@pytest.mark.parametrize("step", ["float", "calibrate", "quantized"])
def test_they_train_as_one_process_with_the_whole_batch(folder: Path, step: str) -> None:
    one, two = (state(folder / run / f"{step}.pt") for run in ("one", "two"))
    for name, value in one.items():
        difference = (two[name].double() - value.double()).abs().max()
        assert difference <= TOLERANCE * value.double().abs().max(), name
    if step != "float":  # the images are the same, and so is their maximum
        assert_same_bits(two["0.input_quantizer.scale"], one["0.input_quantizer.scale"])
    found = [metrics_of(folder / run)[step] for run in ("one", "two")]
    if step != "calibrate":
        assert found[1]["history"]["loss"] == pytest.approx(found[0]["history"]["loss"], rel=10 * TOLERANCE)


def test_the_weights_moved(folder: Path) -> None:
    """Else what is above would show nothing."""
    before, after = (state(folder / "two" / f"{step}.pt") for step in ("calibrate", "quantized"))
    assert (after["0.weight"] - before["0.weight"]).abs().max() > 100 * TOLERANCE


def test_one_process_speaks_and_writes(folder: Path) -> None:
    assert json.loads((folder / "out.json").read_text())["ok"] is True
    words = (folder / "words.txt").read_text()
    for once in ("training into two", "quantized: epoch 2/2: loss", "report: two/report.html"):
        assert words.count(once) == 1
    assert len(list((folder / "two" / "tensorboard" / "quantized").glob("events.out.*"))) == 1
    assert json.loads((folder / "two" / "result.json").read_text())["processes"] == 2


def test_an_error_is_said_once(folder: Path) -> None:
    before = (folder / "two" / "result.json").read_bytes()
    done = torchrun(folder, *ARGUMENTS, "--output=two", "--seed=1")
    assert done.returncode == 1
    assert done.stderr.count("holds a run of another config: seed is 1, there 0") == 1
    assert "process 1: " not in done.stderr
    assert (folder / "two" / "result.json").read_bytes() == before


def test_another_number_of_processes_does_not_go_on(tmp_path: Path) -> None:
    config = TrainConfig(model="commanding:make_shared", output=str(tmp_path / "run"))
    Run.begin(config)
    path = tmp_path / "run" / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"processes": 2}))
    with pytest.raises(RunError, match="holds a run of 2 processes, but here are 1"):
        train(config)


def test_a_study_wants_no_torchrun(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert main(["study"]) == 2
    assert "study starts processes of its own; run it without torchrun" in capsys.readouterr().err


def test_what_torchrun_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert processes() == Processes()
    settings = {"TORCHELASTIC_RUN_ID": "x", "RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert processes() == Processes(rank=5, size=8, nodes=2)
    assert processes().trainer_options() == {"devices": 4, "num_nodes": 2, "strategy": "ddp"}


@pytest.mark.parametrize("size", [0, 1, 2, 7, 12])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_rows_are_shared_out(size: int, ranks: int) -> None:
    batch = {"x": torch.randn(size, 3), "y": (torch.arange(size), "word")}
    parts = [rows_of(batch, rank, ranks) for rank in range(ranks)]
    assert torch.equal(torch.cat([part["x"] for part in parts]), batch["x"])
    assert torch.equal(torch.cat([part["y"][0] for part in parts]), batch["y"][0])
    sizes = [len(part["x"]) for part in parts]
    assert max(sizes) - min(sizes) <= 1
