"""Checkpoints: what a prepared model makes of a state_dict that is not its own."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lowbit.nn.batch_norm import FreezableBatchNorm
from lowbit.preparation import slotted_modules

_IDENTITY = "_quantizer._extra_state"


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
    here = {_layer(key) for key in own}
    there = {_layer(key) for key in state_dict if key.startswith(prefix) and "_quantizer." in key}
    if not there:  # a float checkpoint
        state_dict.update(own)
        module._lowbit.restarts = True  # type: ignore[union-attr]  # noqa: SLF001
        return
    differing = {
        _layer(key)
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
            if role == "weight" and holder.quantizer(slot) is not None and holder.can_restart:
                holder.start_weight(slot)


def _own_state(module: nn.Module, prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the model would save besides the float model's tensors: flags of batch norms, and the quantizers."""
    state = {prefix + key: value for key, value in module.state_dict().items()}
    quantizers = {key: value for key, value in state.items() if "_quantizer." in key}
    flags = {key: value for key, value in state.items() if key.endswith("._extra_state") and key not in quantizers}
    norms = {f"{prefix}{path}." for path, norm in module.named_modules() if isinstance(norm, FreezableBatchNorm)}
    return {key: value for key, value in flags.items() if key.removesuffix("_extra_state") in norms}, quantizers


def _layer(key: str) -> str:
    """The quantizer that a key of the state_dict belongs to."""
    return key[: key.index("_quantizer.") + len("_quantizer")].replace("quantized_ops.", "")
