"""Division that rounds once, on every device, traced or not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowbit.tracing import at_trace_time


def divide(a: Tensor, b: Tensor) -> Tensor:
    """a / b, correctly rounded

    b is a tensor on a's device: eager CUDA turns division by a Python number into a product with its reciprocal. Under
    torch.compile on CUDA the quotient is an op of our own, since Inductor's Triton code would approximate it.
    """
    if torch.compiler.is_dynamo_compiling() and a.is_cuda and torch.version.hip is None:
        _register_lowering()
        wide = torch.promote_types(a.dtype, b.dtype)
        if wide == torch.float32:
            return torch.ops.lowbit.divide(a.to(wide), b.to(wide))
    return torch.div(a, b)


@torch.library.custom_op("lowbit::divide", mutates_args=())
def _divide(a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, b)


@_divide.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, b)


@at_trace_time
def _register_lowering() -> bool:
    """Teach Inductor that lowbit::divide is one instruction, to be fused like any other; runs while tracing."""
    from torch._inductor.lowering import lowerings, make_pointwise, register_lowering
    from torch._inductor.virtualized import ops

    def instruction(a: Any, b: Any) -> Any:
        return ops.inline_asm_elementwise(
            a, b, asm="div.rn.f32 $0, $1, $2;", constraints="=f,f,f", dtype=torch.float32, is_pure=True, pack=1
        )

    op = torch.ops.lowbit.divide.default
    if op not in lowerings:
        register_lowering(op, broadcast=True)(make_pointwise(instruction))
    return True
