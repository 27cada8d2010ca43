"""Context: what the layers of one prepared model share while it runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Context:
    """Who is running: the modules whose own arithmetic is quantized, the innermost last; and the open edges."""

    def __init__(self) -> None:
        self.owners: list[Any] = []
        self.edges: list[Edge] = []
        self.has_ops = False

    def close(self) -> None:
        """The outermost call has ended: no edge holds a tensor any longer."""
        for edge in self.edges:
            edge.clear()


class Edge:
    """A tensor with several consumers is quantized once: the first consumer to come does it, the others take it.

    While compiling there is nothing to keep: the leader quantizes and takes statistics in, the others quantize alone,
    and the compiler finds that they compute the same.
    """

    def __init__(self, context: Context, consumers: int) -> None:
        self.context, self.consumers = context, consumers
        context.edges.append(self)
        self.clear()

    def clear(self) -> None:
        """Forget the tensor."""
        self.source: Tensor | None = None
        self.result: Tensor | None = None
        self.state: tuple[Any, ...] = ()
        self.left = 0

    def quantize(self, quantizer: nn.Module, x: Tensor, *, leads: bool) -> Tensor:
        """quantizer(x), computed once for all consumers of x."""
        if torch.compiler.is_compiling() or not self.context.owners:
            return quantizer(x) if leads else quantize_only(quantizer, x)
        state = (0 if x.is_inference() else x._version, torch.is_grad_enabled())  # noqa: SLF001
        if self.source is x and self.state == state and self.result is not None:
            result = self.result
            self.left -= 1
            if self.left == 0:
                self.clear()
            return result
        result = quantizer(x)
        self.source, self.result, self.state, self.left = x, result, state, self.consumers - 1
        return result

    def __getstate__(self) -> dict[str, Any]:
        """A copy holds no tensor."""
        nothing = {"source": None, "result": None, "state": (), "left": 0}
        return {"context": self.context, "consumers": self.consumers, **nothing}


def quantize_only(quantizer: Any, x: Tensor) -> Tensor:
    """quantizer(x), without taking x into its statistics."""
    observing, quantizer.observing = quantizer.observing, False
    try:
        return quantizer(x)
    finally:
        quantizer.observing = observing
