"""Families: which mixin quantizes which torch class, what it takes in, and whether a batch norm folds into it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from lowbit.nn.attention import AttentionLayer
from lowbit.nn.convolution import ConvolutionLayer
from lowbit.nn.layer import Quantized
from lowbit.nn.layers import LookUpLayer, TransposedLayer, WeightlessLayer
from lowbit.nn.linear import LinearLayer
from lowbit.nn.recurrent import RecurrentCell, RecurrentLayer

ATTENTION_INPUTS = ("query_quantizer", "key_quantizer", "value_quantizer")
Inputs = Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The input, which comes first."""
    return {"input_quantizer": args[0] if args else next(iter(kwargs.values()), None)}


def _attention(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The query; a key and value that are other tensors."""
    taken = {slot: kwargs.get(slot.removesuffix("_quantizer")) for slot in ATTENTION_INPUTS}
    taken.update(zip(ATTENTION_INPUTS, args, strict=False))
    seen: list[Any] = []
    for slot, x in list(taken.items()):
        if any(x is other for other in seen):
            del taken[slot]  # quantized once, in the first slot
        seen.append(x)
    return taken


def _nothing(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {}


class Family(NamedTuple):
    """A family of modules that are quantized in one way.

    ``kind`` says how tensors lie: "rows" (features last), "images" (the batch first, channels second), "indices".
    """

    mixin: type[Quantized]
    kind: str
    inputs: Inputs = _first
    folds: bool = False


_LINEAR = Family(LinearLayer, "rows", folds=True)
_CONVOLUTION = Family(ConvolutionLayer, "images", folds=True)
_TRANSPOSED = Family(TransposedLayer, "images", folds=True)
_LOOK_UP = Family(LookUpLayer, "indices", _nothing)
_POOLING = Family(WeightlessLayer, "images")
_TRANSFORMERS_CONV1D = Family(TransposedLayer, "rows")

FAMILIES: dict[type[nn.Module], Family] = {
    nn.Linear: _LINEAR,
    nn.Conv1d: _CONVOLUTION,
    nn.Conv2d: _CONVOLUTION,
    nn.Conv3d: _CONVOLUTION,
    nn.ConvTranspose1d: _TRANSPOSED,
    nn.ConvTranspose2d: _TRANSPOSED,
    nn.ConvTranspose3d: _TRANSPOSED,
    nn.Embedding: _LOOK_UP,
    nn.EmbeddingBag: _LOOK_UP,
    nn.AvgPool1d: _POOLING,
    nn.AvgPool2d: _POOLING,
    nn.AvgPool3d: _POOLING,
    nn.AdaptiveAvgPool1d: _POOLING,
    nn.AdaptiveAvgPool2d: _POOLING,
    nn.AdaptiveAvgPool3d: _POOLING,
    nn.MultiheadAttention: Family(AttentionLayer, "rows", _attention),
    nn.RNNBase: Family(RecurrentLayer, "rows", _nothing),
    nn.RNNCellBase: Family(RecurrentCell, "rows", _nothing),
}


def family_of(module: nn.Module) -> Family | None:
    """The family that quantizes this module; None where there is none."""
    for head, family in FAMILIES.items():
        if isinstance(module, head):
            return family
    if any(f"{cls.__module__}.{cls.__qualname__}" == _CONV1D for cls in type(module).__mro__):
        return _TRANSFORMERS_CONV1D
    return None


_CONV1D = "transformers.pytorch_utils.Conv1D"


def refusal(module: nn.Module) -> str:
    """Why a module with weights can't be quantized; "" where it can, or has no weight of that kind."""
    for head in (nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase):
        own = type(module).forward
        if isinstance(module, head) and not own.__module__.startswith(("torch.", "lowbit.")):
            return f"its forward is not that of {head.__name__}, whose products are quantized one by one"
    if isinstance(module, nn.Bilinear):
        return "there is no quantized Bilinear"
    if isinstance(module, nn.modules.lazy.LazyModuleMixin) and module.has_uninitialized_params():
        return "its shape is not known yet; run a batch through the model first"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        if module.sparse:
            return "its gradient is sparse, and a quantizer's is not; use sparse=False"
        if module.max_norm is not None:
            return "max_norm changes the weight while it runs; use max_norm=None"
    if any(parameter.is_complex() for parameter in module.parameters(recurse=False)):
        return "its parameters are complex"
    return ""
