"""The arithmetic of a converted model: each in turn."""

from __future__ import annotations

import pytest

from preparing import ARITHMETICS


@pytest.fixture(params=ARITHMETICS)
def arithmetic(request: pytest.FixtureRequest) -> str:
    return request.param
