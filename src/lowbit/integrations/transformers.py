"""QuantizationCallback: quantization-aware training in transformers' Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from lowbit.schedule import Schedule

_FILE = "lowbit_schedule.pt"


class QuantizationCallback(TrainerCallback):
    """Keeps the schedule of a model that ``lowbit.prepare`` has prepared; its state goes into every checkpoint

    ``schedule`` holds the arguments of ``Schedule``, as {"freeze_scales": 1000}. Prepare and calibrate the model before
    the Trainer is made: the Trainer takes the parameters that it finds.

    >>> callback = QuantizationCallback({"freeze_batch_norm": 500})
    """

    def __init__(self, schedule: Mapping[str, Any] | None = None) -> None:
        self.options = dict(schedule or {})
        self.schedule: Schedule | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Begin the schedule, or go on with the one of the checkpoint that the Trainer resumes from."""
        assert model is not None
        self.schedule = Schedule(model, **self.options)
        if state.global_step:
            path = self._checkpoint(args, state) / _FILE
            if not path.exists():
                raise FileNotFoundError(f"{path}: the run was begun without this callback; its schedule was not kept")
            self.schedule.load_state_dict(torch.load(path, weights_only=True))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count the optimizer's steps."""
        assert self.schedule is not None
        while self.schedule.count < state.global_step:
            self.schedule.step()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Keep the schedule beside the model."""
        assert self.schedule is not None
        if state.is_world_process_zero:
            torch.save(self.schedule.state_dict(), self._checkpoint(args, state) / _FILE)

    @staticmethod
    def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
        resumed = args.resume_from_checkpoint
        named = Path(args.output_dir or ".") / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if named.exists() or not resumed:
            return named
        return Path(resumed if isinstance(resumed, str) else get_last_checkpoint(args.output_dir) or named)
