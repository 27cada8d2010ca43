"""Stub."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowbit.kernels.signature import Signature

ACCUMULATOR: torch.dtype | None = None


def absence() -> str:
    return "not written yet"


def refusal(signature: Signature) -> str:
    return ""


def kernel(signature: Signature) -> Callable[..., Any]:
    raise NotImplementedError


def workspace_size(signature: Signature) -> int:
    return 0
