"""Preparation: from a float model, a recipe and the flow of its data to quantizers in their places."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.fake_quantize import FakeQuantize
from lowbit.flow import Flow, Use, can_fold
from lowbit.granularity import Granularity, PerChannel, PerGroup, PerTensor, PerToken
from lowbit.nn.attention import disable_fast_path, enable_fast_path
from lowbit.nn.batch_norm import FoldedBatchNorm, FreezableBatchNorm
from lowbit.nn.context import Context, Edge
from lowbit.nn.families import ATTENTION_INPUTS, family_of, refusal
from lowbit.nn.layer import Quantized, QuantLayer
from lowbit.nn.ops import Owner, QuantOp
from lowbit.nn.slots import Slotted, rows
from lowbit.nn.swap import swap, swap_back
from lowbit.recipe import QuantSpec, Recipe, Rule
from lowbit.scale import PerBatch

Choice = Recipe | Rule

UNSEEN = "prepare saw no example_inputs, and so no op outside of a layer, no residual sum and no data flow"


@dataclass
class Preparation:
    """What ``prepare`` did to a model; kept with it.

    ``floats`` says of each module with parameters, and of each op, that was left in float, why.
    """

    recipe: Recipe
    traced: bool
    context: Context = field(default_factory=Context)
    floats: dict[str, str] = field(default_factory=dict)
    restarts: bool = False  # a float checkpoint was loaded, and the scales of weights are to follow


@dataclass
class _Request:
    """An activation quantizer that a module wants in one of its slots."""

    holder: Slotted
    slot: str
    spec: QuantSpec
    per: Granularity
    signed: bool | None
    use: Use | None
    path: str


class Builder:
    """Puts the quantizers of a recipe into a model, in place."""

    def __init__(self, model: nn.Module, recipe: Recipe, flow: Flow | None) -> None:
        self.model, self.recipe, self.flow = model, recipe, flow
        self.preparation = Preparation(recipe, traced=flow is not None)
        self.context = self.preparation.context
        self.context.integer_products = recipe.integer_products
        self.modules = dict(model.named_modules())
        self.paths: dict[nn.Module, list[str]] = {}  # a module may have several
        for path, module in model.named_modules(remove_duplicate=False):
            self.paths.setdefault(module, []).append(path)
        self.errors: list[str] = []
        self.requests: list[_Request] = []
        self.alive: list[Tensor] = []  # what a parametrization computes would give its id to the next
        self.weights: dict[tuple[int, QuantSpec, Granularity], list[tuple[Slotted, str, nn.Module]]] = {}
        devices = (tensor.device for tensor in _state(model))
        self.device = next(devices, (flow and flow.device) or torch.device("cpu"))

    def build(self) -> Preparation:
        """Choose, check, and only then change the model."""
        layers = self._choose_layers()
        ops = self._choose_ops()
        self._check_rules()
        self._raise_errors()
        try:
            self._change(layers, ops)
        except BaseException:
            dismantle(self.model)  # whole or not at all
            raise
        return self.preparation

    def _change(self, layers: dict[str, Choice], ops: dict[str, dict[str, tuple[Any, Choice]]]) -> None:
        for module in self.modules.values():
            disable_fast_path(module)
        for path, choice in layers.items():
            self._equip(path, choice)
        self._equip_ops(ops)
        self._raise_errors()
        self._place_activations()
        self._equip_norms()
        self._share_weights()
        self._own_root()
        if next(quantizers(self.model), None) is None:
            raise ValueError("the recipe quantizes nothing of this model; give it a weight or an activation that fits")

    def _raise_errors(self) -> None:
        if self.errors:
            raise ValueError(
                "the recipe would quantize these, but can't:\n  "
                + "\n  ".join(self.errors)
                + "\nleave each in float by a rule (Rule(match)), or allow it by name (allow_float)"
            )

    def _choose_layers(self) -> dict[str, Choice]:
        layers = {}
        for path, module in self.modules.items():
            choice = self.recipe.choose(path, module, *self.paths[module])
            family, problem = family_of(module), refusal(module)
            attention = path.removesuffix(".out_proj")
            if family is None and not problem:
                self._note_float(path, module)
            elif attention in self.preparation.floats and isinstance(self.modules[attention], nn.MultiheadAttention):
                self.preparation.floats[path] = f"part of {attention}, which is in float"
            elif not any((choice.weight, choice.activation, choice.output)):
                self.preparation.floats[path] = _why_float(choice)
            elif not (problem := problem or _bias_problem(choice)):
                layers[path] = choice
            elif self.recipe.allows_float(path):
                self.preparation.floats[path] = f"allowed: {problem}"
            else:
                self.errors.append(f"{path or 'the model'} ({type(module).__name__}): {problem}")
        return layers

    def _note_float(self, path: str, module: nn.Module) -> None:
        if any(parameter.is_floating_point() for parameter in module.parameters(recurse=False)):
            self.preparation.floats[path] = f"{type(module).__name__} runs in float"

    def _choose_ops(self) -> dict[str, dict[str, tuple[Any, Choice]]]:
        """The sites of each owner that get a quantizer."""
        chosen: dict[str, dict[str, tuple[Any, Choice]]] = {}
        for site in self.flow.sites if self.flow else ():
            path = _join(site.owner, site.name)
            choice = self.recipe.choose(path, self.modules[site.owner])
            chosen.setdefault(site.owner, {})  # even for none: its ops would count as those of the owner around it
            if self.flow is not None and self.flow.in_place and site.kind.name == "add":
                self.preparation.floats[path] = "the model drops the result of an in-place sum"
            elif isinstance(self.modules[site.owner], nn.Sequential | nn.ModuleList | nn.ModuleDict):
                self.preparation.floats[path] = "a container has no place for the quantizers of its own ops"
            elif choice.activation is None and not (site.weights and choice.weight):
                self.preparation.floats[path] = _why_float(choice)
            else:
                chosen[site.owner][site.name] = site, choice
        return chosen

    def _check_rules(self) -> None:
        ops = [
            (_join(site.owner, site.name), self.modules[site.owner]) for site in (self.flow.sites if self.flow else ())
        ]
        modules = list(self.model.named_modules(remove_duplicate=False))
        places = [(path, module) for path, module in modules if _is_place(module)]
        for number, rule in enumerate(self.recipe.rules):
            if any(rule.matches(path, module) for path, module in (*places, *ops)):
                continue
            others = [path for path, module in modules if rule.matches(path, module)]
            hint = f"; {others[0] or 'the model'} is no layer, but may hold some: {others[0]}.*" if others else ""
            if self.flow is None:
                hint += "; ops such as *.add_0 are seen only with example_inputs"
            raise ValueError(f"rules[{number}] matches nothing in the model: match is {rule.pattern!r}{hint}")

    def _equip(self, path: str, choice: Choice) -> None:
        module: Any = self.modules[path]
        family = family_of(module)
        assert family is not None
        swap(module, family.mixin)
        uses = self.flow.uses.get(path, {}) if self.flow else {}
        module.equip({}, integer_bias=choice.bias, context=self.context)
        for slot, role in module.slots().items():
            where = f"{path}.{slot}".removeprefix(".")
            if role == "weight" and choice.weight is not None:
                weight, axis = module.slot_weight(slot)
                self._place_weight(module, slot, choice.weight, weight, axis, where)
            elif uses and slot in ATTENTION_INPUTS and slot not in uses:
                continue  # its tensor is that of an earlier slot, whose quantizer has it
            elif role in ("activation", "share") and choice.activation is not None:
                kind = "columns" if slot == "attended_value_quantizer" else family.kind
                per = _activation_per(choice.activation.per, kind)
                self._request(module, slot, choice.activation, per, uses.get(slot), where, share=role == "share")
            elif role == "output" and choice.output is not None:
                self._request(module, slot, choice.output, choice.output.per, None, where)

    def _equip_ops(self, owners: dict[str, dict[str, tuple[Any, Choice]]]) -> None:
        for path, sites in owners.items():
            ops = {}
            for name, (site, choice) in sites.items():
                roles = dict.fromkeys(site.uses, "activation") | dict.fromkeys(site.weights, "weight")
                op = ops[name] = QuantOp(site.kind, roles, site.weights, site.sole)
                op.equip({}, context=self.context)
                for slot, weight in site.weights.items():
                    where = _join(path, f"{name}.{slot}")
                    if choice.weight is not None:
                        axis = site.kind.output_axis % weight.dim()
                        self._place_weight(op, slot, choice.weight, weight, axis, where)
                for slot, use in site.uses.items():
                    where = _join(path, f"{name}.{slot}")
                    if choice.activation is not None:
                        per = _activation_per(choice.activation.per, _kind(site.kind.name, slot, use.dims))
                        self._request(op, slot, choice.activation, per, use, where)
            module: Any = self.modules[path]
            swap(module, Owner)
            kinds = {op.kind.name for op in ops.values()}
            totals = self.flow.totals.get(path, {}) if self.flow else {}
            module.equip(ops, self.context, path, {kind: total for kind, total in totals.items() if kind in kinds})
            self.context.has_ops |= bool(ops)

    def _place_weight(self, holder: Slotted, slot: str, spec: QuantSpec, weight: Tensor, axis: int, where: str) -> None:
        """A weight with several holders has one quantizer, if they agree on it."""
        per = _weight_per(spec.per, weight, axis)
        parameter = holder.slot_parameter(slot)
        parameter = weight if parameter is None else parameter
        self.alive.append(parameter)
        held = self.weights.setdefault((id(parameter), spec, per), [])
        quantizer: Any = held[0][2] if held else spec.build(per=per).to(weight.device)
        if not held:
            holder.register_module(slot, quantizer)
            if isinstance(quantizer, FakeQuantize):
                quantizer.across_ranks = False
            laid_out = rows(weight, axis) if quantizer.per.divides_rows else weight
            try:
                per.scale_shape(laid_out.shape)
            except ValueError as error:
                self.errors.append(f"{where}: {error}")
                return
            quantizer.start(laid_out)
        held.append((holder, slot, quantizer))

    def _request(
        self,
        holder: Slotted,
        slot: str,
        spec: QuantSpec,
        per: Granularity,
        use: Use | None,
        where: str,
        *,
        share: bool = False,
    ) -> None:
        signed = None
        if spec.symmetric and spec.signed is None and (share or (use is not None and use.value.non_negative)):
            signed = False
        self.requests.append(_Request(holder, slot, spec, per, signed, use, where))

    def _place_activations(self) -> None:
        """One quantizer for each edge: consumers of one tensor that agree on it share it."""
        edges: dict[Any, list[_Request]] = {}
        for request in sorted(self.requests, key=lambda request: request.use.order if request.use else -1):
            use = request.use
            key: Any = id(request) if use is None else (use.key, request.spec, request.per, request.signed)
            edges.setdefault(key, []).append(request)
        joined = {request.path.removesuffix(".result_quantizer"): request for request in self.requests}
        for requests in edges.values():
            first = requests[0]
            join = joined.get(first.use.value.joined) if first.use and first.use.value.joined else None
            if join is not None and (join.spec, join.per) == (first.spec, first.per):
                for request in requests:  # on that join's grid already
                    request.holder.find_on_grid(request.slot, join.holder.quantizer(join.slot))
                continue
            try:
                device = next((parameter.device for parameter in first.holder.parameters()), self.device)
                quantizer = first.spec.build(per=first.per, signed=first.signed).to(device)
            except ValueError as error:
                raise ValueError(f"{first.path}: {error}") from error
            if (
                isinstance(quantizer, FakeQuantize)
                and isinstance(first.per, PerChannel)
                and first.per != first.spec.per
            ):
                quantizer.across_ranks = False  # its groups are samples, which belong to one rank
            first.holder.register_module(first.slot, quantizer)
            if len(requests) > 1:
                edge = Edge(self.context, quantizer, len(requests))
                for request in requests:
                    request.holder.share(request.slot, edge)

    def _equip_norms(self) -> None:
        """Batch norms: those that are folded into the layer before them, and those that stand alone."""
        folds = self.flow.folds if self.flow else self._neighbours()
        for layer_path, norm_path in folds if self.recipe.fold else ():
            layer: Any = self.modules[layer_path]
            norm: Any = self.modules[norm_path]
            if isinstance(self.recipe.choose(norm_path, norm, *self.paths[norm]), Rule):
                continue  # a rule that names the norm leaves it alone
            if isinstance(layer, QuantLayer) and layer.quantizer("weight_quantizer") and not layer.output_quantizer:
                swap(norm, FoldedBatchNorm)
                norm.equip()
                layer.fold(norm)
                layer.start_weight("weight_quantizer")
                self.preparation.floats[norm_path] = f"folded into {layer_path}"
        for module in self.modules.values():
            tracks = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None  # noqa: SLF001
            if tracks and not isinstance(module, FoldedBatchNorm):
                alone: Any = module
                swap(alone, FreezableBatchNorm)
                alone.equip()

    def _neighbours(self) -> Iterator[tuple[str, str]]:
        """Convolutions and batch norms side by side in a Sequential, which is all that the module tree shows."""
        for path, module in self.modules.items():
            if type(module).forward is not nn.Sequential.forward and type(module) is not nn.Sequential:
                continue
            for (name, layer), (next_name, norm) in pairwise(module._modules.items()):  # noqa: SLF001
                if layer is None or norm is None or isinstance(layer, nn.Linear):  # whose input may have more axes
                    continue
                once = len(self.paths[layer]) == len(self.paths[norm]) == 1
                is_norm = isinstance(norm, nn.modules.batchnorm._BatchNorm)  # noqa: SLF001
                if once and is_norm and can_fold(layer, norm):
                    yield _join(path, name), _join(path, next_name)

    def _share_weights(self) -> None:
        for held in self.weights.values():
            if len(held) > 1:
                edge = Edge(self.context, held[0][2], len(held))
                for holder, slot, _ in held:
                    holder.share(slot, edge)

    def _own_root(self) -> None:
        if not isinstance(self.model, Owner | Quantized):
            swap(self.model, Owner)
            root: Any = self.model
            root.equip({}, self.context, "", {})


def dismantle(model: nn.Module) -> None:
    """Take every quantizer out again."""
    for module in list(model.modules()):
        if isinstance(module, FreezableBatchNorm | Quantized | Owner):
            module.strip()
            swap_back(module)
        enable_fast_path(module)


def slotted_modules(model: nn.Module) -> Iterator[tuple[str, Slotted]]:
    """Every module that holds quantizers, by its path."""
    for path, module in model.named_modules():
        if isinstance(module, Slotted):
            yield path.replace("quantized_ops.", ""), module


def quantizers(model: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Every quantizer: its path, its role, itself."""
    for path, holder in slotted_modules(model):
        for slot, role in holder.slots().items():
            if (quantizer := holder._modules.get(slot)) is not None:  # noqa: SLF001
                yield _join(path, slot), role, quantizer


def _weight_per(per: Granularity, weight: Tensor, axis: int) -> Granularity:
    """Channels are the weight's outputs; groups run over the flattened inputs where they divide them."""
    if isinstance(per, PerChannel):
        return PerChannel(axis)
    inputs = weight.numel() // max(weight.shape[axis], 1)
    if isinstance(per, PerGroup) and inputs % per.size:
        return PerChannel(axis)
    return per


def _kind(op: str, slot: str, dims: int) -> str:
    """How the operand of an op lies: as images, as rows, or as columns, whose rows are summed."""
    if op in ("conv", "conv_transpose", "pool") or (op in ("add", "cat") and dims > 3):
        return "images"
    columns = {
        "matmul": ("other_quantizer", "mat2_quantizer"),
        "addmm": ("mat2_quantizer",),
        "attention": ("value_quantizer",),
    }
    return "columns" if slot in columns.get(op, ()) else "rows"


def _activation_per(per: Granularity, kind: str) -> Granularity:
    """Scales must not change along a sum: the tokens of images are samples, and columns have one scale for all."""
    if not isinstance(per, PerToken) or kind == "rows":
        return per
    return PerChannel(0) if kind == "images" else PerTensor()


def _is_place(module: nn.Module) -> bool:
    """Whether a rule may speak of this module: a layer, one that would be if it could, or a batch norm."""
    is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)  # noqa: SLF001
    return family_of(module) is not None or bool(refusal(module)) or is_norm


def _bias_problem(choice: Choice) -> str:
    """Why biases can't be integers of the accumulator's scale; "" where they can, or need not."""
    if not choice.bias:
        return ""
    x, w = choice.activation, choice.weight
    if x is None or w is None or not isinstance(x.per, PerTensor) or isinstance(x.scale_mode, PerBatch):
        return "bias=True needs a weight, and an activation of one scale that does not follow each batch"
    if not isinstance(w.per, PerTensor | PerChannel):
        return "bias=True needs one weight scale for each output"
    if (x.method, w.method) != ("uniform", "uniform"):
        return "bias=True needs scales of its own, which method 'uniform' has"
    return ""


def _why_float(choice: Choice) -> str:
    return f"rule {choice.pattern!r}" if isinstance(choice, Rule) else "the recipe quantizes no such thing"


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _state(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()
