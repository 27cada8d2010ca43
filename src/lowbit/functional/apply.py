"""Calling an autograd Function, at the least cost."""

from __future__ import annotations

from typing import Any

import torch

from lowbit.kernels.plan import is_traced


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """function.apply(*args), all arguments given

    torch looks for defaults among the arguments on every call, which takes longer than a kernel on a small tensor;
    in plain eager mode this goes straight to what runs after that.
    """
    if is_traced(args[0]):
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]
