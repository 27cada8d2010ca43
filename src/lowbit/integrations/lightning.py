"""QuantizationCallback: quantization-aware training in Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import nn

from lowbit.model import calibrate, preparation_of, prepare
from lowbit.preparation import quantizers
from lowbit.recipe import Recipe
from lowbit.record import check_integer
from lowbit.schedule import Schedule


def first_of(batch: Any) -> Any:
    """The inputs of a batch (inputs, labels); what is no pair is all input."""
    return batch[0] if isinstance(batch, list | tuple) and len(batch) > 1 else batch


class QuantizationCallback(Callback):
    """Prepares a LightningModule's network before its optimizer is made, calibrates it, and keeps its schedule

    - ``network``: the attribute that holds the network to prepare; "" for the LightningModule itself. It is prepared in
      place, unless it is prepared already.
    - ``example_inputs``: one batch of inputs, by which ``prepare`` sees how data flows; None takes the module's
      ``example_input_array``.
    - ``calibration_batches``: how many training batches calibrate it before the first step; ``inputs`` takes the inputs
      out of a batch. A resumed run has its scales, and calibrates nothing.
    - ``schedule``: the arguments of ``Schedule``, as {"freeze_scales": 1000}; its state is part of the checkpoint.

    >>> import lowbit
    >>> callback = QuantizationCallback(lowbit.recipes.w8a8(), example_inputs=torch.randn(2, 8), network="model")
    """

    def __init__(
        self,
        recipe: Recipe,
        example_inputs: Any = None,
        *,
        network: str = "model",
        calibration_batches: int = 8,
        inputs: Callable[[Any], Any] = first_of,
        schedule: Mapping[str, Any] | None = None,
    ) -> None:
        check_integer("calibration_batches", calibration_batches, 0)
        self.recipe, self.example_inputs, self.network = recipe, example_inputs, network
        self.calibration_batches, self.inputs = calibration_batches, inputs
        self.options = dict(schedule or {})
        self.schedule: Schedule | None = None
        self._saved: dict[str, Any] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Prepare the network: the optimizer is made after this."""
        network = self._network(pl_module)
        if preparation_of(network) is None:
            example = pl_module.example_input_array if self.example_inputs is None else self.example_inputs
            prepare(network, self.recipe, example, inplace=True)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the schedule, or go on with the one of a checkpoint."""
        self.schedule = Schedule(self._network(pl_module), **self.options)
        if self._saved is not None:
            self.schedule.load_state_dict(self._saved)
            self._saved = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Calibrate, where any scale is still to come."""
        network = self._network(pl_module)
        waiting = any(getattr(quantizer, "is_ready", True) is False for _, _, quantizer in quantizers(network))
        if self.calibration_batches and waiting:
            with torch.random.fork_rng(devices=[]):  # a loader draws a seed from it, which a resumed run does not
                calibrate(network, self._batches(trainer.train_dataloader, pl_module))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the optimizer's steps."""
        assert self.schedule is not None
        while self.schedule.count < trainer.global_step:
            self.schedule.step()

    def state_dict(self) -> dict[str, Any]:
        """The schedule's state."""
        return {} if self.schedule is None else {"schedule": self.schedule.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there, once the fit begins."""
        self._saved = state_dict.get("schedule")

    def _network(self, pl_module: LightningModule) -> nn.Module:
        if not self.network:
            return pl_module
        found = getattr(pl_module, self.network, None)
        if not isinstance(found, nn.Module):
            raise ValueError(
                f"network is {self.network!r}, but the {type(pl_module).__name__} has no module of that name; name the "
                "attribute that holds the network, or '' for the whole"
            )
        return found

    def _batches(self, loader: Iterable[Any] | None, pl_module: LightningModule) -> Iterator[Any]:
        for batch in islice(loader or (), self.calibration_batches):
            yield pl_module.transfer_batch_to_device(self.inputs(batch), pl_module.device, 0)
