"""Files by themselves: their sizes, batches of any length, and a process that has nothing but the runtime."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import lowbit
from lowbit import PerBatch, PerChannel, PerGroup, QuantSpec, Recipe

STYLES = ("qdq", "integer")

ALONE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "onnx", "lowbit", "onnxscript", "onnx_ir"):
            raise ImportError(name + " is not to be imported here")

sys.meta_path.insert(0, Refuse())
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession(sys.argv[1])
(name,) = (each.name for each in session.get_inputs())
np.save(sys.argv[3], session.run(None, {name: np.load(sys.argv[2])})[0])
"""


def network() -> nn.Module:
    torch.manual_seed(0)
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), *head)


def ready(batch: torch.Tensor) -> nn.Module:
    model = lowbit.prepare(network(), lowbit.recipes.w8a8(), batch)
    lowbit.calibrate(model, [batch])
    return model.eval()


@pytest.mark.parametrize("style", STYLES)
def test_a_process_with_the_runtime_alone(style: str, tmp_path: Path) -> None:
    batch = torch.randn(4, 3, 8, 8)
    model = ready(batch)
    lowbit.export_onnx(model, batch, tmp_path / "model.onnx", style)
    np.save(tmp_path / "x.npy", batch.numpy())
    arguments = [tmp_path / "model.onnx", tmp_path / "x.npy", tmp_path / "y.npy"]
    subprocess.run([sys.executable, "-c", ALONE, *arguments], check=True)
    converted = lowbit.convert(model, "float" if style == "qdq" else "integer")
    torch.testing.assert_close(torch.from_numpy(np.load(tmp_path / "y.npy")), converted(batch), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("style", STYLES)
def test_a_batch_may_have_any_length(style: str, length: int, tmp_path: Path) -> None:
    model = ready(torch.randn(length, 3, 8, 8))
    lowbit.export_onnx(model, torch.randn(length, 3, 8, 8), tmp_path / "model.onnx", style)
    proto = onnx.load(tmp_path / "model.onnx")
    assert [axis.dim_param for axis in proto.graph.input[0].type.tensor_type.shape.dim] == ["batch", "", "", ""]
    onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True, data_prop=True)
    for other in (1, 3, 7):
        report = lowbit.verify(model, tmp_path / "model.onnx", torch.randn(other, 3, 8, 8))
        assert report.ok, str(report)


def test_a_batch_may_be_fixed(tmp_path: Path) -> None:
    batch = torch.randn(3, 3, 8, 8)
    lowbit.export_onnx(ready(batch), batch, tmp_path / "model.onnx", dynamic_batch=False)
    shape = onnx.load(tmp_path / "model.onnx").graph.input[0].type.tensor_type.shape.dim
    assert [axis.dim_value for axis in shape] == [3, 3, 8, 8]


@pytest.mark.parametrize(
    ("bits", "opset", "kind", "width"),
    [
        (8, 21, onnx.TensorProto.INT8, 8),
        (4, 21, onnx.TensorProto.INT4, 4),
        (3, 21, onnx.TensorProto.INT4, 4),
        (2, 21, onnx.TensorProto.INT4, 4),
        (2, 25, onnx.TensorProto.INT2, 2),
        (12, 21, onnx.TensorProto.INT16, 16),
    ],
)
@pytest.mark.parametrize("per", [PerChannel(0), PerGroup(32)])
def test_weights_take_the_bits_they_have(
    bits: int, opset: int, kind: int, width: int, per: lowbit.granularity.Granularity, tmp_path: Path
) -> None:
    recipe = Recipe(weight=QuantSpec(bits=bits, per=per, scale_mode=PerBatch()))
    batch = torch.randn(2, 256)
    model = lowbit.prepare(nn.Linear(256, 64, bias=False), recipe, batch)
    lowbit.export_onnx(model, batch, tmp_path / "model.onnx", opset=opset)
    found = onnx.load(tmp_path / "model.onnx").graph.initializer
    (codes,) = (tensor for tensor in found if len(tensor.dims) == 2 and tensor.data_type != onnx.TensorProto.FLOAT)
    assert codes.data_type == kind
    assert len(codes.raw_data) == 256 * 64 * width // 8
    floats = sum(int(np.prod(tensor.dims)) for tensor in found if tensor.data_type == onnx.TensorProto.FLOAT)
    assert floats == 64 * (8 if per == PerGroup(32) else 1)  # the scales, and no weight
    assert (tmp_path / "model.onnx").stat().st_size < len(codes.raw_data) + 4 * floats + 2000


def test_float64_is_refused(tmp_path: Path) -> None:
    batch = torch.randn(2, 8, dtype=torch.float64)
    model = lowbit.prepare(nn.Linear(8, 4).double(), lowbit.recipes.w8a8_dynamic(), batch)
    with pytest.raises(TypeError, match=r"is float64, but ONNX quantizes float32; export model.float\(\)"):
        lowbit.export_onnx(model, batch, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
