"""Run: the folder of a training run, which holds what is finished, so that the run can go on."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowbit.app.config import TrainConfig
from lowbit.app.processes import processes
from lowbit.app.sources import Source, build, example_inputs
from lowbit.files import write_json, write_tensors, write_whole
from lowbit.model import prepare
from lowbit.recipe import Recipe

CONFIG, RECIPE, RESULT, REPORT = "config.toml", "recipe.toml", "result.json", "report.html"
ONNX, SAFETENSORS, TENSORBOARD = "model.onnx", "model.safetensors", "tensorboard"

_FORMAT = 1


class RunError(RuntimeError):
    """A folder that does not hold the run it should."""


def refuse_strangers(folder: Path, known: Collection[str], what: str) -> None:
    """A RunError where the folder holds what is not this program's: it would be written over."""
    found = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    if strange := [name for name in found if name not in known and not name.startswith(".")]:
        raise RunError(f"{folder} holds no {what}, but {strange[0]}; name a new folder, or an empty one, as output")


class Run:
    """config.toml, recipe.toml, result.json with what each finished step found, and a .pt file of its weights

    A file is written whole or not at all, and the result after the files that it speaks of: whenever the process ends,
    the folder holds a number of finished steps.
    """

    def __init__(self, folder: Path, config: TrainConfig, recipe: Recipe) -> None:
        self.folder, self.config, self.recipe = folder, config, recipe
        # Sums are taken in the order that the number of threads makes. Digits are too small to share out: two threads
        # are no faster, and on a machine with other work each waits for the other.
        self._result: dict[str, Any] = {
            "format": _FORMAT,
            "threads": 1 if config.is_builtin and config.data == "digits" else torch.get_num_threads(),
            "processes": processes().size,
            "steps": {},
            "seconds": {},
        }
        if (path := folder / RESULT).exists():
            self._result = _read_result(path)

    @classmethod
    def begin(cls, config: TrainConfig) -> Run:
        """The run of this config: a new one, or the one that its folder holds"""
        folder, recipe = config.output_folder, config.load_recipe()
        if folder.exists() and not folder.is_dir():
            raise RunError(f"output is {folder}, which is a file, but the run needs a folder; name another")
        if not (folder / CONFIG).exists():
            # A run that was killed before it wrote its config is none yet.
            refuse_strangers(folder, (RECIPE, RESULT), "run")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / RESULT).unlink(missing_ok=True)
            run = cls(folder, config, recipe)
            write_json(folder / RESULT, run._result)
            write_whole(folder / RECIPE, recipe.to_toml().encode())
            write_whole(folder / CONFIG, config.to_toml().encode())
            return run
        there = cls.open(folder)
        differences = config.differences(there.config)
        if not differences and there.recipe != recipe:
            differences = [f"the recipe {config.recipe!r} has changed since, see {folder / RECIPE}"]
        if differences and not (there.steps or (folder / "float").exists()):
            with locked(folder):  # not under the hands of one that just begins
                (folder / CONFIG).unlink()  # of a run that never came to train: its data was not found, or so
            return cls.begin(config)
        if differences:
            raise RunError(
                f"{folder} holds a run of another config: {'; '.join(differences)}. "
                "Name another folder as output, or delete this one to start anew"
            )
        return cls(folder, config, recipe)

    @classmethod
    def open(cls, folder: Path) -> Run:
        """The run that a folder holds"""
        if not (folder / CONFIG).is_file():
            what = "holds no run" if folder.is_dir() else "is not a folder" if folder.exists() else "does not exist"
            raise RunError(f"{folder} {what}; name the output folder of a `lowbit train`")
        return cls(folder, TrainConfig.read(folder / CONFIG), Recipe.load(folder / RECIPE))

    @property
    def steps(self) -> dict[str, dict[str, Any]]:
        """What each finished step found, in their order."""
        return self._result["steps"]

    @property
    def seconds(self) -> dict[str, float]:
        """What each finished step took."""
        return self._result["seconds"]

    @property
    def threads(self) -> int:
        """The threads that the run was begun with, and goes on with."""
        return self._result["threads"]

    @property
    def processes(self) -> int:
        """The processes that the run was begun with."""
        return self._result.get("processes", 1)

    def note(self, step: str, found: dict[str, Any], seconds: float) -> None:
        """Take what a step found into the result, which ``write`` keeps."""
        self._result["steps"][step] = found
        self._result["seconds"][step] = seconds

    def write(self) -> None:
        """Write the result."""
        write_json(self.folder / RESULT, self._result)

    def keep(self, name: str, model: nn.Module) -> None:
        """Write the model's state."""
        write_tensors(self.folder / f"{name}.pt", model.state_dict())

    def restore(self, name: str, model: nn.Module) -> None:
        """Read the state that ``keep`` wrote into the model."""
        path = self.folder / f"{name}.pt"
        if not path.exists():
            raise RunError(f"{path} is missing, though {RESULT} speaks of it; delete the folder to start anew")
        model.load_state_dict(torch.load(path, weights_only=True))

    def float_model(self) -> tuple[nn.Module, Source]:
        """The float model as it was trained, and the data"""
        model, data = build(self.config)
        self.restore("float", model)
        return model, data

    def model(self, name: str = "quantized") -> tuple[nn.Module, Source]:
        """The prepared model after this step, in eval mode, and the data"""
        if name not in self.steps:
            raise RunError(f"{self.folder} holds a run that is not finished: there is no {name} model; run it again")
        model, data = build(self.config)
        prepared = prepare(model, self.recipe, example_inputs(data), inplace=True)
        self.restore(name, prepared)
        return prepared.eval(), data


def _read_result(path: Path) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunError(f"{path} is damaged: {error}; delete the folder to start anew") from error
    if result.get("format", 0) > _FORMAT:
        raise RunError(f"{path} was written by a newer lowbit; update lowbit")
    return result


@contextmanager
def at_work(run: Run) -> Iterator[None]:
    """Alone in the folder, and without what a killed process left half written"""
    with locked(run.folder):
        remove_drafts(run.folder)
        yield


def remove_drafts(folder: Path) -> None:
    """What a killed process left half written."""
    for draft in folder.rglob(".*.partial"):
        draft.unlink()


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads; afterwards as many as before"""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time; a lock goes with its process, however that ends."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunError(f"another process is at work in {folder}; wait for it, or name another output") from error
        yield
