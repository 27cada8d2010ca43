"""Packages that only the export needs."""

from __future__ import annotations

import importlib
from typing import Any


def require(package: str, extra: str) -> Any:
    """The package, or an error that names the extra that installs it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(f"{package} is not installed; install it: pip install 'lowbit[{extra}]'") from error
