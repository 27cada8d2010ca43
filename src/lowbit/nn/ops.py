"""Ops: the products, sums and concatenations that a module computes by itself, outside of any layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lowbit.fake_quantize import is_recomputing
from lowbit.nn.coded import CodedWeight
from lowbit.nn.context import Context
from lowbit.nn.slots import Slotted
from lowbit.nn.swap import Swapped, remove
from lowbit.scale import NotCalibratedError


class Kind(NamedTuple):
    """A kind of op: its operands by torch's names, in torch's order; which may be a weight, with its outputs' axis.

    ``joins``: the operands come as one sequence and share a quantizer, which takes the result.
    """

    name: str
    operands: tuple[str, ...]
    weight: str = ""
    output_axis: int = 0
    first: int = 0
    joins: bool = False


_ADD = Kind("add", ("input", "other"))
_CAT = Kind("cat", ("tensors",), joins=True)
_MATMUL = Kind("matmul", ("input", "other"), weight="other", output_axis=-1)
_BMM = Kind("matmul", ("input", "mat2"), weight="mat2", output_axis=-1)
_ADDMM = Kind("addmm", ("mat1", "mat2"), weight="mat2", output_axis=-1, first=1)
_ATTENTION = Kind("attention", ("query", "key", "value"))
_LINEAR = Kind("linear", ("input", "weight"), weight="weight")
_CONV = Kind("conv", ("input", "weight"), weight="weight")
_CONV_TRANSPOSE = Kind("conv_transpose", ("input", "weight"), weight="weight", output_axis=1)
_POOL = Kind("pool", ("input",))

# ``x += y`` arrives as add_; its result takes x's place, so that a new tensor serves as well.
KINDS: dict[Callable[..., Any], Kind] = {
    torch.add: _ADD,
    Tensor.add: _ADD,
    Tensor.add_: _ADD,
    Tensor.__add__: _ADD,
    Tensor.__radd__: _ADD,
    Tensor.__iadd__: _ADD,
    torch.cat: _CAT,
    torch.concat: _CAT,
    torch.concatenate: _CAT,
    torch.matmul: _MATMUL,
    Tensor.matmul: _MATMUL,
    Tensor.__matmul__: _MATMUL,
    torch.bmm: _BMM,
    Tensor.bmm: _BMM,
    torch.addmm: _ADDMM,
    Tensor.addmm: _ADDMM,
    functional.scaled_dot_product_attention: _ATTENTION,
    functional.linear: _LINEAR,
    functional.conv1d: _CONV,
    functional.conv2d: _CONV,
    functional.conv3d: _CONV,
    functional.conv_transpose1d: _CONV_TRANSPOSE,
    functional.conv_transpose2d: _CONV_TRANSPOSE,
    functional.conv_transpose3d: _CONV_TRANSPOSE,
    functional.avg_pool1d: _POOL,
    functional.avg_pool2d: _POOL,
    functional.avg_pool3d: _POOL,
    functional.adaptive_avg_pool1d: _POOL,
    functional.adaptive_avg_pool2d: _POOL,
    functional.adaptive_avg_pool3d: _POOL,
}


def not_in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same op, with a new tensor as its result."""
    return torch.add if function in (Tensor.add_, Tensor.__iadd__) else function


def operands(kind: Kind, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The operands of a call, in order; None for one that is missing."""
    found = []
    for place, name in enumerate(kind.operands, kind.first):
        found.append(args[place] if place < len(args) else kwargs.get(name))
    return list(found[0]) if kind.joins and isinstance(found[0], list | tuple) else found


def counts(kind: Kind, found: list[Any]) -> bool:
    """Whether a call is one of those that are numbered: of float tensors with axes, such as losses have none."""
    return all(isinstance(operand, Tensor) and operand.is_floating_point() and operand.dim() > 0 for operand in found)


class QuantOp(Slotted):
    """y = op(q_0(x_0), q_1(x_1), …);  of a concatenation, y = q(op(x_0, x_1, …)), which is one scale for all"""

    product: Callable[..., Tensor | None] | None = None  # of a converted op that multiplies codes

    def __init__(
        self, kind: Kind, roles: Mapping[str, str], weights: Mapping[str, Tensor], sole: frozenset[str] = frozenset()
    ) -> None:
        super().__init__()
        self.kind, self.roles = kind, dict(roles)
        self.sole = sole  # the slots of weights that nothing else takes
        self._weights = {slot: (weight,) for slot, weight in weights.items()}  # which belong to another module

    def slots(self) -> dict[str, str]:
        return self.roles

    def slot_weight(self, slot: str) -> tuple[Tensor, int]:
        (weight,) = self._weights[slot]
        return weight, self.kind.output_axis % weight.dim()

    def slot_parameter(self, slot: str) -> Any:
        (weight,) = self._weights[slot]
        return weight if isinstance(weight, nn.Parameter) else None

    def check_weight(self, found: list[Any], owner: Owner, name: str) -> None:
        """Codes stand for one parameter, which is gone: what is still a parameter is another."""
        for operand, x in zip(self.kind.operands, found, strict=False):
            if isinstance(x, nn.Parameter) and self.coded(f"{operand}_quantizer") is not None:
                # Only here: compiled code that reads the path is code for this path alone.
                name = f"{owner._path}.{name}".removeprefix(".")  # noqa: SLF001
                raise RuntimeError(
                    f"{name} takes another weight now than with prepare's example_inputs, and has the codes of one; "
                    f"leave it in float: Rule({name!r})"
                )

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """function(*args, **kwargs), quantized"""
        function = not_in_place(function)
        if self.product is not None:
            output = self.product(self, function, args, kwargs)
            if output is not None:
                return output
        if self.kind.joins:
            return self.quantize("result_quantizer", function(*args, **kwargs))
        places = list(args)
        for place, name in enumerate(self.kind.operands, self.kind.first):
            slot = f"{name}_quantizer"
            if slot not in self.roles or self.quantizer(slot) is None:
                continue
            if place < len(places):
                places[place] = self._operand(slot, places[place])
            else:
                kwargs = {**kwargs, name: self._operand(slot, kwargs[name])}
        return function(*places, **kwargs)

    def _operand(self, slot: str, x: Tensor) -> Tensor:
        if (coded := self.coded(slot)) is not None:
            return coded()
        if self.roles[slot] == "weight":
            return self.quantize_weight(slot, x, self.kind.output_axis % x.dim())
        return self.quantize(slot, x)


class Owner(Swapped):
    """y = parent(x), with the ops of its own forward quantized: each by its kind and its number in the call"""

    _context: Context | None = None  # as in a slice of a Sequential, which torch makes of the same class

    def equip(self, ops: Mapping[str, QuantOp], context: Context, path: str, totals: Mapping[str, int]) -> None:
        """Take the ops, by names such as add_0; without any, this only says when a run begins and ends

        ``totals`` are the numbers of ops of each kind that one call runs.
        """
        if ops:  # a Sequential would take an empty one for one of its own
            self.register_module("quantized_ops", nn.ModuleDict(ops).train(self.training))
        self._context = context
        self._numbers: dict[str, int] = {}
        self._path, self._totals = path, dict(totals)

    def strip(self) -> None:
        """Remove what ``equip`` added."""
        self._modules.pop("quantized_ops", None)
        remove(self, "_context", "_numbers", "_path", "_totals")

    def keep_as_codes(self, name: str, coded: CodedWeight) -> None:
        """From now on the codes of an op, which alone takes it, stand for this parameter."""
        del self._parameters[name]
        self.__dict__.setdefault("_coded", {})[name] = coded

    def __getattr__(self, name: str) -> Any:
        """A parameter that is kept as codes is their value."""
        coded = self.__dict__.get("_coded", {}).get(name)
        return super().__getattr__(name) if coded is None else coded()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        context = self._context
        if context is None:
            return self.float_class.forward(self, *args, **kwargs)
        outermost = not context.owners
        context.owners.append(self)
        try:
            if outermost and context.has_ops:
                with _Watch(context):
                    output = self.float_class.forward(self, *args, **kwargs)
            else:
                output = self.float_class.forward(self, *args, **kwargs)
        except NotCalibratedError as error:
            raise (self._name_waiting(error) if outermost else error) from error
        else:
            self._check_totals()
            return output
        finally:
            self._numbers.clear()  # so that each call finds what the first one, which may be compiled, has found
            context.owners.pop()
            if outermost and not is_recomputing():
                context.close()

    def _name_waiting(self, error: NotCalibratedError) -> NotCalibratedError:
        """The same error, with the paths of the quantizers that have no scale yet."""
        waiting = [name for name, module in self.named_modules() if getattr(module, "is_ready", True) is False]
        paths = ", ".join(waiting).replace("quantized_ops.", "")
        return NotCalibratedError(
            f"no scale yet: {paths}; call lowbit.calibrate(model, batches), or train a step first"
        )

    def _check_totals(self) -> None:
        """An op that ran now and not in the example, or the other way round, would have shifted the numbers."""
        for kind, total in self._totals.items():
            if (ran := self._numbers.get(kind, 0)) != total:
                name = f"{self._path}.{kind}_".removeprefix(".")
                raise RuntimeError(
                    f"{self._path or 'the model'} ran {ran} ops of kind {kind}, but {total} with prepare's "
                    f"example_inputs, in eval mode; leave them in float: Rule('{name}*')"
                )

    def run_op(self, kind: Kind, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Number the op, and quantize it if it is one of those chosen."""
        found = operands(kind, args, kwargs)
        if not counts(kind, found):
            return function(*args, **kwargs)
        number = self._numbers.get(kind.name, 0)
        self._numbers[kind.name] = number + 1
        ops: Any = self._modules.get("quantized_ops", {})
        name = f"{kind.name}_{number}"
        if name not in ops:
            return function(*args, **kwargs)
        ops[name].check_weight(found, self, name)
        return ops[name].run(function, args, kwargs)


class _Watch(TorchFunctionMode):
    """Hands every op to the innermost owner."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self.context = context

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kind = KINDS.get(func)
        if kind is None:
            return func(*args, **(kwargs or {}))
        return self.context.owners[-1].run_op(kind, func, args, kwargs or {})
