"""convert: from a prepared model to one that holds codes, and computes what was trained."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lowbit.blueprint import (
    ARITHMETICS,
    Blueprint,
    Tensors,
    build,
    computing_hooks,
    conversion_of,
    converted_module,
    join,
)
from lowbit.copies import copied
from lowbit.fake_quantize import FakeQuantize
from lowbit.flow import in_eval_mode
from lowbit.functional import quantize
from lowbit.model import preparation_of, prepared_module, restore
from lowbit.nn.batch_norm import FoldedBatchNorm
from lowbit.nn.coded import ActivationForm, CodedWeight, Codes, WeightForm
from lowbit.nn.layer import Quantized, QuantLayer
from lowbit.nn.ops import Owner, QuantOp
from lowbit.nn.quantizers import Binarize, DoReFaActivation, DoReFaWeight
from lowbit.nn.slots import Slotted, rows
from lowbit.recipe import Recipe
from lowbit.record import check_choice
from lowbit.scale import NotCalibratedError, PerBatch


@torch.no_grad()
def convert(model: nn.Module, arithmetic: str = "integer") -> nn.Module:
    """A copy of a prepared model whose weights are kept as codes, and which computes what the prepared one does

    ``arithmetic="float"``: the codes' values are multiplied; the outputs are those of the prepared model in eval mode,
    to the bit. ``"integer"``: where the specs allow, the codes themselves are multiplied, and the sums are exact; see
    ``lowbit.nn.products`` for the order of what follows. It needs no quantizer, no optimizer and no training code, only
    the float model's own classes. A wrapper such as DistributedDataParallel is looked through, and left behind.

    >>> import lowbit
    >>> model = lowbit.prepare(nn.Linear(64, 8), lowbit.recipes.w4(), torch.randn(2, 64))
    >>> converted = convert(model, "float")
    >>> x = torch.randn(2, 64)
    >>> torch.equal(converted(x), model.eval()(x))
    True
    """
    check_choice("arithmetic", arithmetic, ARITHMETICS)
    if (earlier := converted_module(model)) is not None:
        conversion = conversion_of(earlier)
        assert conversion is not None
        if conversion.blueprint.arithmetic == arithmetic:
            return copied(earlier)
        raise ValueError(
            f"the model is converted already, to {conversion.blueprint.arithmetic} arithmetic; convert the prepared "
            f"model with arithmetic={arithmetic!r}"
        )
    prepared = _copy(prepared_module(model)).eval()
    blueprint, tensors = describe(prepared, arithmetic)
    converted = restore(prepared)
    build(converted, blueprint)
    # torch's own: a model's own load_state_dict may have other ideas of what it loads.
    missing, unexpected = nn.Module.load_state_dict(converted, tensors, strict=False, assign=True)
    assert not unexpected, unexpected
    assert not [key for key in missing if key.endswith((".codes", "_codes"))], missing
    return converted.requires_grad_(False)


def _copy(prepared: nn.Module) -> nn.Module:
    """A copy, with the tensors that hooks compute before a forward, as those of pruning do, as they are now."""
    with in_eval_mode(prepared):
        for module in prepared.modules():
            for hook in computing_hooks(module):
                hook(module, ())
    return copied(prepared)


def _is_waiting(quantizer: Any) -> bool:
    """Whether a quantizer has no scale yet."""
    return not getattr(quantizer, "is_ready", True)


def shown(place: str) -> str:
    """A place as the user knows it."""
    return place.replace("quantized_ops.", "")


def describe(prepared: nn.Module, arithmetic: str) -> tuple[Blueprint, Tensors]:
    """What ``build`` needs to know of a prepared model in eval mode, and the tensors of the quantizers."""
    return _Description(prepared, arithmetic).of()


class _Description:
    def __init__(self, prepared: nn.Module, arithmetic: str) -> None:
        self.model = prepared
        self.blueprint, self.tensors = Blueprint(arithmetic), Tensors()
        preparation = preparation_of(prepared)
        assert preparation is not None
        self.blueprint.floats.update(preparation.floats)
        recipe = Recipe.from_toml(str(preparation.recipe))  # in which a rule's function is its name
        self.blueprint.recipe.update(recipe.to_dict())
        self.holders = [(path, module) for path, module in prepared.named_modules() if isinstance(module, Slotted)]
        self.places: dict[tuple[Any, ...], list[str]] = {}  # of each quantizer, its own first
        self.weights = [  # of layers
            holder.slot_parameter(slot)
            for _, holder in self.holders
            for slot, role in holder.slots().items()
            if isinstance(holder, Quantized) and role == "weight" and holder.is_on(slot)
        ]

    def of(self) -> tuple[Blueprint, Tensors]:
        self._check_ready()
        for path, module in self.model.named_modules():
            if isinstance(module, Owner) and (path or "quantized_ops" in module._modules):  # noqa: SLF001
                self._describe_owner(path, module)
            if isinstance(module, Quantized):
                self.blueprint.layers.append(path)
            if isinstance(module, FoldedBatchNorm) and module._layer[0].folds:  # noqa: SLF001
                self.blueprint.folded.append(path)
        slots = [(path, holder, slot) for path, holder in self.holders for slot in holder.slots()]
        for path, holder, slot in sorted(slots, key=lambda each: each[1]._modules.get(each[2]) is None):  # noqa: SLF001
            self._describe_slot(path, holder, slot, holder.slots()[slot])
        self._describe_shared()
        for path, holder in self.holders:
            if isinstance(holder, QuantLayer):
                self._describe_bias(path, holder)
        return self.blueprint, self.tensors

    def _check_ready(self) -> None:
        waiting = []
        for path, holder in self.holders:
            on = {slot: role for slot, role in holder.slots().items() if holder.is_on(slot)}
            late = [slot for slot in on if _is_waiting(holder.quantizer(slot))]
            # A module that has run, but was given one tensor as query, key and value, say, has no use for some.
            ran = any(
                hasattr(holder.quantizer(slot), "initialized")
                for slot in on
                if on[slot] != "weight" and slot not in late
            )
            waiting += [shown(join(path, slot)) for slot in late if on[slot] == "weight" or not ran]
        if waiting:
            raise NotCalibratedError(
                f"no scale yet: {', '.join(waiting)}; call lowbit.calibrate(model, batches), or train a step first"
            )

    def _describe_owner(self, path: str, owner: Any) -> None:
        ops = owner._modules.get("quantized_ops", {})  # noqa: SLF001
        described = {name: {"kind": op.kind._asdict(), "roles": op.roles} for name, op in ops.items()}
        self.blueprint.owners[path] = {"ops": described, "totals": dict(owner._totals)}  # noqa: SLF001
        for name, op in ops.items():
            for slot in op.slots():
                parameter = op.slot_parameter(slot) if slot in op.sole else None
                own = [key for key, value in owner._parameters.items() if value is parameter]  # noqa: SLF001
                if parameter is not None and own and op.is_on(slot):
                    self.blueprint.owned[join(path, own[0])] = join(path, f"quantized_ops.{name}.{slot}")

    def _describe_slot(self, path: str, holder: Any, slot: str, role: str) -> None:
        if not holder.is_on(slot):
            return
        place, quantizer = join(path, slot), holder.quantizer(slot)
        # Holders of one weight share its codes, unless they lay it out otherwise, or fold a batch norm into it.
        differs = (holder.slot_weight(slot)[1], getattr(holder, "folds", False) and path) if role == "weight" else ()
        places = self.places.setdefault((id(quantizer), *differs), [])
        places.append(place)
        if len(places) > 1:
            return
        if role == "weight" and self._has_codes(holder, slot, place):
            self._describe_weight(place, holder, slot, quantizer)
        else:
            self._describe_activation(place, quantizer)

    def _has_codes(self, holder: Any, slot: str, place: str) -> bool:
        """Whether codes stand for this weight: not for one that a forward computes, or takes elsewhere too."""
        if not isinstance(holder, QuantOp) or place in self.blueprint.owned.values():
            return True
        parameter = holder.slot_parameter(slot)
        return parameter is not None and any(parameter is weight for weight in self.weights)

    def _describe_weight(self, place: str, holder: Any, slot: str, quantizer: Any) -> None:
        weight, axis = holder.slot_weight(slot)
        if not bool(weight.isfinite().all()):
            raise ValueError(f"{shown(place)}: the weight holds NaN or infinity, which no code stands for")
        laid_out = rows(weight, axis) if quantizer.per.divides_rows else weight
        if isinstance(quantizer, FakeQuantize):
            scale, zero_point = quantizer.params(laid_out)
            grid, signed = quantizer.grid, quantizer.grid.signed
            q = quantize(laid_out, scale, zero_point, grid=grid, per=quantizer.per, dtype=torch.int32)
            codes = Codes(q, scale, zero_point)
        else:
            codes, signed = quantizer.codes(laid_out), True
        form = WeightForm(
            quantizer.bits,
            signed,
            quantizer.per,
            tuple(weight.shape),
            axis % weight.dim(),
            odd=not isinstance(quantizer, FakeQuantize),
            affine=codes.zero_point is not None,
        )
        coded = CodedWeight.of(form, weight.dtype, codes)
        strides = holder.quantize_weight(slot, weight, axis).stride()
        if coded().stride() != strides:
            form = replace(form, strides=strides)
        self.blueprint.weights[place] = form.to_dict() | {"dtype": str(weight.dtype).removeprefix("torch.")}
        self.tensors.update(coded.state_dict(prefix=f"{place}."))

    def _describe_activation(self, place: str, quantizer: Any) -> None:
        if _is_waiting(quantizer):
            self.blueprint.activations[place] = {"method": "waiting"}
            return
        if isinstance(quantizer, Binarize):
            self.blueprint.activations[place] = {"method": "binary", "per": quantizer.per.to_dict()}
            return
        if isinstance(quantizer, DoReFaWeight):
            self.blueprint.activations[place] = {"method": "dorefa_weight", "bits": quantizer.bits}
            return
        statistic: str | None = None
        if isinstance(quantizer, DoReFaActivation):
            like = next((value for value in self.model.parameters() if value.is_floating_point()), torch.empty(0))
            grid, symmetric, params = quantizer.grid, True, {"scale": quantizer.scale(like)}
        else:
            grid, symmetric = quantizer.grid, quantizer.symmetric
            if isinstance(quantizer.scale_mode, PerBatch):
                statistic, params = quantizer.scale_mode.statistic, {}
            else:
                kept, zero_point = quantizer.kept_params()
                params = {"scale": kept.clone()} | ({} if zero_point is None else {"zero_point": zero_point.clone()})
        shape = tuple(params["scale"].shape) if params else ()
        form = ActivationForm(grid, quantizer.per, symmetric, statistic, shape)
        self.blueprint.activations[place] = {"method": "uniform"} | form.to_dict()
        self.tensors.update({f"{place}.{name}": value for name, value in params.items()})

    def _describe_shared(self) -> None:
        for path, holder in self.holders:
            for slot, grid in holder._grids.items():  # noqa: SLF001
                if (id(grid),) in self.places:
                    self.blueprint.grids[join(path, slot)] = self.places[id(grid),][0]
        self.blueprint.edges.extend(places for places in self.places.values() if len(places) > 1)

    def _describe_bias(self, path: str, layer: Any) -> None:
        bias = layer.converted_bias()
        if bias is None:
            return
        is_codes = not bias.is_floating_point()
        self.blueprint.biases[path] = "int32" if is_codes else "float"
        self.tensors[join(path, "bias_codes" if is_codes else "bias")] = bias
