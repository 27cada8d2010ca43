"""Context: what the layers of one prepared model share while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.fake_quantize import is_recomputing
from lowbit.functional.linear import Coded, code_parameters
from lowbit.granularity import PerChannel
from lowbit.kernels import plan
from lowbit.kernels.plan import is_plain


class Context:
    """Who is running: the modules whose own arithmetic is quantized, the innermost last; and the open edges."""

    integer_products = True  # whether layers may multiply codes
    expected: tuple[Any, ...] = ()  # of the next HeldWeights

    def __init__(self) -> None:
        self.owners: list[Any] = []
        self.edges: list[Edge] = []
        self.has_ops = False
        self.held: HeldWeights | None = None

    def close(self) -> None:
        """The outermost call has ended: no edge holds a tensor any longer."""
        for edge in self.edges:
            edge.clear()

    def __getstate__(self) -> dict[str, Any]:
        """A copy holds no weights."""
        return self.__dict__ | {"held": None, "expected": ()}


class HeldWeights:
    """Weights as their quantizers first gave them, which no weight's change may make wrong.

    ``expected`` are those whose codes were asked for the last time: on a GPU the first who asks has all of them made,
    in one launch for each dtype and grid (but in a CUDA graph, which would outlive the table of their addresses).
    """

    def __init__(self, expected: Iterable[tuple[Any, nn.Parameter]] = ()) -> None:
        self.results: dict[tuple[Any, ...], tuple[int, Any]] = {}
        self.expected = tuple(expected)
        self.asked: dict[tuple[Any, nn.Parameter], None] = {}
        self.captured = _is_capturing()

    def take(self, quantizer: nn.Module, weight: nn.Parameter, what: str, run: Callable[[], Any]) -> Any:
        """run(), the weight's values or its codes by this quantizer, computed once"""
        key = quantizer, weight, what, torch.is_grad_enabled() and weight.requires_grad
        if what == "codes" and plan.runs("triton", weight):
            self.asked[quantizer, weight] = None
            if key not in self.results and not self.captured:
                self._code_expected(quantizer, weight)
        if key not in self.results:
            self.results[key] = version_of(weight), run()
        version, result = self.results[key]
        if version_of(weight) != version:
            raise RuntimeError(
                "a weight changed inside lowbit.weights_once, which quantizes it once; step the optimizer after it"
            )
        return result

    def serves(self, weight: nn.Parameter) -> bool:
        """Whether what is held lives as long as what takes it: a CUDA graph lives longer than what began before it."""
        return not weight.is_cuda or _is_capturing() == self.captured

    def _code_expected(self, quantizer: Any, weight: nn.Parameter) -> None:
        """The codes of all expected weights that are like this one, in one launch."""
        kind = _kind(quantizer, weight)
        alike = [pair for pair in self.expected if _kind(*pair) == kind and not self._holds(*pair, kind)]
        if kind is None or len(alike) < 2:
            return
        results = code_parameters([weight for _, weight in alike], grid=quantizer.grid)
        for (found, other), coded in zip(alike, results, strict=True):
            self.results[found, other, "codes", kind[-1]] = version_of(other), coded

    def _holds(self, quantizer: Any, weight: nn.Parameter, kind: tuple[Any, ...] | None) -> bool:
        return kind is not None and (quantizer, weight, "codes", kind[-1]) in self.results


def _kind(quantizer: Any, weight: nn.Parameter) -> tuple[Any, ...] | None:
    """What weights have in common that one launch codes; None where none does"""
    plain = is_plain(weight) and weight.dim() == 2 and weight.numel() > 0 and weight.is_contiguous()
    if not plain or not quantizer.is_repeatable or quantizer.codes_refusal() or not quantizer.symmetric:
        return None
    if quantizer.per != PerChannel(0) or not quantizer.grid.fits_int8 or weight.dtype == torch.float64:
        return None
    return weight.dtype, weight.device, quantizer.grid, torch.is_grad_enabled() and weight.requires_grad


def _is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class Edge:
    """A tensor with several consumers is quantized once: the first consumer to come does it, the others take it.

    The quantizer is a child of one consumer, the leader; so it is in the model, and in its state_dict, once.

    While compiling there is nothing to keep: the leader quantizes and takes statistics in, the others quantize alone,
    and the compiler finds that they compute the same.
    """

    def __init__(self, context: Context, quantizer: nn.Module, consumers: int) -> None:
        self.context, self.quantizer, self.consumers = context, quantizer, consumers
        context.edges.append(self)
        self.clear()

    def clear(self) -> None:
        """Forget the tensor."""
        self.source: Tensor | None = None
        self.result: Tensor | Coded | None = None
        self.state: tuple[Any, ...] = ()
        self.left = 0

    def quantize(self, x: Tensor, *, leads: bool) -> Tensor:
        """quantizer(x), computed once for all consumers of x; where codes are there already, their values."""
        result = self._take(x, self.quantizer, leads=leads)
        return result if isinstance(result, Tensor) else result.values()

    def code(self, x: Tensor, *, leads: bool) -> Coded:
        """quantizer.code(x), computed once for all consumers of x, which takes no values of x yet."""
        quantizer: Any = self.quantizer
        result = self._take(x, quantizer.code, leads=leads)
        assert isinstance(result, Coded)
        return result

    def has_values(self, x: Tensor) -> bool:
        """Whether a consumer of x came first that takes values; codes of x would be a second quantization."""
        return self.source is x and isinstance(self.result, Tensor)

    def _take(self, x: Tensor, run: Callable[[Tensor], Any], *, leads: bool) -> Tensor | Coded:
        if torch.compiler.is_compiling() or not (self.context.owners or is_recomputing()):
            return run(x) if leads else quantize_only(self.quantizer, x, run)
        # Activation checkpointing runs a part of the model without gradients, or with hooks that save nothing; later it
        # runs that part alone. A result from outside would be missing then, so each part quantizes for itself.
        version = version_of(x)
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # noqa: SLF001
        state = (version, torch.is_grad_enabled(), hooks)
        known = self.source is x and self.result is not None and self.state[0] == version
        if known and self.state == state:
            result = self.result
            assert result is not None
            self.left -= 1
            if self.left == 0:
                self.clear()
            return result
        result = quantize_only(self.quantizer, x, run) if known else run(x)
        self.source, self.result, self.state, self.left = x, result, state, self.consumers - 1
        return result

    def __getstate__(self) -> dict[str, Any]:
        """A copy holds no tensor."""
        nothing = {"source": None, "result": None, "state": (), "left": 0}
        return {"context": self.context, "quantizer": self.quantizer, "consumers": self.consumers, **nothing}


def version_of(x: Tensor) -> int:
    """How often x was changed in place; of an inference tensor torch doesn't know."""
    return 0 if x.is_inference() else x._version  # noqa: SLF001


def quantize_only(quantizer: Any, x: Tensor, run: Callable[[Tensor], Any] | None = None) -> Any:
    """quantizer(x), or what another method of it gives, without taking x into its statistics."""
    observing, quantizer.observing = quantizer.observing, False
    try:
        return (run or quantizer)(x)
    finally:
        quantizer.observing = observing
