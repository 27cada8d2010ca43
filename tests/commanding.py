"""The command line in processes of their own, which can be killed; a server that has imported torch forks them."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["lowbit.app.train", "lowbit.app.commands", "sklearn.datasets", "onnxruntime"])

# A run of seconds, with scales that are learned: 238 images to train on.
TINY = {"recipe": "w2a2", "float_epochs": 2, "epochs": 3, "held_out": 1200, "calibration_batches": 2}


def flags(**changes: object) -> list[str]:
    """TINY as options, with some changed."""
    return [f"--{key.replace('_', '-')}={value}" for key, value in (TINY | changes).items()]


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
