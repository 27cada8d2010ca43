from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest
import torch

from backends import device_of

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, max_examples=60)
hypothesis.settings.load_profile("ci")

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def fresh_memory_is_nan() -> Iterator[None]:
    """Deterministic mode fills torch.empty with NaN, so that an output nobody wrote shows."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=False)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def fast_device(backend: str) -> torch.device:
    """The device that the test's fast backend runs on."""
    return device_of(backend)
