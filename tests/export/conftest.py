"""What a session makes once: torch's registry of ONNX functions, its list of ops, and the files to verify."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator

import pytest
import torch._export.utils as exporting
from torch.onnx._internal.exporter._registration import ONNXRegistry

from verifying import Exports


@pytest.fixture(scope="session", autouse=True)
def registry() -> Iterator[None]:
    """For all exports: torch builds both anew, in half a second."""
    build, ops = functools.cache(ONNXRegistry.from_torchlib), exporting._collect_all_valid_cia_ops_for_namespace

    def from_torchlib(opset_version: int) -> ONNXRegistry:
        found = copy.copy(build(opset_version))
        # An export adds its own functions at the front of these lists.
        found.functions = {target: list(functions) for target, functions in found.functions.items()}
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(from_torchlib))
        patch.setattr(exporting, ops.__name__, functools.cache(ops))
        yield


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exports:
    return Exports(tmp_path_factory.mktemp("exported"))
