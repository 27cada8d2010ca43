"""Recording: the codes of a converted model as it runs, and a run on codes from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowbit.functional import dequantize
from lowbit.nn.coded import CodedActivation, Codes
from lowbit.nn.layer import QuantLayer


class Given(NamedTuple):
    """Codes for a quantizer to give, in the place of its own; with a scale that is computed, those of its run"""

    q: Tensor
    scale: Tensor | None = None
    zero_point: Tensor | None = None


@dataclass
class Call:
    """One call of a quantizer, the ``number``-th; ``codes`` are what it gives by itself for what it took

    A tensor that one quantizer takes several times is one call, and so it is in a file.
    """

    quantizer: CodedActivation
    number: int
    x: Tensor  # held, so that no other tensor takes its place in memory
    source: Tensor  # whose scale it is
    version: int
    codes: Codes

    @property
    def name(self) -> str:
        """That of the quantizer's place in the model."""
        return self.quantizer.name

    @property
    def key(self) -> tuple[str, int]:
        """What tells this call from all others of a run, and is the same in the next."""
        return self.name, self.number

    def is_like(self, other: Call) -> bool:
        """Whether another takes the same values and gives the same codes of them: a file may hold only one of both"""
        a, b = self.quantizer, other.quantizer
        same = a.grid == b.grid and a.per == b.per and self.x.dtype == other.x.dtype and torch.equal(self.x, other.x)
        return same and all(_same(one, two) for one, two in zip(self.codes, other.codes, strict=True))


@dataclass
class Recording:
    """A run: the calls of every quantizer, the output of every layer, and both in the order they came

    ``integer`` are the paths of the layers that multiplied codes, ``terms`` what the largest product that each of the
    others added may be, ``times`` how often each layer ran; ``events`` holds the calls, and the paths of the layers.
    """

    calls: dict[str, list[Call]] = field(default_factory=dict)
    layers: dict[str, Tensor] = field(default_factory=dict)
    times: dict[str, int] = field(default_factory=dict)
    integer: set[str] = field(default_factory=set)
    terms: dict[str, float] = field(default_factory=dict)
    events: list[Call | str] = field(default_factory=list)


@contextmanager
def recording(model: nn.Module, given: Mapping[tuple[str, int], Given] | None = None) -> Iterator[Recording]:
    """Record what the quantizers and layers give while this is open

    ``given``: by name and number of a call, the codes that it gives to what follows; what is recorded is its own.
    """
    record = Recording()
    with ExitStack() as stack:
        for path, module in model.named_modules():
            if isinstance(module, CodedActivation):
                stack.callback(_restore, module, ("forward", "codes"))
                _watch_quantizer(module, record, given or {})
            elif isinstance(module, QuantLayer):
                stack.callback(module.register_forward_hook(_hook(path, record), with_kwargs=True).remove)
                if module.product is not None:
                    stack.callback(setattr, module, "product", module.product)
                    module.product = _watched(module.product, path, record)
        yield record


def _restore(module: nn.Module, names: tuple[str, ...]) -> None:
    for name in names:
        module.__dict__.pop(name, None)


def _watch_quantizer(quantizer: Any, record: Recording, given: Mapping[tuple[str, int], Given]) -> None:
    own_forward, own_codes = quantizer.forward, quantizer.codes

    def forward(x: Tensor) -> Tensor:
        call = _call(quantizer, x, x, own_codes, record)
        codes = _given(call, given)
        if codes is None:
            return own_forward(x)
        return dequantize(*codes, per=quantizer.per, dtype=x.dtype)

    def codes(x: Tensor, source: Tensor | None = None) -> Codes:
        call = _call(quantizer, x, x if source is None else source, own_codes, record)
        return _given(call, given) or call.codes

    quantizer.forward, quantizer.codes = forward, codes


def _call(
    quantizer: CodedActivation,
    x: Tensor,
    source: Tensor,
    own_codes: Callable[[Tensor, Tensor], Codes],
    record: Recording,
) -> Call:
    version = 0 if x.is_inference() else x._version  # noqa: SLF001
    calls = record.calls.setdefault(quantizer.name, [])
    for call in calls:
        if call.x is x and call.source is source and call.version == version:
            return call
    call = Call(quantizer, len(calls), x, source, version, own_codes(x, source))
    calls.append(call)
    record.events.append(call)
    return call


def _given(call: Call, given: Mapping[tuple[str, int], Given]) -> Codes | None:
    found = given.get((call.name, call.number))
    if found is None:
        return None
    own = call.codes
    scale = own.scale if found.scale is None else found.scale.reshape(own.scale.shape)
    zero_point = own.zero_point
    if zero_point is not None and found.zero_point is not None:
        zero_point = found.zero_point.reshape(zero_point.shape).to(zero_point.dtype)
    return Codes(found.q.to(own.q.dtype), scale, zero_point)


def _hook(path: str, record: Recording) -> Callable[[Any, Any, Any, Any], None]:
    def hook(layer: Any, args: Any, kwargs: Any, output: Any) -> None:
        record.times[path] = record.times.get(path, 0) + 1
        if isinstance(output, Tensor):
            record.layers[path] = output.clone()  # what follows may change it in place
            record.events.append(path)
            if path not in record.integer and layer.takes_activations:
                with torch._C.DisableTorchFunction():  # noqa: SLF001 (no op of the module around it)
                    record.terms[path] = _largest_term(layer, args, kwargs, record)

    return hook


def _largest_term(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], record: Recording) -> float:
    """max abs(x) * max abs(w): sums of such products are as exact as these are, even where they cancel"""
    x, quantizer = args[0] if args else next(iter(kwargs.values())), layer.quantizer("input_quantizer")
    if isinstance(quantizer, CodedActivation):
        x = dequantize(*record.calls[quantizer.name][-1].codes, per=quantizer.per, dtype=x.dtype)
    elif quantizer is not None:
        x = quantizer(x)
    factors = (x, layer.weight) if layer.has_weight else (x,)
    return math.prod(float(factor.abs().nan_to_num(0.0, 0.0).max()) if factor.numel() else 0.0 for factor in factors)


def _watched(product: Callable[..., Any], path: str, record: Recording) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        output = product(*args, **kwargs)
        if output is not None:  # else the layer goes on in float
            record.integer.add(path)
        return output

    return watched


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)
