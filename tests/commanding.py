"""The command line in processes of their own, which can be killed; a server that has imported torch forks them."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["lowbit.app.train", "lowbit.app.study_report", "lowbit.app.commands", "sklearn.datasets", "onnxruntime"]
)

# A run of seconds, with scales that are learned: 238 images to train on.
TINY = {"recipe": "w2a2", "float_epochs": 2, "epochs": 3, "held_out": 1200, "calibration_batches": 2}


# Six runs of half a second.
STUDY = {
    "bits": 2,
    "rules": ["clipped_identity", "tanh"],
    "roles": "weight",
    "rates": 0.03,
    "seeds": 2,
    "float_epochs": 2,
    "epochs": 1,
    "jobs": 1,
}


def flags(of: Mapping[str, object] = TINY, **changes: object) -> list[str]:
    """TINY, or another, as options, with some changed."""
    pairs = [
        (key, value)
        for key, values in {**of, **changes}.items()
        for value in (values if isinstance(values, list) else [values])
    ]
    return [f"--{key.replace('_', '-')}={value}" for key, value in pairs]


def make() -> tuple[nn.Module, tuple[DataLoader[Any], ...]]:
    """A model and loaders of a user's own: which of four corners of an image is lit."""
    random = torch.Generator().manual_seed(0)
    labels = torch.randint(4, (320,), generator=random)
    images = 0.3 * torch.randn(320, 1, 4, 4, generator=random)
    for image, label in zip(images, labels.tolist(), strict=True):
        image[0, 2 * (label // 2) : 2 * (label // 2) + 2, 2 * (label % 2) : 2 * (label % 2) + 2] += 1
    parts = [TensorDataset(images[part], labels[part]) for part in (slice(192), slice(192, 256), slice(256, 320))]
    loaders = tuple(DataLoader(part, batch_size=32, shuffle=i == 0) for i, part in enumerate(parts))
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(128, 4))
    return model, loaders


def make_shared() -> tuple[nn.Module, tuple[DataLoader[Any], ...]]:
    """Nothing random in the model, a batch norm, and a last batch that two processes can't share equally.

    At its end, a process writes the third model that it made: the one that ``lowbit train`` trains with quantizers.
    """
    loaders = make()[1]
    train = DataLoader(loaders[0].dataset, batch_size=35, shuffle=True)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4))
    _made.append(model)
    if len(_made) == 1 and "RANK" in os.environ:
        atexit.register(lambda: torch.save(_made[2].state_dict(), f"rank{os.environ['RANK']}.pt"))
    return model, (train, *loaders[1:])


_made: list[nn.Module] = []


class Pair(nn.Linear):
    """Gives two things, of which neither is said to be the scores."""

    def forward(self, input: Tensor) -> Any:  # noqa: A002 (torch's own name)
        scores = super().forward(input.flatten(1))
        return scores, scores


def make_pair() -> tuple[nn.Module, tuple[DataLoader[Any], ...]]:
    """A model that does not say which of its outputs is meant."""
    return Pair(16, 4), make()[1]


def make_nothing() -> None:
    """A function that forgot to return."""


@dataclass(frozen=True)
class Answer:
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one object on stdout."""
        return json.loads(self.out)


class Command:
    """A command that runs; its words are in files of ``folder``, or on the terminal of this name."""

    def __init__(self, folder: Path, arguments: list[str], terminal: str = "") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.out, self.err = (Path(terminal) if terminal else folder / name for name in ("out.txt", "err.txt"))
        if not terminal:
            for path in (self.out, self.err):
                path.write_text("")  # not the words of the command before
        self.process = CONTEXT.Process(target=_run, args=(str(folder), str(self.out), str(self.err), arguments))
        self.process.start()

    def wait(self, timeout: float = 120) -> Answer:
        """The answer, once it has ended."""
        self.process.join(timeout)
        assert self.process.exitcode is not None, "the command does not end"
        return Answer(self.process.exitcode, self.out.read_text(), self.err.read_text())

    def wait_for(self, found: Callable[[], bool], timeout: float = 60) -> None:
        """Wait until something is there, while the command runs."""
        end = time.monotonic() + timeout
        while not found():
            assert self.process.is_alive(), f"it ended: {self.err.read_text()}"
            assert time.monotonic() < end, "it does not come"
            time.sleep(0.01)


def command(folder: Path, *arguments: str) -> Answer:
    """Run a command in a folder to its end."""
    return Command(folder, list(arguments)).wait()


def one_error(err: str) -> str:
    """The message, which is all that is said."""
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, err
    assert "Traceback" not in err
    return lines[0]


def metrics_of(run: Path) -> dict[str, Any]:
    """What the steps of a run found."""
    return json.loads((run / "result.json").read_text())["steps"]


def kill(running: Command, delay: float) -> bool:
    """Kill a command after so many seconds; whether it ran until then."""
    running.process.join(delay)
    was_alive = running.process.is_alive()
    running.process.kill()
    running.process.join()
    return was_alive


# Training more often than the rest, which takes longer but has no state of its own.
_KILLED = ["float", "float", "calibrate", "quantized", "quantized", "quantized", "export", "verify", "measure"]


def kill_training(folder: Path, whole: str, kills: int, seed: int) -> dict[str, Any]:
    """The metrics of a run that was killed at random moments of random steps, then resumed; ``whole`` never was."""
    rng = random.Random(seed)
    seconds = json.loads((folder / whole / "result.json").read_text())["seconds"]
    arguments = ["train", *flags(), f"--output=killed{seed}"]
    for step in sorted(rng.choices(_KILLED, k=kills), key=_KILLED.index):
        running = Command(folder, arguments)
        running.wait_for(lambda words=running.out, step=step: f"{step}: " in words.read_text())
        assert kill(running, rng.uniform(0, seconds[step]))
    answer = command(folder, *arguments)
    assert answer.code == 0, answer.err
    return metrics_of(folder / f"killed{seed}")


def results_of(study: Path) -> dict[str, Any]:
    """What every run of a study found, and what came of its best network."""
    paths = [*study.glob("results/*.json"), *study.glob("float/*.json"), *study.glob("verification.json")]
    return {str(path.relative_to(study)): json.loads(path.read_text()) for path in paths}


def kill_study(folder: Path, kills: int, seed: int) -> Path:
    """A study that was killed at random moments after random numbers of runs, then resumed."""
    rng = random.Random(seed)
    study = folder / f"killed-study{seed}"
    arguments = ["study", *flags(STUDY), f"--output={study.name}"]
    for runs in sorted(rng.choices(range(7), k=kills)):
        running = Command(folder, arguments)
        running.wait_for(lambda runs=runs: len(results_of(study)) >= runs)
        assert kill(running, rng.uniform(0, 0.4))
    answer = command(folder, *arguments)
    assert answer.code == 0, answer.err
    assert not list(study.rglob(".*.partial"))
    return study


def _run(folder: str, out: str, err: str, arguments: list[str]) -> None:
    os.chdir(folder)
    os.environ.pop("COLUMNS", None)
    for name, stream in ((out, 1), (err, 2)):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | (0 if name.startswith("/dev/") else os.O_TRUNC)), stream)
    sys.stdout, sys.stderr = (open(stream, "w", buffering=1, closefd=False) for stream in (1, 2))  # noqa: SIM115
    torch.set_num_threads(1)
    from lowbit.cli import main

    code = main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
