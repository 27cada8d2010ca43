from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from backends import RUNNABLE, device_of
from lowbit.kernels import native, plan

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, max_examples=60)
hypothesis.settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--native", type=Path, help="run another build of native.c, such as one with sanitizers")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--native"):
        found = functools.cache(lambda: native.Library(path))
        found.__wrapped__ = native.library.__wrapped__
        native.library = found


@pytest.fixture(params=RUNNABLE, ids="-".join)
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The device, with every op on one backend: each that can run here in turn."""
    name, backend = request.param
    with plan.prefer(backend):
        yield torch.device(name)


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
