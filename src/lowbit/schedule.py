"""Schedule: what is switched on at which step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lowbit.model import freeze, preparation_of, require_preparation
from lowbit.nn.batch_norm import FreezableBatchNorm
from lowbit.oscillation import CodeTrack, Oscillation, code_tracks
from lowbit.preparation import quantizers, slotted_modules
from lowbit.record import check_integer
from lowbit.scale import EMA, Learned

_WEIGHTS = ("weight",)
_ACTIVATIONS = ("activation", "share", "output")


class Schedule:
    """From optimizer step n on: weights quantized, activations quantized, scales frozen, batch norms frozen

    - ``weight_start``, ``activation_start``: the step from which weights, and activations, are quantized. Before it
      their quantizers are the identity, and observe. The scale of a weight (EMA, Learned) starts anew from the weight
      as it is when its quantizer is switched on. Both at n: n steps of training in float.
    - ``freeze_scales``: the step from which no scale follows the data; learned ones are still trained.
    - ``freeze_batch_norm``: the step from which batch norms, folded or not, normalize by their running statistics and
      leave them as they are, in training mode too.
    - ``oscillation``: which weights stop because their codes flip too often; see Oscillation.

    A step is the number of optimizer steps done, so 0 is from the start; None is never. A flag is set when its step is
    reached, and at the construction; in between it is the user's. freeze_scales and freeze_batch_norm of None leave
    their flags alone altogether. Under torch.compile a change of flags compiles the model again.

    Call ``step`` after each optimizer step, or ``follow`` once. The model may be wrapped (DistributedDataParallel,
    torch.compile).

    >>> import lowbit
    >>> model = lowbit.prepare(nn.Linear(8, 4), lowbit.recipes.w8a8())
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> schedule = Schedule(model, weight_start=1, activation_start=2)
    >>> handle = schedule.follow(optimizer)
    >>> model.weight_quantizer.enabled, model.input_quantizer.enabled
    (False, False)
    >>> model(torch.randn(2, 8)).sum().backward()
    >>> optimizer.step()
    >>> model.weight_quantizer.enabled, model.input_quantizer.enabled, schedule.count
    (True, False, 1)
    """

    count: int

    def __init__(
        self,
        model: nn.Module,
        weight_start: int | None = 0,
        activation_start: int | None = 0,
        freeze_scales: int | None = None,
        freeze_batch_norm: int | None = None,
        oscillation: Oscillation | None = None,
    ) -> None:
        steps = {
            "weight_start": weight_start,
            "activation_start": activation_start,
            "freeze_scales": freeze_scales,
            "freeze_batch_norm": freeze_batch_norm,
        }
        for name, step in steps.items():
            if step is not None:
                check_integer(name, step, 0)
        if oscillation is not None and not isinstance(oscillation, Oscillation):
            raise TypeError(f"oscillation is {oscillation!r}, but it must be a lowbit.Oscillation, or None")
        self._model = _prepared(model)
        self.weight_start, self.activation_start = weight_start, activation_start
        self.freeze_scales, self.freeze_batch_norm, self.oscillation = freeze_scales, freeze_batch_norm, oscillation
        self._tracks: dict[str, CodeTrack] = {}
        if oscillation is not None:
            self._tracks = dict(code_tracks(self._model))
            if not self._tracks:
                raise ValueError("oscillation is set, but no weight of the model has codes to follow")
        self.count = 0
        self._apply()

    def step(self) -> None:
        """Count one optimizer step, and switch what is due at it."""
        self.count += 1
        if self.count == self.weight_start:
            self._start_weights()
        if self.count == self.activation_start:
            self._enable(_ACTIVATIONS, on=True)
        if self.count == self.freeze_scales:
            freeze(self._model, batch_norm=False)
        if self.count == self.freeze_batch_norm:
            freeze(self._model, scales=False)
        if self.oscillation is not None and self.count >= self.oscillation.start:
            threshold = self.oscillation.threshold_at(self.count)
            for track in self._tracks.values():
                track.step(self.oscillation.momentum, threshold)

    def follow(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """Call ``step`` after each step of this optimizer, until the handle's ``remove`` is called

        A step that GradScaler skips is no step; but fused optimizers decide on the GPU, and count it.
        """
        return optimizer.register_step_post_hook(lambda *_: self.step())

    def frozen_share(self) -> dict[str, float]:
        """{name of a weight: the share of its elements that oscillated and are frozen}"""
        return {name: track.frozen_share for name, track in self._tracks.items()}

    def state_dict(self) -> dict[str, Any]:
        """The count, and what is known of oscillating weights: ints and tensors."""
        return {"count": self.count, "oscillation": {name: track.state for name, track in self._tracks.items()}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from there, with every flag as it is scheduled at that step; the model has a state of its own."""
        check_integer("count", state_dict["count"], 0)
        saved = state_dict["oscillation"]
        if saved.keys() != self._tracks.keys():
            odd = ", ".join(sorted(saved.keys() ^ self._tracks.keys()))
            raise ValueError(f"the state is of another schedule or model: only one of both follows the codes of {odd}")
        states = {name: track.checked(name, saved[name]) for name, track in self._tracks.items()}
        for name, track in self._tracks.items():
            track.state = states[name]
        self.count = state_dict["count"]
        self._apply()

    def _apply(self) -> None:
        """Every flag as it is at this step."""
        self._enable(_WEIGHTS, on=self._is_past(self.weight_start))
        self._enable(_ACTIVATIONS, on=self._is_past(self.activation_start))
        if self.freeze_scales is not None:
            for _, _, quantizer in quantizers(self._model):
                quantizer.observing = not self._is_past(self.freeze_scales)
        if self.freeze_batch_norm is not None:
            for module in self._model.modules():
                if isinstance(module, FreezableBatchNorm):
                    module.frozen = self._is_past(self.freeze_batch_norm)

    def _is_past(self, step: int | None) -> bool:
        return step is not None and self.count >= step

    def _enable(self, roles: Collection[str], *, on: bool) -> None:
        for _, role, quantizer in quantizers(self._model):
            if role in roles:
                quantizer.enabled = on

    def _start_weights(self) -> None:
        """Switch weight quantizers on, each with a scale for the weight as it is now."""
        for _, holder in slotted_modules(self._model):
            for slot, role in holder.slots().items():
                quantizer: Any = holder.quantizer(slot)
                if role != "weight" or quantizer is None or quantizer.enabled:
                    continue
                quantizer.enabled = True  # before its start: a folded weight is only folded while it is quantized
                if isinstance(getattr(quantizer, "scale_mode", None), EMA | Learned):
                    holder.start_weight(slot)


def _prepared(model: nn.Module) -> nn.Module:
    """The model that was prepared, so that names don't depend on what wraps it."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}, but it must be an nn.Module")
    require_preparation(model)
    found = [module for module in model.modules() if preparation_of(module) is not None]
    return found[0] if len(found) == 1 else model
