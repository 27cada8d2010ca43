"""save: the old file or the new one, and never a file in between."""

from __future__ import annotations

import errno
import io
import itertools
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn

import lowbit
from compare import assert_same_bits
from lowbit.export import artifact
from lowbit.export.artifact import load, save
from saving import Net, a_file, converted, make, run

VERSIONS = 2


def kill_writers(folder: str, writer: str, kills: str) -> None:
    """Runs in a process of its own: kill writers in the midst of their work, and look at what each leaves

    Writes how often each version was found, how often neither (-1), and how many unfinished files are left.
    """
    path, write, chance = Path(folder) / "model", {"save": save, "in place": write_in_place}[writer], random.Random(0)
    models = [converted(make("mlp", seed), lowbit.recipes.w4()) for seed in range(VERSIONS)]
    given = make("mlp", VERSIONS).model
    save(models[0], path)
    found: dict[int, int] = dict.fromkeys([-1, *range(VERSIONS)], 0)
    for _ in range(int(kills)):
        child = os.fork()
        if not child:
            write_for_ever(write, models, path)
        time.sleep(chance.uniform(0.001, 0.03))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "the writer failed by itself"
        found[version(path, given, models)] += 1
    unfinished = len(list(Path(folder).glob(".model.*.partial")))
    save(models[0], path)
    assert version(path, given, models) == 0
    sys.stdout.write(json.dumps([list(found.values()), unfinished, len(list(Path(folder).iterdir()))]))


def write_for_ever(write: Callable[[nn.Module, Path], None], models: list[nn.Module], path: Path) -> None:
    try:
        for model in itertools.cycle(models):
            write(model, path)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def version(path: Path, given: nn.Module, models: list[nn.Module]) -> int:
    """Which of the models the file holds; -1 where it does not load."""
    try:
        weight = load(path, given)[0].weight
    except ValueError:
        return -1
    (same,) = (number for number, model in enumerate(models) if torch.equal(weight, model[0].weight))
    return same


def write_in_place(model: nn.Module, path: Path) -> None:
    """What save must not do."""
    tensors, header = artifact._describe(model)
    path.write_bytes(safetensors.torch.save(tensors, header.to_metadata()))


class TestWriting:
    kill = "from test_artifact_writing import kill_writers; kill_writers(*sys.argv[1:])"

    def test_a_writer_that_is_killed_leaves_a_file_that_loads(self, tmp_path: Path) -> None:
        (neither, *versions), unfinished, files = json.loads(run(self.kill, tmp_path, "save", 150))
        assert neither == 0
        assert sum(versions) == 150
        assert min(versions) > 0, "the writers never came to write"
        assert unfinished > 0, "no writer was killed in the midst of its work"
        assert files == unfinished + 1

    def test_which_a_writer_in_place_does_not(self, tmp_path: Path) -> None:
        (neither, *_), unfinished, _ = json.loads(run(self.kill, tmp_path, "in place", 60))
        assert neither > 0
        assert unfinished == 0

    @pytest.mark.parametrize("step", ["fsync", "replace"])
    def test_an_error_leaves_the_old_file_and_no_other(
        self, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = a_file(tmp_path)
        data, model = path.read_bytes(), converted(make("mlp", 1), lowbit.recipes.w8a8())

        def fail(*arguments: Any) -> None:
            raise OSError(errno.ENOSPC, "the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(*((os, step) if step == "fsync" else (Path, step)), fail)
            with pytest.raises(OSError, match=r"the disk is full: .*model"):
                save(model, path)
        assert path.read_bytes() == data
        assert list(tmp_path.iterdir()) == [path]
        save(model, path)
        assert path.read_bytes() != data

    def test_the_order_of_what_reaches_the_disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The data, then the name, then the directory that holds the name; also where all of it fits a buffer."""
        model, steps = converted(Net(nn.Linear(2, 2), torch.randn(1, 2)), lowbit.Recipe(weight=8)), []
        fsync, replace = os.fsync, Path.replace

        def note_fsync(descriptor: int) -> None:
            place = Path(f"/proc/self/fd/{descriptor}").readlink()
            steps.append(("fsync", place.name if place != tmp_path else "directory", place.stat().st_size))
            fsync(descriptor)

        def note_replace(self: Path, target: Path) -> Path:
            steps.append(("replace", self.name, self.stat().st_size))
            return replace(self, target)

        monkeypatch.setattr(os, "fsync", note_fsync)
        monkeypatch.setattr(Path, "replace", note_replace)
        save(model, tmp_path / "model")
        size = (tmp_path / "model").stat().st_size
        assert size < io.DEFAULT_BUFFER_SIZE
        (_, draft, _), *_ = steps
        assert draft.startswith(".model.")
        assert draft.endswith(".partial")
        assert steps[:2] == [("fsync", draft, size), ("replace", draft, size)]
        assert [step[:2] for step in steps[2:]] == [("fsync", "directory")]

    def test_the_file_is_as_readable_as_any_other(self, tmp_path: Path) -> None:
        (tmp_path / "other").touch()
        assert a_file(tmp_path).stat().st_mode == (tmp_path / "other").stat().st_mode

    def test_paths(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        net = make("mlp", 0)
        model = converted(net, lowbit.recipes.w4())
        save(model, "model")
        assert_same_bits(load("model", make("mlp", 1).model)(net.batch), model(net.batch))
        (tmp_path / "folder").mkdir()
        with pytest.raises(
            ValueError, match="folder is a directory, but save writes a file; name one, such as folder/"
        ):
            save(model, "folder")
        with pytest.raises(FileNotFoundError, match="no directory to hold this file; make it first: 'none/model'"):
            save(model, "none/model")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "model"]
