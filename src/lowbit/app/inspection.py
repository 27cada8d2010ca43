"""inspect: what of a run's model is quantized how, how noisy it is, and what each layer costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from lowbit.app.config import TrainConfig
from lowbit.app.measure import noise_rows
from lowbit.app.run import CONFIG, Run
from lowbit.app.sensitivity import Sensitivity, measure_sensitivity
from lowbit.app.sources import Source, build, calibration_inputs, example_inputs
from lowbit.model import calibrate, prepare
from lowbit.summary import Summary, summary

_SHOWN = 256  # samples that the noise is taken of
_BEFORE = (
    "The sensitivity is that of the run's float network, rounded but not yet trained on: trained weights have adapted "
    "to the grid, and a layer taken off it loses accuracy, whatever its quantizers cost."
)


@dataclass(frozen=True)
class Inspection:
    """What there is to say of a prepared model; ``sensitivity`` is None where nobody measured it

    Of a trained run it is that of the network before: ``note`` says so.
    """

    title: str
    summary: Summary
    noise: list[dict[str, Any]]
    sensitivity: Sensitivity | None
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        measured = None if self.sensitivity is None else self.sensitivity.to_dict()
        return {
            "ok": True,
            "title": self.title,
            "summary": self.summary.to_dict(),
            "noise": self.noise,
            "sensitivity": measured,
            "note": self.note,
        }


def inspect(
    target: Path | TrainConfig,
    *,
    sensitivity: bool = True,
    on_layer: Callable[[str, int, int], None] | None = None,
) -> Inspection:
    """Of a run's folder, or of a config: that of its run where there is one, else its model without training"""
    if isinstance(target, TrainConfig) and not (target.output_folder / CONFIG).exists():
        title, model, data = _untrained(target)
        before = model
    else:
        run = Run.open(target if isinstance(target, Path) else target.output_folder)
        title, model, data = _of_run(run)
        before = run.model("calibrate")[0] if "quantized" in run.steps else model
    measured = measure_sensitivity(before, data, on_layer) if sensitivity else None
    note = _BEFORE if sensitivity and before is not model else ""
    return Inspection(title, summary(model), noise_rows(model, example_inputs(data, count=_SHOWN)), measured, note)


def _of_run(run: Run) -> tuple[str, nn.Module, Source]:
    name = "quantized" if "quantized" in run.steps or "calibrate" not in run.steps else "calibrate"
    state = "trained with its quantizers" if name == "quantized" else "calibrated, not yet trained with its quantizers"
    return f"{run.folder}: {run.config.recipe}, {state}", *run.model(name)


def _untrained(config: TrainConfig) -> tuple[str, nn.Module, Source]:
    model, data = build(config)
    prepared = prepare(model.eval(), config.load_recipe(), example_inputs(data), inplace=True)
    calibrate(prepared, calibration_inputs(config, data))
    return f"{config.model}, {config.recipe}: calibrated, not trained (there is no run yet)", prepared, data
