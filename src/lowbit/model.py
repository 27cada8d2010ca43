"""Whole models: prepare, restore, calibrate, freeze."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lowbit.blueprint import converted_module
from lowbit.checkpoint import guard_loading, unguard_loading
from lowbit.copies import copied
from lowbit.fake_quantize import FakeQuantize
from lowbit.flow import call, in_eval_mode, trace
from lowbit.nn.batch_norm import FreezableBatchNorm
from lowbit.nn.context import HeldWeights
from lowbit.nn.quantizers import Stateless
from lowbit.preparation import Builder, Preparation, dismantle, quantizers, slotted_modules
from lowbit.recipe import Recipe
from lowbit.scale import Learned

Model = TypeVar("Model", bound=nn.Module)


def prepare(model: Model, recipe: Recipe, example_inputs: Any = None, *, inplace: bool = False) -> Model:
    """The model with the recipe's quantizers in it: a copy, or the model itself

    Every layer keeps its name, its parameters and its class (as a subclass of it), so that checkpoints, optimizers and
    isinstance work on. ``example_inputs`` is one batch, passed as ``model(b)``, ``model(*b)`` or ``model(**b)`` by its
    type; the model runs it, in eval mode, to see how data flows: convolutions and linear layers with a batch norm after
    them (trained folded), residual sums, concatenations, products outside of layers, tensors with several consumers
    (one quantizer for each), and what can't be negative (which needs no sign). Without it, only what the module tree
    shows is quantized, and ``summary`` says what that left out.

    Preparing twice with one recipe is preparing once. ``restore`` undoes it.

    >>> import lowbit
    >>> model = prepare(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), lowbit.recipes.w8a8(), torch.randn(2, 8))
    >>> model[0].weight_quantizer.bits, model[0].input_quantizer.scale_mode
    (8, EMA(decay=0.99))
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}, but it must be an nn.Module")
    if not isinstance(recipe, Recipe):
        raise TypeError(
            f"recipe is {recipe!r} ({type(recipe).__name__}), but it must be a lowbit.Recipe, such as recipes.w8a8()"
        )
    if hasattr(model, "_orig_mod"):
        raise TypeError("the model is compiled already; prepare it first, and compile what prepare gives")
    _check_not_converted(model)
    earlier = preparation_of(model)
    if earlier is not None:
        if example_inputs is not None and not earlier.traced:
            raise ValueError("the model was prepared without example_inputs; call lowbit.restore(model) first")
        if earlier.recipe == recipe:
            return model if inplace else copied(model)
        raise ValueError("the model is prepared already, by another recipe; call lowbit.restore(model) first")
    nested = [path for path, module in model.named_modules() if preparation_of(module) is not None]
    if nested:
        raise ValueError(f"{nested[0]} is prepared already; restore it first, or leave the model around it as it is")
    prepared = model if inplace else copied(model)
    flow = None if example_inputs is None else trace(prepared, example_inputs)
    preparation = Builder(prepared, recipe, flow).build()
    object.__setattr__(prepared, "_lowbit", preparation)
    guard_loading(prepared)
    for _, holder in slotted_modules(prepared):
        for quantizer in holder.children():
            if isinstance(quantizer, FakeQuantize | Stateless):
                quantizer.train(holder.training)
    return prepared


@contextmanager
def weights_once(model: nn.Module) -> Iterator[None]:
    """Quantize each weight once while this lasts, for batches whose gradients are added up

    Those with the scale of their own range (PerBatch, as in w8a8, w8a8_dynamic and w4a8) that are parameters; others
    are quantized in every forward, as ever, as are tied weights, all in compiled code, and all in a CUDA graph that
    begins inside. On a GPU, the codes that were asked for the last time are made in one launch, but of sharded models
    and in a CUDA graph. The second forward of activation checkpointing takes the weights of the first (of reentrant
    checkpointing, which runs that without gradients, its own). The quantized weights take memory while this lasts. A
    weight that an optimizer changes inside is an error; what changes its ``data`` behind autograd's back is not seen.

    >>> import lowbit
    >>> model = prepare(nn.Linear(8, 4), lowbit.recipes.w8a8(), torch.randn(2, 8))
    >>> with weights_once(model):
    ...     for batch in torch.randn(4, 2, 8):
    ...         model(batch).sum().backward()
    """
    root = prepared_module(model)
    contexts = {id(holder._context): holder._context for _, holder in slotted_modules(root)}  # noqa: SLF001
    present = {id(parameter) for parameter in root.parameters()}  # of a sharded model, not those that a forward gathers
    before = {key: context.held for key, context in contexts.items()}
    try:
        for context in contexts.values():
            expected = [pair for pair in context.expected if id(pair[1]) in present]
            context.held = context.held or HeldWeights(expected)
        yield
    finally:
        for key, context in contexts.items():
            if context.held is not None:
                context.expected = tuple(context.held.asked)
            context.held = before[key]


def restore(model: Model) -> Model:
    """The float model again, in place, with the weights that training gave it."""
    root = prepared_module(model)
    dismantle(root)
    unguard_loading(root)
    del root.__dict__["_lowbit"]
    return model


def preparation_of(model: nn.Module) -> Preparation | None:
    """What ``prepare`` did to the model; None where it did nothing."""
    return model.__dict__.get("_lowbit")


def prepared_module(model: nn.Module) -> nn.Module:
    """The module that was prepared; a wrapper such as DistributedDataParallel is looked through."""
    for module in model.modules():
        if preparation_of(module) is not None:
            return module
    _check_not_converted(model)
    raise ValueError("the model is not prepared; call lowbit.prepare(model, recipe) first")


def _check_not_converted(model: nn.Module) -> None:
    if converted_module(model) is not None:
        raise ValueError("the model is converted; this takes the prepared or float model, which convert left as it was")


def require_preparation(model: nn.Module) -> Preparation:
    """What ``prepare`` did to the model, or an error."""
    preparation = preparation_of(prepared_module(model))
    assert preparation is not None
    return preparation


@torch.no_grad()
def calibrate(model: nn.Module, batches: Iterable[Any]) -> int:
    """Let the quantizers see data: the model runs in eval mode, in float, while its activation quantizers observe

    A batch is passed as ``model(b)``, ``model(*b)`` or ``model(**b)`` by its type. Afterwards nothing but the state of
    quantizers has changed. Gives the number of batches.
    """
    if isinstance(batches, Tensor | Mapping):
        raise TypeError(f"batches is a {type(batches).__name__}; pass an iterable of batches, such as [batch]")
    require_preparation(model)
    found = [(role, quantizer) for _, role, quantizer in quantizers(model)]
    count = 0
    with _observing(model):
        for role, quantizer in found:
            quantizer.enabled = False
            quantizer.train(role != "weight")
            quantizer.observing = role != "weight"
        for batch in batches:
            call(model, batch)
            count += 1
    if count == 0:
        raise ValueError("batches is empty; calibrate needs at least one batch")
    for role, quantizer in found:
        observer = getattr(quantizer, "observer", None)
        if observer is not None and role != "weight" and observer.is_calibrated:
            quantizer.update_params_from_observer()
    return count


@contextmanager
def _observing(model: nn.Module) -> Iterator[None]:
    """The model in eval mode; afterwards modes and flags as they were before."""
    flags = [(quantizer, quantizer.enabled, quantizer.observing) for _, _, quantizer in quantizers(model)]
    try:
        with in_eval_mode(model):
            yield
    finally:
        for quantizer, enabled, observing in flags:
            quantizer.enabled, quantizer.observing = enabled, observing


def freeze(model: Model, *, scales: bool = True, batch_norm: bool = True) -> Model:
    """Stop every statistic, in place: no kept scale follows the data any longer, and batch norms use what they have

    The scales of PerBatch are kept nowhere: they follow each batch as before.

    Weights and learned scales can still be trained. What is frozen stays so in training mode.
    """
    require_preparation(model)
    for module in model.modules():
        if batch_norm and isinstance(module, FreezableBatchNorm):
            module.frozen = True
    if scales:
        for _, _, quantizer in quantizers(model):
            quantizer.observing = False
    return model


@torch.no_grad()
def estimate_batch_norm(model: nn.Module, batches: Iterable[Any]) -> int:
    """Running statistics anew, as the mean over these batches; nothing else changes. Gives the number of batches."""
    batches = iter(batches)
    first = next(batches, None)
    if first is None:
        raise ValueError("batches is empty; estimate_batch_norm needs at least one batch")
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]  # noqa: SLF001
    momenta = [(norm, norm.momentum, getattr(norm, "frozen", False)) for norm in norms]
    count = 0
    with in_eval_mode(model):
        for norm in norms:
            norm.reset_running_stats()
            norm.train()
            norm.momentum = None  # torch's word for a plain mean
            if isinstance(norm, FreezableBatchNorm):
                norm.frozen = False
        try:
            for batch in chain([first], batches):
                call(model, batch)
                count += 1
        finally:
            for norm, momentum, frozen in momenta:
                norm.momentum = momentum
                if isinstance(norm, FreezableBatchNorm):
                    norm.frozen = frozen
    return count


def scale_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The learned scales and zero points, to give them a rate of their own and no weight decay

    >>> import lowbit
    >>> model = prepare(nn.Linear(8, 4), lowbit.recipes.w2a2())
    >>> scales = scale_parameters(model)
    >>> known = {id(scale) for scale in scales}
    >>> weights = [parameter for parameter in model.parameters() if id(parameter) not in known]
    >>> groups = [{"params": weights, "weight_decay": 1e-4}, {"params": scales, "lr": 1e-3, "weight_decay": 0.0}]
    >>> len(scales), len(weights)
    (2, 2)
    """
    require_preparation(model)
    learned = [q for _, _, q in quantizers(model) if isinstance(getattr(q, "scale_mode", None), Learned)]
    return [parameter for quantizer in learned for parameter in quantizer.parameters(recurse=False)]
