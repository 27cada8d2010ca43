"""Calling an autograd Function, at the least cost."""

from __future__ import annotations

from typing import Any

import torch

from lowbit.kernels.plan import is_traced
from lowbit.tracing import at_trace_time

Function = type[torch.autograd.Function]


def apply(function: Function, *args: Any, settled: Function | None = None) -> Any:
    """function.apply(*args), all arguments given; in plain eager mode ``settled``, where the function has such a form

    torch looks for defaults among the arguments on every call, which takes longer than a kernel on a small tensor;
    in plain eager mode this goes straight to what runs after that.
    """
    if torch.compiler.is_compiling() and _is_inside_grad():
        raise RuntimeError(
            "torch.compile of torch.func.grad differentiates the forward of an autograd Function and never calls its "
            "backward, so that every rounding has gradient 0; compile the loss and call torch.func.grad outside"
        )
    return function.apply(*args) if is_traced(*args) else apply_plain(settled or function, *args)


def apply_plain(function: Function, *args: Any) -> Any:
    """The same where it is known that nothing is traced"""
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


@at_trace_time
def _is_inside_grad() -> bool:
    functorch = torch._C._functorch  # noqa: SLF001 (torch has no public name for this)
    stack = functorch.get_interpreter_stack() or ()
    return any(interpreter.key() == functorch.TransformType.Grad for interpreter in stack)
