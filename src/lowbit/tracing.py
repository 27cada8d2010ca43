"""What torch's compiler is told: constants while it traces, and ops that it calls as they are."""

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


def opaque(name: str, function: Callable[..., object], fake: Callable[..., object]) -> None:
    """Make a function the op lowbit::name of torch's, which compilers call as it is; of its results they see ``fake``'s

    It neither changes its arguments nor gives one back. What torch.library.custom_op does, but for its checks, which
    take longer than all else of a call.
    """
    schema = torch.library.infer_schema(function, mutates_args=())
    torch.library.define(f"lowbit::{name}", schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(f"lowbit::{name}", "CompositeExplicitAutograd", function)
    torch.library.register_fake(f"lowbit::{name}", fake)
