"""Files that export_onnx writes: what is in them, and what verify says of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from torch import nn

from lowbit.export.onnx import export_onnx
from lowbit.export.verification import Codes, Verification
from lowbit.export.verify import verify

STYLES = ("qdq", "integer")


def exported(model: nn.Module, batch: Any, path: Path, style: str = "qdq", **options: Any) -> onnx.ModelProto:
    """The file, checked by ONNX, with all shapes known."""
    export_onnx(model, batch, path, style, **options)
    proto = onnx.load(path)
    onnx.checker.check_model(proto, full_check=True)
    return onnx.shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True)


def verified(model: nn.Module, path: Path, batch: Any) -> Verification:
    """What verify says, which must be that the file is right."""
    report = verify(model, path, batch)
    assert_right(report)
    return report


def assert_right(report: Verification) -> None:
    """What the styles promise, part by part; all of it is in ``ok``"""
    text = str(report)
    assert report.ok, text
    assert not report.missing, text
    codes = sum((tensor.alone for tensor in report.tensors), Codes())
    assert codes.largest <= 1, text
    assert codes.differing <= max(1, codes.elements * 1e-4), text
    assert all(output.free.agreement == 1 for output in report.outputs), text
    if report.style == "integer":
        assert not any(layer.values.differing for layer in report.layers if layer.exact), text
        assert not any(tensor.alone.differing for tensor in report.tensors if tensor.exact), text


def assert_equal_throughout(report: Verification) -> None:
    """Not a bit differs, each side running from the inputs."""
    assert not any(tensor.free.differing for tensor in report.tensors), str(report)
    assert not any(output.free.differing for output in report.outputs), str(report)


class Stored(NamedTuple):
    """A constant of a file: its type, its shape and what it takes."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def constants(proto: onnx.ModelProto) -> dict[str, Stored]:
    """Of every constant of a file, wherever it is."""
    found = {}
    for tensor in _tensors(proto):
        dtype = onnx.TensorProto.DataType.Name(tensor.data_type)
        nbytes = len(tensor.raw_data) or tensor.ByteSize()
        found[tensor.name] = Stored(dtype, tuple(tensor.dims), nbytes)
    return found


def _tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    yield from proto.graph.initializer
    for node in proto.graph.node:
        for attribute in node.attribute:
            assert not attribute.HasField("g"), f"{node.op_type} holds a graph of its own"
            if attribute.HasField("t"):
                yield attribute.t


def nodes(proto: onnx.ModelProto, *types: str) -> list[onnx.NodeProto]:
    return [node for node in proto.graph.node if node.op_type in types]


def arrays(batch: Any, proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    """A batch of tensors as the runtime takes them."""
    from torch.utils._pytree import tree_leaves

    names = [value.name for value in proto.graph.input]
    return {name: leaf.numpy() for name, leaf in zip(names, tree_leaves(batch), strict=True)}
