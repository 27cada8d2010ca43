"""Small networks, converted, and the files that lowbit.save makes of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import safetensors
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

import lowbit
from lowbit.export.artifact import load, save
from models import networks
from models.small import Tied, images, mlp


class Net(NamedTuple):
    """A float model, and a batch for it."""

    model: nn.Module
    batch: Any


class Residual(nn.Module):
    """y = head(relu(x + bn2(conv2(relu(bn1(conv1(x)))))))"""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3)
        self.conv2, self.bn2 = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.head = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return self.head(F.relu(x + y).mean((2, 3)))


class Attention(nn.Module):
    """Words that attend to each other, with positions that no state_dict holds."""

    positions: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 32)
        self.register_buffer("positions", torch.linspace(-1, 1, 32), persistent=False)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 5)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words) * self.positions
        return self.head(self.norm(x + self.attention(x, x, x)[0]))


def pruned() -> nn.Sequential:
    model = mlp(64, 32, 5)
    prune.l1_unstructured(model[0], "weight", 0.5)
    return model


def pruned_in_eval() -> Net:
    """torch copies a pruned layer only where its weight has no gradient."""
    with torch.no_grad():
        return Net(pruned(), torch.randn(4, 64))


NETS: dict[str, Callable[[], Net]] = {
    "residual": lambda: Net(Residual(), images()),
    "mlp": lambda: Net(mlp(64, 32, 5), torch.randn(4, 64)),
    "attention": lambda: Net(Attention(), torch.randint(0, 20, (2, 6))),
    "lstm": lambda: Net(networks.Tagger(), torch.randint(0, 50, (3, 7))),
    "tied": lambda: Net(Tied(), torch.randint(0, 10, (2, 3))),
    "pruned": pruned_in_eval,
    "parametrized": lambda: Net(*networks.parametrized()[:2]),
    "functional": lambda: Net(*networks.functional()[:2]),
}


def make(name: str, seed: int) -> Net:
    torch.manual_seed(seed)
    net = NETS[name]()
    return Net(net.model.eval(), net.batch)


def prepared(net: Net, recipe: lowbit.Recipe) -> nn.Module:
    model = lowbit.prepare(net.model, recipe, net.batch)
    lowbit.calibrate(model, [net.batch])
    return model.eval()


def converted(net: Net, recipe: lowbit.Recipe, arithmetic: str = "float") -> nn.Module:
    return lowbit.convert(prepared(net, recipe), arithmetic)


def a_file(folder: Path, *, seed: int = 0) -> Path:
    """A small model as a file, for the model of ``make("mlp", …)``."""
    path = folder / "model.safetensors"
    save(converted(make("mlp", seed), lowbit.recipes.w8a8()), path)
    return path


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safetensors.safe_open(path, framework="pt") as file:
        return {key: file.get_tensor(key).clone() for key in file.keys()}, file.metadata()  # noqa: SIM118


def assert_refused(path: Path, model: nn.Module, match: str | None = None) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        load(path, model)
    assert str(caught.value).startswith(f"{path}: ")


def run(code: str, *arguments: object) -> str:
    """What Python code prints that runs in a process of its own, with the tests at hand."""
    tests = Path(__file__).parent
    paths = [str(tests / "export"), str(tests)]
    script = f"import sys; sys.path[:0] = {paths!r}\n{code}"
    done = subprocess.run([sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]
