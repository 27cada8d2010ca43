"""verify: inputs that are given, generated, wrong, or changed by the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lowbit
from exporting import STYLES
from lowbit.export.onnx import export_onnx
from lowbit.export.verify import verify
from verifying import Exports


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", ["conv", "lstm", "tied"])
def test_generated_inputs(name: str, style: str, exported: Exports) -> None:
    model, path, _ = exported(name, style)
    report = verify(model, path)
    assert report.ok, str(report)
    assert report.generated
    assert all(shape[0] == 4 for shape in report.inputs.values())
    assert f"generated inputs {next(iter(report.inputs))} (4, " in " ".join(str(report).split())
    assert verify(model, path) == report


class Masked(nn.Module):
    """Every kind of input, by name only."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(2, 64), nn.Linear(64, 4)

    def forward(self, *, ids: Tensor, attention_mask: Tensor, dropped: Tensor, scale: Tensor) -> Tensor:
        x = self.embedding(ids) * scale.unsqueeze(-1)
        x = x.masked_fill(attention_mask.unsqueeze(-1) == 0, 0).masked_fill(dropped.unsqueeze(-1), 0)
        return self.head(x.sum(1) / (dropped.sum(1, keepdim=True)))


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path, dict[str, Tensor]]:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("masked") / "masked.onnx"
    batch = {
        "ids": torch.randint(0, 2, (3, 6)),
        "attention_mask": torch.ones(3, 6, dtype=torch.int64),
        "dropped": torch.rand(3, 6) > 0.5,
        "scale": torch.rand(3, 6) + 0.5,
    }
    model = lowbit.prepare(Masked(), lowbit.recipes.w8a8(), batch)
    lowbit.calibrate(model, [batch])
    export_onnx(model.eval(), batch, path, "integer")
    return model, path, batch


def test_inputs_by_name(masked: tuple[nn.Module, Path, dict[str, Tensor]]) -> None:
    model, path, batch = masked
    assert verify(model, path, dict(reversed(batch.items()))).ok
    report = verify(model, path)
    assert report.ok, str(report)
    assert report.inputs == dict.fromkeys(("ids", "attention_mask", "dropped", "scale"), (4, 6))


def test_wrong_inputs(masked: tuple[nn.Module, Path, dict[str, Tensor]], exported: Exports) -> None:
    model, path, batch = masked
    with pytest.raises(
        ValueError, match=r"inputs holds 1 tensors, but .* takes 4: ids \(batch, 6\) int64, attention_m"
    ):
        verify(model, path, {"ids": batch["ids"]})
    with pytest.raises(ValueError, match=r"scale has shape \(2, 6\), but .* takes scale \(batch, 6\) float32; pass"):
        verify(model, path, batch | {"scale": batch["scale"][:2]})
    with pytest.raises(TypeError, match=r"inputs: scale is float64, but .* takes scale \(batch, 6\) float32"):
        verify(model, path, batch | {"scale": batch["scale"].double()})
    model, path, batch = exported("conv", "qdq")
    for wrong in (batch[:, :2], batch[0], batch.unsqueeze(0)):
        with pytest.raises(
            ValueError, match=r"x has shape .* takes x \(batch, 3, 8, 8\) float32; pass a batch of that"
        ):
            verify(model, path, wrong)


@pytest.fixture
def in_place() -> Iterator[nn.Module]:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(64, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x.mul_(2))

    return Adds()


def test_inputs_that_the_model_changes_in_place(in_place: nn.Module, tmp_path: Path) -> None:
    batch = torch.randn(3, 64)
    model = lowbit.prepare(in_place, lowbit.recipes.w8a8(), batch.clone())
    lowbit.calibrate(model, [batch.clone()])
    export_onnx(model.eval(), batch.clone(), tmp_path / "m.onnx", "integer")
    kept = batch.clone()
    assert verify(model, tmp_path / "m.onnx", batch).ok
    assert torch.equal(batch, kept)
