"""Blueprint: where which codes go in a float model; from it and the tensors a converted model is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.spectral_norm import SpectralNorm, remove_spectral_norm
from torch.nn.utils.weight_norm import WeightNorm, remove_weight_norm

from lowbit.granularity import Granularity
from lowbit.nn import integer
from lowbit.nn.attention import disable_fast_path
from lowbit.nn.coded import ActivationForm, CodedActivation, CodedWeight, Waiting, WeightForm
from lowbit.nn.context import Context, Edge
from lowbit.nn.families import family_of
from lowbit.nn.layer import Quantized, QuantLayer
from lowbit.nn.ops import Kind, Owner, QuantOp
from lowbit.nn.quantizers import Binarize, DoReFaWeight
from lowbit.nn.recurrent import RecurrentLayer
from lowbit.nn.slots import Slotted
from lowbit.nn.swap import swap
from lowbit.record import Record, check_choice
from lowbit.ste import SteKind

ARITHMETICS = ("float", "integer")


@dataclass(frozen=True)
class Blueprint(Record):
    """All of a converted model that is neither a tensor nor the float model, in plain values

    A place is the path of a quantizer, such as "conv1.weight_quantizer".

    - ``layers``: the paths of the layers with quantizers
    - ``owners``: by path, the ops of a module's own forward and how many of each kind it runs
    - ``weights``, ``activations``: by place, the form of a quantizer; a weight that is quantized on every call, as it
      is computed or taken elsewhere too, is among the activations
    - ``edges``: the places that share a quantizer, its own first
    - ``grids``: the places whose values lie on the grid of the quantizer at another
    - ``owned``: the parameters, by path, that one op alone takes, and its place
    - ``biases``: the layers with a new bias, by what it is, "float" or "int32"
    - ``folded``: the batch norms that are part of the layer before
    - ``floats``: what was left in float, and why
    - ``recipe``: the recipe it was prepared with
    """

    arithmetic: str
    layers: list[str] = field(default_factory=list)
    owners: dict[str, dict[str, Any]] = field(default_factory=dict)
    weights: dict[str, dict[str, Any]] = field(default_factory=dict)
    activations: dict[str, dict[str, Any]] = field(default_factory=dict)
    edges: list[list[str]] = field(default_factory=list)
    grids: dict[str, str] = field(default_factory=dict)
    owned: dict[str, str] = field(default_factory=dict)
    biases: dict[str, str] = field(default_factory=dict)
    folded: list[str] = field(default_factory=list)
    floats: dict[str, str] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice("arithmetic", self.arithmetic, ARITHMETICS)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The blueprint that ``to_dict`` wrote; every key must be there."""
        if isinstance(data, Mapping):
            for key in fields(cls):
                if key.name not in data:
                    raise ValueError(f"{cls.__name__} needs the key {key.name!r}")
        return super().from_dict(data)


@dataclass
class Conversion:
    """What a converted model knows of itself; ``products`` says of each layer and op how it multiplies."""

    blueprint: Blueprint
    products: dict[str, str] = field(default_factory=dict)


def build(model: Any, blueprint: Blueprint) -> None:
    """Turn a float model into the converted one, in place, with every code and scale still to be loaded."""
    _Build(model, blueprint).run()


def join(path: str, name: str) -> str:
    """The path of something inside a module."""
    return f"{path}.{name}" if path else name


class _Build:
    def __init__(self, model: Any, blueprint: Blueprint) -> None:
        self.model, self.blueprint, self.context = model, blueprint, Context()
        self.modules: dict[str, Any] = dict(model.named_modules())

    def run(self) -> None:
        for module in self.modules.values():
            disable_fast_path(module)
        for place in self.blueprint.weights:
            path, _, slot = place.rpartition(".")
            self._make_plain(path, slot.removesuffix("_quantizer"))
        for path in self.blueprint.biases:
            self._make_plain(path, "bias")
        for path in self.blueprint.layers:
            layer, family = self._module(path), family_of(self._module(path))
            if family is None:
                raise ValueError(f"{path or 'the model'} is a {type(layer).__name__}, but a layer was quantized there")
            swap(layer, family.mixin)
            layer.equip({}, context=self.context)
        for path, owner in self.blueprint.owners.items():
            self._own(path, owner)
        self.modules = dict(self.model.named_modules())
        self._place_quantizers()
        self._drop_floats()
        if not isinstance(self.model, Owner | Quantized):
            swap(self.model, Owner)
            self.model.equip({}, self.context, "", {})
        self.model.eval().requires_grad_(False)
        conversion = Conversion(self.blueprint)
        for path, holder in self.model.named_modules():
            if isinstance(holder, Slotted) and self.blueprint.arithmetic == "integer":
                product, reason = integer.choose(holder)
                if isinstance(holder, QuantLayer | QuantOp):
                    holder.product = product
                conversion.products[path] = f"float: {reason}" if reason else "integer"
        object.__setattr__(self.model, "_lowbit_converted", conversion)

    def _module(self, path: str) -> Any:
        if path not in self.modules:
            raise ValueError(f"the model has no {path!r}, where something was quantized; build the same model")
        return self.modules[path]

    def _slot(self, place: str) -> tuple[Any, str]:
        path, _, slot = place.rpartition(".")
        holder = self._module(path)
        if not isinstance(holder, Slotted) or slot not in holder.slots():
            raise ValueError(f"the model has no place {place!r} for a quantizer; build the same model")
        return holder, slot

    def _make_plain(self, path: str, name: str) -> None:
        """A weight that is computed from others, as by pruning, becomes a parameter: soon, codes stand for it."""
        module = self.modules.get(path)
        if module is None:  # an op, which has none of its own
            return
        if parametrize.is_parametrized(module, name):
            # torch takes the property from the module's class, which copies of the module share: give it its own.
            cls = type(module)
            members = {key: value for key, value in vars(cls).items() if key not in ("__dict__", "__weakref__")}
            module.__class__ = type(cls.__name__, cls.__bases__, members)
            parametrize.remove_parametrizations(module, name)
        for hook in computing_hooks(module):
            if getattr(hook, "_tensor_name", getattr(hook, "name", "")) == name:
                next(undo for kind, undo in _UNDO.items() if isinstance(hook, kind))(module, name)

    def _own(self, path: str, data: dict[str, Any]) -> None:
        owner = self._module(path)
        ops = {}
        for name, op in data["ops"].items():
            kind = Kind(**{**op["kind"], "operands": tuple(op["kind"]["operands"])})
            ops[name] = QuantOp(kind, op["roles"], {})
            ops[name].equip({}, context=self.context)
        swap(owner, Owner)
        owner.equip(ops, self.context, path, data["totals"])
        self.context.has_ops |= bool(ops)

    def _place_quantizers(self) -> None:
        blueprint = self.blueprint
        for place, form in blueprint.weights.items():
            holder, slot = self._slot(place)
            data = {key: value for key, value in form.items() if key != "dtype"}
            holder.register_module(slot, CodedWeight(WeightForm.from_dict(data), getattr(torch, form["dtype"])))
        for place, form in blueprint.activations.items():
            holder, slot = self._slot(place)
            holder.register_module(slot, activation(form, place.replace("quantized_ops.", "")))
        for places in blueprint.edges:
            holder, slot = self._slot(places[0])
            edge = Edge(self.context, holder.get_submodule(slot), len(places))
            for place in places:
                holder, slot = self._slot(place)
                holder.share(slot, edge)
        for place, other in blueprint.grids.items():
            holder, slot = self._slot(place)
            source, source_slot = self._slot(other)
            holder.find_on_grid(slot, source.quantizer(source_slot))

    def _drop_floats(self) -> None:
        """What codes stand for, and what was folded."""
        blueprint = self.blueprint
        for place in {*blueprint.weights, *(place for places in blueprint.edges for place in places)}:
            holder, slot = self._slot(place)
            if holder.coded(slot) is not None:
                holder._parameters.pop(slot.removesuffix("_quantizer"), None)  # noqa: SLF001
        for path, place in blueprint.owned.items():
            owner_path, _, name = path.rpartition(".")
            holder, slot = self._slot(place)
            self._module(owner_path).keep_as_codes(name, holder.coded(slot))
        for path, kind in blueprint.biases.items():
            self._module(path).hold_bias(kind)
        for path in blueprint.folded:
            self._replace(self._module(path), nn.Identity())
        for module in self.modules.values():
            if isinstance(module, RecurrentLayer):
                module._init_flat_weights()  # noqa: SLF001

    def _replace(self, old: nn.Module, new: nn.Module) -> None:
        for parent in list(self.model.modules()):
            for name, child in parent._modules.items():  # noqa: SLF001
                if child is old:
                    parent._modules[name] = new  # noqa: SLF001


# Hooks that compute a tensor before each forward, and what undoes them.
_UNDO: dict[type, Callable[[nn.Module, str], Any]] = {
    prune.BasePruningMethod: prune.remove,
    WeightNorm: remove_weight_norm,
    SpectralNorm: remove_spectral_norm,
}


def computing_hooks(module: nn.Module) -> list[Any]:
    """The hooks that set a tensor of the module, as pruning does, from others."""
    return [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, tuple(_UNDO))]  # noqa: SLF001


def activation(form: Mapping[str, Any], name: str) -> nn.Module:
    """The quantizer of an activation; those that are one formula stay what they are in training."""
    if form["method"] == "binary":
        return Binarize(Granularity.from_dict(form["per"]), SteKind.IDENTITY).eval()
    if form["method"] == "dorefa_weight":
        return DoReFaWeight(form["bits"]).eval()
    if form["method"] == "waiting":
        return Waiting(name)
    return CodedActivation(ActivationForm.from_dict({k: v for k, v in form.items() if k != "method"}), name)


def conversion_of(model: nn.Module) -> Conversion | None:
    """What ``convert`` made of the model; None where it did nothing."""
    return model.__dict__.get("_lowbit_converted")


def converted_module(model: nn.Module) -> nn.Module | None:
    """The module that ``convert`` gave: the model itself, or one in it; None where there is none."""
    return next((module for module in model.modules() if conversion_of(module) is not None), None)


Tensors = dict[str, Tensor]
