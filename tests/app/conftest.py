"""The digits, read once for all tests of a session."""

from __future__ import annotations

import pytest

from lowbit.app.data import Data, load_data


@pytest.fixture(scope="session")
def digits() -> Data:
    return load_data("digits")
