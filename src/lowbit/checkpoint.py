"""Checkpoints: what a prepared model makes of a state_dict that is not its own."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lowbit.fake_quantize import FakeQuantize
from lowbit.nn.batch_norm import FreezableBatchNorm
from lowbit.nn.quantizers import Stateless
from lowbit.preparation import slotted_modules

_IDENTITY = "._extra_state"


def guard_loading(model: nn.Module) -> None:
    """A float checkpoint loads, and starts the scales of weights anew; one of another recipe is an error."""
    model.register_load_state_dict_pre_hook(_check)
    model.register_load_state_dict_post_hook(_restart)


def unguard_loading(model: nn.Module) -> None:
    """As before ``guard_loading``."""
    for hooks, hook in ((model._load_state_dict_pre_hooks, _check), (model._load_state_dict_post_hooks, _restart)):  # noqa: SLF001
        for key in [key for key, held in hooks.items() if getattr(held, "hook", held) is hook]:
            del hooks[key]


def _check(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    flags, own = _own_state(module, prefix)
    for key, value in flags.items():
        state_dict.setdefault(key, value)
    here = {_quantizer(key) for key in own} - {""}
    there = {_quantizer(key) for key in state_dict if key.startswith(prefix)} - {""}
    if not there:  # a float checkpoint
        state_dict.update(own)
        module._lowbit.restarts = True  # type: ignore[union-attr]  # noqa: SLF001
        return
    differing = {
        _quantizer(key)
        for key, value in own.items()
        if key.endswith(_IDENTITY) and key in state_dict and _identity(value) != _identity(state_dict[key])
    }
    parts = {
        "quantized here, but not in the checkpoint": here - there,
        "quantized in the checkpoint, but not here": there - here,
        "quantized otherwise in the checkpoint": differing,
    }
    if any(parts.values()):
        words = [f"{what}: {', '.join(sorted(layers))}" for what, layers in parts.items() if layers]
        raise ValueError(f"the checkpoint is of another recipe; {'; '.join(words)}")


def _identity(extra_state: Tensor) -> list[int]:
    """What a quantizer's state belongs to; its flags come first."""
    return extra_state.tolist()[2:]


def _restart(module: nn.Module, incompatible_keys: Any) -> None:
    preparation: Any = module._lowbit  # noqa: SLF001
    if not preparation.restarts:
        return
    preparation.restarts = False
    for _, holder in slotted_modules(module):
        for slot, role in holder.slots().items():
            if role == "weight" and holder.quantizer(slot) is not None:
                holder.start_weight(slot)


def _own_state(module: nn.Module, prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the model would save besides the float model's tensors: flags of batch norms, and the quantizers."""
    parts: dict[type, dict[str, Any]] = {FreezableBatchNorm: {}, nn.Module: {}}
    for path, child in module.named_modules():
        if isinstance(child, FakeQuantize | Stateless | FreezableBatchNorm):
            kind = FreezableBatchNorm if isinstance(child, FreezableBatchNorm) else nn.Module
            state = child.state_dict(prefix=f"{prefix}{path}.")
            flags = (key for key in state if kind is nn.Module or key.endswith("_extra_state"))
            parts[kind].update({key: state[key] for key in flags})
    return parts[FreezableBatchNorm], parts[nn.Module]


def _quantizer(key: str) -> str:
    """The path of the quantizer whose identity this key of a state_dict holds; "" for any other key."""
    path, found, _ = key.rpartition(_IDENTITY)
    return path.replace("quantized_ops.", "") if found and "_quantizer" in path.rpartition(".")[2] else ""
