"""What a session makes once: torch's registry of ONNX functions, its lists of ops, and the files to verify."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch._export.utils as exporting
from onnx_ir.schemas import OpSignature
from torch.onnx._internal.exporter._registration import ONNXRegistry

from verifying import Exports


@pytest.fixture(scope="session", autouse=True)
def registry() -> Iterator[None]:
    """For all exports: torch builds both anew, in half a second, and for each node the signature of its operator."""
    build, ops = functools.cache(ONNXRegistry.from_torchlib), exporting._collect_all_valid_cia_ops_for_namespace

    def from_torchlib(opset_version: int) -> ONNXRegistry:
        found = copy.copy(build(opset_version))
        # An export adds its own functions at the front of these lists.
        found.functions = {target: list(functions) for target, functions in found.functions.items()}
        return found

    def from_op_schema(schema: Any) -> OpSignature:
        key = schema.domain, schema.name, schema.since_version
        if key not in signatures:
            signatures[key] = read(schema)
        return signatures[key]

    read, signatures = OpSignature.from_op_schema, dict[tuple[str, str, int], OpSignature]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(from_torchlib))
        patch.setattr(exporting, ops.__name__, functools.cache(ops))
        patch.setattr(OpSignature, "from_op_schema", staticmethod(from_op_schema))
        yield


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exports:
    return Exports(tmp_path_factory.mktemp("exported"))
