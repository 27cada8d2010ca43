"""One registry of torch's ONNX functions for all exports of a session: torch builds it anew, in half a second."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator

import pytest
from torch.onnx._internal.exporter._registration import ONNXRegistry


@pytest.fixture(scope="session", autouse=True)
def registry() -> Iterator[None]:
    build = functools.cache(ONNXRegistry.from_torchlib)

    def from_torchlib(opset_version: int) -> ONNXRegistry:
        found = copy.copy(build(opset_version))
        # An export adds its own functions at the front of these lists.
        found.functions = {target: list(functions) for target, functions in found.functions.items()}
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(from_torchlib))
        yield
