"""The command line, driven for real: what it prints, writes and returns, and what it says when something is wrong."""

from __future__ import annotations

import gzip
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from commanding import (
    STUDY,
    TINY,
    Command,
    command,
    flags,
    kill_study,
    kill_training,
    metrics_of,
    one_error,
    results_of,
)
from lowbit import cli
from lowbit.recipe import Recipe
from lowbit.recipes import presets, w4a8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a finished run in it, "run", which nothing stopped."""
    folder = tmp_path_factory.mktemp("cli")
    answer = command(folder, "train", *flags(), "--output=run", "--json")
    assert answer.code == 0, answer.err
    (folder / "answer.json").write_text(answer.out)
    (folder / "words.txt").write_text(answer.err)
    return folder


def test_train_answers_json_and_leaves_its_files(folder: Path) -> None:
    answer = json.loads((folder / "answer.json").read_text())
    assert answer["ok"] is True
    assert answer["folder"] == "run"
    assert answer["metrics"] == metrics_of(folder / "run")
    names = {path.name for path in (folder / "run").iterdir()}
    assert {"config.toml", "recipe.toml", "result.json", "model.onnx", "model.safetensors", "report.html"} <= names
    assert not [name for name in names if name.endswith(".partial")]
    assert list((folder / "run" / "tensorboard").rglob("events.out.*"))
    words = (folder / "words.txt").read_text()
    assert "epoch 3/3: loss" in words  # the words are on stderr, as plain lines
    assert "\x1b" not in words


def test_train_again_keeps_everything(folder: Path) -> None:
    before = (folder / "run" / "result.json").read_bytes()
    answer = command(folder, "train", *flags(), "--output=run")
    assert answer.code == 0
    assert answer.out.count("kept from before") == 7
    assert (folder / "run" / "result.json").read_bytes() == before


def test_train_of_another_config_says_what_differs(folder: Path) -> None:
    before = metrics_of(folder / "run")
    answer = command(folder, "train", *flags(epochs=4, seed=1), "--output=run")
    assert answer.code == 1
    message = one_error(answer.err)
    assert "another config: epochs is 4, there 3; seed is 1, there 0" in message
    assert metrics_of(folder / "run") == before


def test_a_config_file_and_flags(folder: Path) -> None:
    (folder / "run.toml").write_text('recipe = "w8a8"\noutput = "run"\nepochs = 7\n')
    answer = command(folder, "train", "--config=run.toml", *flags(), "--json")
    assert answer.code == 0
    assert answer.json["metrics"] == metrics_of(folder / "run")


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--recipe=w9"], "recipe is 'w9', which is no preset"),
        (["--data=imagenet"], "data is 'imagenet', but it must be one of"),
        (["--data=mnist"], "folder is not given"),
        (["--style=int"], "style is 'int'"),
        (["--epochs=-1"], "epochs is -1"),
        (["--rate=nan"], "rate is NaN"),
        (["--held-out=many"], "held_out is 'many'"),
        (["--model=resnet"], "model is 'resnet', but it must be 'convnet' or like"),
        (["--config=none.toml"], "none.toml: there is no such config"),
        (["--config=unknown.toml"], "unknown.toml: TrainConfig has no key 'epoch'; its keys are data, "),
        (["--config=broken.toml"], "broken.toml: this is no TOML text"),
    ],
)
def test_wrong_usage(tmp_path: Path, arguments: list[str], wanted: str) -> None:
    (tmp_path / "unknown.toml").write_text("epoch = 3\n")
    (tmp_path / "broken.toml").write_text("epochs = = 3\n")
    answer = command(tmp_path, "train", *arguments)
    assert answer.code == 2
    assert wanted in one_error(answer.err)
    assert not (tmp_path / "runs").exists()


def write_mnist(folder: Path, *, cut: int) -> None:
    """Four idx files of 10 images, of which the first lacks its last bytes."""
    folder.mkdir()
    for part in ("train", "t10k"):
        images = struct.pack(">4B3I", 0, 0, 8, 3, 10, 8, 8) + bytes(640)
        labels = struct.pack(">4BI", 0, 0, 8, 1, 10) + bytes(range(10))
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(
            gzip.compress(images)[: -cut if part == "train" else None]
        )
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--data=mnist", "--folder=nowhere"], "nowhere does not exist"),
        (["--data=mnist", "--folder=cut"], "train-images-idx3-ubyte.gz"),
        (["--output=file"], "output is file, which is a file"),
        (["--output=file/run"], "file"),
        (["--output=full"], "full holds no run, but thing"),
        (["--model=nowhere.at_all:make"], "there is no module 'nowhere'"),
        (["--model=commanding:fake"], "commanding has no function 'fake'"),
        (["--model=commanding:make_pair"], "the model gives a tuple, but it must give a tensor of scores"),
        (["--model=commanding:make_nothing"], "commanding:make_nothing returned NoneType, but it must return (model"),
    ],
)
def test_what_is_wrong_with_a_run(tmp_path: Path, arguments: list[str], wanted: str) -> None:
    write_mnist(tmp_path / "cut", cut=9)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thing").write_text("mine")
    answer = command(tmp_path, "train", *arguments, "--json")
    assert answer.code == 1
    assert wanted in one_error(answer.err)
    assert answer.json == {"ok": False, "error": one_error(answer.err).removeprefix("error: "), "exit_code": 1}
    assert (tmp_path / "file").read_text() == "mine"


def test_a_diverging_run_keeps_what_was_before(tmp_path: Path) -> None:
    answer = command(tmp_path, "train", *flags(float_epochs=1, quantized_rate=1e9), "--output=run")
    assert answer.code == 1
    message = r"training diverged: .* (nan|inf|not finite) in epoch \d; take a smaller rate than 1e\+09"
    assert re.search(message, one_error(answer.err))
    assert list(metrics_of(tmp_path / "run")) == ["float", "calibrate"]
    answer = command(tmp_path, "inspect", "run", "--no-sensitivity")
    assert "not yet trained" in answer.out


@pytest.fixture
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A disk of 2 MiB; who may not mount one runs the test in a namespace where he may."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        again = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{__file__}::{request.node.name}"]
        if "LOWBIT_NAMESPACE" in os.environ or subprocess.run(["unshare", "-rm", "true"], check=False).returncode != 0:
            pytest.skip("a small disk can't be mounted here: neither as root nor in a namespace")
        done = subprocess.run(["unshare", "-rm", *again], env={**os.environ, "LOWBIT_NAMESPACE": "1"}, check=False)
        assert done.returncode == 0
        pytest.skip("it passed in a namespace of its own")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def fill(disk: Path, left: int) -> Path:
    """A file that leaves so many bytes."""
    free = os.statvfs(disk)
    (disk / "filler").write_bytes(bytes(free.f_bavail * free.f_frsize - left))
    return disk / "filler"


@pytest.mark.parametrize("left", [0, 64 * 1024])
def test_a_full_disk_keeps_what_was_before(folder: Path, disk: Path, left: int) -> None:
    run = disk / "run"
    run.mkdir()
    result = json.loads((folder / "run" / "result.json").read_text())
    result["steps"] = {step: result["steps"][step] for step in ("float", "calibrate")}
    (run / "result.json").write_text(json.dumps(result))
    for name in ("config.toml", "recipe.toml", "float.pt", "calibrate.pt"):
        shutil.copy(folder / "run" / name, run / name)
    filler = fill(disk, left)
    answer = command(folder, "train", *flags(), f"--output={run}")
    assert answer.code == 1
    assert "No space left on device" in one_error(answer.err)
    assert list(metrics_of(run)) == ["float", "calibrate"]
    assert not list(run.rglob(".*.partial"))
    filler.unlink()
    assert command(folder, "train", *flags(), f"--output={run}").code == 0
    assert metrics_of(run) == metrics_of(folder / "run")


def test_a_study_on_a_full_disk(folder: Path, disk: Path) -> None:
    fill(disk, 64 * 1024)
    answer = command(folder, "study", *flags(STUDY, float_epochs=1), f"--output={disk / 'study'}")
    assert answer.code == 1
    assert "No space left on device" in one_error(answer.err)
    assert not list((disk / "study").rglob(".*.partial"))


def test_a_disk_that_can_only_be_read(folder: Path, disk: Path) -> None:
    shutil.copytree(folder / "run", disk / "run")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    answer = command(folder, "train", *flags(), f"--output={disk / 'other'}")
    assert answer.code == 1
    assert "Read-only file system" in one_error(answer.err)
    # What is there can be looked at all the same.
    assert command(folder, "verify", str(disk / "run")).code == 0


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    answer = command(tmp_path, "train", "--data=mnist", "--folder=nowhere", "--debug")
    assert answer.code == 1
    assert "Traceback" in answer.err


def test_killed_and_resumed_is_the_same(folder: Path) -> None:
    assert kill_training(folder, "run", 3, 0) == metrics_of(folder / "run")


@pytest.mark.long
def test_killed_often_and_resumed_is_the_same(folder: Path) -> None:
    for seed, kills in enumerate((1, 2, 4, 5), 1):
        assert kill_training(folder, "run", kills, seed) == metrics_of(folder / "run")
    assert command(folder, "study", *flags(STUDY), "--output=study").code == 0
    for seed, kills in enumerate((1, 2, 4, 5), 1):
        assert results_of(kill_study(folder, kills, seed)) == results_of(folder / "study")


def test_interrupted_says_how_to_go_on(folder: Path) -> None:
    arguments = ["train", *flags(), "--output=stopped"]
    running = Command(folder, arguments)
    running.wait_for(lambda: "quantized: epoch 1/3" in running.out.read_text())
    os.kill(running.process.pid or 0, signal.SIGINT)
    answer = running.wait()
    assert answer.code == 130
    assert f"stopped; what is finished is kept. To go on: lowbit {' '.join(arguments)}" in answer.err
    assert "Traceback" not in answer.err
    answer = command(folder, *arguments)
    assert answer.code == 0
    assert "float: accuracy" in answer.out
    assert metrics_of(folder / "stopped") == metrics_of(folder / "run")


def test_two_at_once_do_not_mix(folder: Path) -> None:
    first = Command(folder, ["train", *flags(epochs=1), "--output=both"])
    first.wait_for(lambda: "float: ..." in first.out.read_text())
    (folder / "second").mkdir()
    second = command(folder / "second", "train", *flags(epochs=1), "--output=../both")
    first.process.kill()
    first.process.join()
    assert second.code == 1
    assert "another process is at work in ../both" in one_error(second.err)


def test_a_terminal_shows_bars(folder: Path) -> None:
    leader, follower = pty.openpty()
    running = Command(folder, ["train", *flags(float_epochs=0, epochs=1), "--output=watched"], os.ttyname(follower))
    shown = b""
    while running.process.is_alive() or select.select([leader], [], [], 0.1)[0]:
        if select.select([leader], [], [], 0.1)[0]:
            shown += os.read(leader, 65536)
    os.close(follower)
    os.close(leader)
    text = re.sub(r"\x1b\[[\d;?]*\w", "", shown.decode())
    assert running.process.exitcode == 0, text
    assert re.search(r"quantized +━+ +\d+ %", text)
    assert "quantized: epoch 1/1: loss" in text


def test_own_model_and_loaders(tmp_path: Path) -> None:
    answer = command(
        tmp_path,
        "train",
        "--model=commanding:make",
        "--recipe=w8a8",
        "--float-epochs=2",
        "--epochs=1",
        "--style=qdq",
        "--json",
    )
    assert answer.code == 0, answer.err
    assert answer.json["folder"] == "runs/make-w8a8"
    assert answer.json["metrics"]["quantized"]["accuracy"]["test"]["percent"] > 50


def test_export_and_verify(folder: Path) -> None:
    answer = command(folder, "export", "run", "other.onnx", "--style=qdq", "--json")
    assert answer.json["bytes"] == (folder / "other.onnx").stat().st_size
    answer = command(folder, "verify", "run", "other.onnx", "--json")
    assert answer.code == 0
    assert answer.json["style"] == "qdq"
    assert command(folder, "export", "run", "other.safetensors").code == 0
    # The file of another run is not this one's: exit code 1.
    other = command(folder, "train", *flags(epochs=1, seed=5), "--output=other", "--style=qdq")
    assert other.code == 0
    answer = command(folder, "verify", "run", "other/model.onnx")
    assert answer.code == 1
    assert "does NOT compute what the model computes" in answer.out


@pytest.mark.parametrize(
    ("arguments", "code", "wanted"),
    [
        (["export", "run", "model.bin"], 1, "model.bin must end in .onnx or .safetensors"),
        (["export", "run", "no/model.onnx"], 1, "no is not a folder"),
        (["export", "run", "model.onnx", "--style=int"], 2, "style is 'int'"),
        (["export", "nowhere", "model.onnx"], 1, "nowhere does not exist"),
        (["verify", "run", "no.onnx"], 1, "no.onnx is not a file"),
        (["verify", "."], 1, ". holds no run"),
        (["inspect", "nowhere"], 2, "nowhere does not exist"),
        (["recipes", "show", "w9"], 2, "there is no recipe 'w9'"),
        (["recipes", "write", "w4", "words.txt"], 2, "words.txt is there already"),
    ],
)
def test_wrong_arguments(folder: Path, arguments: list[str], code: int, wanted: str) -> None:
    answer = command(folder, *arguments)
    assert answer.code == code
    assert wanted in one_error(answer.err)


def test_inspect(folder: Path) -> None:
    answer = command(folder, "inspect", "run", "--json")
    assert answer.code == 0, answer.err
    found = answer.json
    assert len(found["summary"]["lines"]) >= 8
    decibels = [row["snr_db"] for row in found["noise"]]
    assert decibels == sorted(decibels)
    gains = [line["gain"] for line in found["sensitivity"]["lines"]]
    assert gains == sorted(gains, reverse=True)
    # What trained weights would lose in float says nothing: it is measured before they were.
    before = metrics_of(folder / "run")["calibrate"]["accuracy"]["held_out"]["percent"]
    assert found["sensitivity"]["quantized"] == before
    assert "rounded but not yet trained on" in found["note"]
    answer = command(folder, "inspect", "run")
    assert "with only this layer in float" in answer.out
    assert found["note"] in answer.out


def test_inspect_a_config_without_a_run(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('recipe = "w8a8"\nheld_out = 1200\n')
    answer = command(tmp_path, "inspect", "run.toml")
    assert answer.code == 0, answer.err
    assert "calibrated, not trained" in answer.out
    assert not (tmp_path / "runs").exists()


def test_recipes(tmp_path: Path) -> None:
    assert set(command(tmp_path, "recipes", "list", "--json").json["recipes"]) == set(presets())
    assert command(tmp_path, "recipes").out == command(tmp_path, "recipes", "list").out
    assert Recipe.from_toml(command(tmp_path, "recipes", "show", "w4a8").out) == w4a8()
    assert command(tmp_path, "recipes", "write", "w4a8", "my.toml").code == 0
    assert Recipe.load(tmp_path / "my.toml") == w4a8()


def test_bench_passes_its_arguments_on(tmp_path: Path) -> None:
    answer = command(tmp_path, "bench", "--quick", "--list")
    assert answer.code == 0
    assert "/" in answer.out
    assert command(tmp_path, "bench", "--nonsense").code == 2


@pytest.mark.parametrize("name", ["", "train", "inspect", "export", "verify", "recipes", "recipes show"])
def test_every_help_has_examples(tmp_path: Path, name: str) -> None:
    answer = command(tmp_path, *name.split(), "--help")
    assert answer.code == 0
    assert f"Examples:\n    lowbit {name}".rstrip() in answer.out


def test_as_a_module(tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "lowbit.cli", "--version"]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()[0]) == (0, "lowbit")


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delitem(sys.modules, "lowbit.app.commands", raising=False)
    monkeypatch.setitem(sys.modules, "typer", None)
    assert cli.main(["train"]) == 1
    assert "pip install 'lowbit[app]'" in capsys.readouterr().err


def test_flags_are_tiny() -> None:
    assert len(flags()) == len(TINY)
