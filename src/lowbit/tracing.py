"""What torch's compiler is told while it traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., object])


def at_trace_time(function: Function) -> Function:
    """Dynamo calls this function as it is, with constants, and takes what it gives for a constant

    All that torch.compiler.assume_constant_result does, but that would import Dynamo, for a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001
    return function


@at_trace_time
def is_exporting() -> bool:
    """torch.compiler.is_exporting(), which Dynamo of torch 2.11 takes for True in all that it traces"""
    return torch.compiler.is_exporting()
