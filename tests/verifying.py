"""Files to verify: those that export_onnx writes of small networks, and the same with something changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import torch
import torch.nn.functional as F
from onnx import numpy_helper
from torch import Tensor, nn

import lowbit
from lowbit.export.onnx import export_onnx
from lowbit.export.verification import Tensor as Line
from lowbit.export.verification import Verification
from models.small import Projections, Tied, mlp


class ConvNet(nn.Module):
    """Folded batch norms, a residual sum, pooling, and an op that is not a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 10)
        self.last = nn.Parameter(torch.randn(5, 10))

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x)).relu()
        x = (self.bn2(self.conv2(x)) + x).relu()
        return F.linear(self.head(self.pool(x).flatten(1)).relu(), self.last)


class Twice(nn.Module):
    """An LSTM and a head that both run twice: the zeros that each begins with are in the file once."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 5, batch_first=True, bidirectional=True), nn.Linear(10, 3)

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.head(self.lstm(left)[0][:, -1]), self.head(self.lstm(right)[0][:, -1])
        return a, a.argmax(-1) + b.argmax(-1)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], str, bool]] = {
    "conv": (ConvNet, lambda: torch.randn(4, 3, 8, 8), "w8a8", True),
    "mlp": (lambda: mlp(64, 32, 32, 10), lambda: torch.randn(6, 64), "w8a8", True),
    "groups": (lambda: mlp(64, 32, 10), lambda: torch.randn(6, 64), "w4a8", True),
    "dynamic": (
        lambda: nn.Sequential(nn.Linear(64, 32), nn.Sigmoid(), nn.Linear(32, 10)),
        lambda: torch.randn(6, 64),
        "w8a8_dynamic",
        True,
    ),
    "clips": (lambda: mlp(64, 32, 32, 10), lambda: torch.randn(6, 64), "w2a2", True),
    "weights": (lambda: mlp(64, 32, 10), lambda: torch.randn(6, 64), "w4", True),
    "lstm": (Twice, lambda: (torch.randn(3, 4, 6), torch.randn(3, 4, 6)), "w8a8", True),
    "untraced": (Projections, lambda: torch.randn(4, 8), "w8a8", False),
    "tied": (Tied, lambda: torch.randint(0, 10, (3, 7)), "w8a8", True),
}


class Exports:
    """Prepared models and their files, each made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.models: dict[str, tuple[nn.Module, Any]] = {}

    def model(self, name: str) -> tuple[nn.Module, Any]:
        if name not in self.models:
            torch.manual_seed(0)
            make, batch_of, recipe, traced = NETWORKS[name]
            model, batch = make(), batch_of()
            args = batch if isinstance(batch, tuple) else (batch,)
            model.train()(*args)  # for the batch norms
            prepared = lowbit.prepare(model, lowbit.recipes.presets()[recipe](), *([batch] if traced else []))
            lowbit.calibrate(prepared, [batch])
            self.models[name] = prepared.eval(), batch
        return self.models[name]

    def __call__(self, name: str, style: str) -> tuple[nn.Module, Path, Any]:
        model, batch = self.model(name)
        path = self.folder / f"{name}-{style}.onnx"
        if not path.exists():
            export_onnx(model, batch, path, style)
        return model, path, batch


def tampered(path: Path, folder: Path, change: Callable[[Any], None]) -> Path:
    """A file in which this was changed."""
    proto = onnx.load(path)
    before = proto.SerializeToString()
    change(proto)
    assert proto.SerializeToString() != before
    other = folder / "tampered.onnx"
    other.write_bytes(proto.SerializeToString())
    return other


def constant(proto: Any, name: str) -> Any:
    return next(tensor for tensor in proto.graph.initializer if tensor.name == name)


def set_constant(proto: Any, name: str, array: Any) -> None:
    constant(proto, name).CopyFrom(numpy_helper.from_array(array, name))


def node_of(proto: Any, quantizer: str) -> Any:
    """The node that gives this quantizer's codes."""
    return next(
        node
        for node in proto.graph.node
        if any((entry.key, entry.value) == ("lowbit.quantizer", quantizer) for entry in node.metadata_props)
    )


def by_name(report: Verification) -> dict[str, Line]:
    return {tensor.name: tensor for tensor in report.tensors}


def assert_clean(model: nn.Module) -> None:
    """No hook, and no attribute of an instance where its class has the method."""
    for module in model.modules():
        assert not module._forward_hooks
        assert not {"forward", "codes"} & set(vars(module))
        if (product := vars(module).get("product")) is not None:
            assert product.__module__ == "lowbit.nn.integer"
