"""train: float model -> prepare -> calibrate -> train -> freeze -> export -> verify -> report, step by step, kept."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn

from lowbit.app.config import TrainConfig
from lowbit.app.fit import Classifier, Course, count_hits, fit
from lowbit.app.measure import ScaleRecorder, histograms, kept_scales, noise_rows
from lowbit.app.processes import Processes, processes
from lowbit.app.report import write
from lowbit.app.run import ONNX, REPORT, SAFETENSORS, TENSORBOARD, Run, RunError, at_work, threads
from lowbit.app.sources import Source, build, calibration_inputs, example_inputs
from lowbit.app.train_report import make_report
from lowbit.conversion import convert
from lowbit.export.artifact import save
from lowbit.export.onnx import STYLES, export_onnx
from lowbit.export.verify import verify
from lowbit.integrations.lightning import QuantizationCallback
from lowbit.model import calibrate, freeze, prepare
from lowbit.preparation import quantizers
from lowbit.summary import summary

_SHOWN = 256  # samples that noise, histograms and the verification are taken of


@dataclass(frozen=True)
class Event:
    """What a run has to say: ``kind`` is "begin", "progress" (of a step), "epoch", "end", or "kept" from before"""

    step: str
    kind: str
    text: str = ""
    done: int = 0
    total: int = 0


@dataclass(frozen=True)
class Result:
    """What a run found; ``metrics`` are the same to the bit, however often it was stopped"""

    folder: Path
    metrics: dict[str, Any]
    seconds: dict[str, float]

    @property
    def ok(self) -> bool:
        """Whether the ONNX file computes what the model computes."""
        return bool(self.metrics["verify"]["verification"]["ok"])

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"ok": self.ok, "folder": str(self.folder), "metrics": self.metrics, "seconds": self.seconds}


def _ignore(event: Event) -> None:
    pass


def train(config: TrainConfig, *, on_event: Callable[[Event], None] = _ignore, command: str = "") -> Result:
    """Run the steps that the config's folder does not hold yet; every finished one is kept there

    ``command`` is shown in the report. A folder of another config is a RunError; a run whose loss is no number any
    longer a DivergedError. What was finished before stays.

    Under torchrun the processes train together, and the first one alone writes files and goes on with what comes after;
    the result of the others ends with the training.
    """
    here = processes()
    with ExitStack() as stack:
        with here.joined():
            here.first(lambda: stack.enter_context(at_work(_begin(config, here))))
            run = Run.begin(config)  # with what another process finished since
            stack.enter_context(threads(run.threads))
            work = _Work(run, here, on_event, command)
            work.do_all(_TOGETHER)
        if here.is_first:
            work.do_all(step for step in _STEPS if step not in _TOGETHER)
    return Result(run.folder, run.steps, run.seconds)


def _begin(config: TrainConfig, here: Processes) -> Run:
    run = Run.begin(config)
    if run.processes != here.size and not run.steps.keys() >= set(_TOGETHER):
        raise RunError(
            f"{run.folder} holds a run of {run.processes} processes, but here are {here.size}: sums would be taken in "
            f"another order, and the result would not be the same to the bit; start {run.processes}, or name another "
            "output"
        )
    return run


def describe(step: str, found: dict[str, Any]) -> str:
    """What a step found, in one line"""
    if "accuracy" in found:
        held_out, test = (found["accuracy"][part]["percent"] for part in ("held_out", "test"))
        return f"accuracy {held_out:.2f} % held out, {test:.2f} % test"
    if step == "export":
        sizes = found["sizes"]
        return f"{sizes['float']:,} bytes in float, {sizes['codes']:,} as codes; {ONNX} {sizes[ONNX]:,} bytes"
    if step == "verify":
        return found["verdict"]
    return ""


class _Work:
    """The steps; each begins from files, so that it does the same whether or not the one before just ran."""

    def __init__(self, run: Run, here: Processes, on_event: Callable[[Event], None], command: str) -> None:
        self.run, self.config, self.here, self.on_event, self.command = run, run.config, here, on_event, command

    def do_all(self, steps: Iterable[str]) -> None:
        """These steps, but for those that are finished."""
        run = self.run
        for step in steps:
            if step in run.steps and (step != "report" or (run.folder / REPORT).exists()):
                self.on_event(Event(step, "kept", describe(step, run.steps[step])))
                continue
            self.on_event(Event(step, "begin"))
            start = time.perf_counter()
            found = _STEPS[step](self)
            run.note(step, found, time.perf_counter() - start)
            if step in _TOGETHER:
                self.here.first(run.write)
            else:
                run.write()
            self.on_event(Event(step, "end", describe(step, found)))

    def _keep(self, name: str, model: nn.Module) -> None:
        self.here.first(lambda: self.run.keep(name, model))

    def train_float(self) -> dict[str, Any]:
        """Train the float model."""
        model, data = build(self.config)
        prepare(model.eval(), self.run.recipe, example_inputs(data))  # what does not fit is said now, not after hours
        history = self._fit("float", model, data, self.config.float_epochs, self.config.rate, [])
        self._keep("float", model)
        return {"accuracy": _accuracies(model, data), "history": history}

    def calibrate(self) -> dict[str, Any]:
        """What rounding alone leaves."""
        model, data = self.run.float_model()
        prepared = prepare(model.eval(), self.run.recipe, example_inputs(data), inplace=True)
        calibrate(prepared, calibration_inputs(self.config, data, self.here))
        self._keep("calibrate", prepared)
        return {"accuracy": _accuracies(prepared, data), "scales": kept_scales(prepared)}

    def train_quantized(self) -> dict[str, Any]:
        """Train with the quantizers, then stop every statistic."""
        model, data = self.run.model("calibrate")
        recorder = ScaleRecorder()
        quantization = QuantizationCallback(self.run.recipe, calibration_batches=0)
        callbacks = [quantization, recorder]
        history = self._fit("quantized", model, data, self.config.epochs, self.config.quantized_rate, callbacks)
        freeze(model)
        self._keep("quantized", model)
        return {"accuracy": _accuracies(model, data), "history": history, "scales": recorder.scales}

    def export(self) -> dict[str, Any]:
        """Write the two files."""
        model, data = self.run.model()
        folder, style = self.run.folder, self.config.style
        converted = convert(model, STYLES[style])
        export_onnx(converted, example_inputs(data), folder / ONNX, style)
        save(converted, folder / SAFETENSORS)
        total = summary(model)
        sizes = {"float": total.float_bytes, "codes": total.bytes}
        sizes |= {name: (folder / name).stat().st_size for name in (ONNX, SAFETENSORS)}
        found = {"sizes": sizes, "parameters": total.parameters}
        names = getattr(getattr(model, "config", None), "id2label", None)  # of a transformers model
        return found | ({"labels": list(names.values())} if names else {})

    def verify(self) -> dict[str, Any]:
        """Run the file and compare."""
        model, data = self.run.model()
        found = verify(model, self.run.folder / ONNX, example_inputs(data, "test", _SHOWN))
        verdict = str(found).partition(f"\n{found.path}")[0].replace("\n    ", " ")
        return {"verification": found.to_dict() | {"path": ONNX}, "verdict": verdict}

    def measure(self) -> dict[str, Any]:
        """What the report shows of the layers."""
        model, data = self.run.model()
        batch = example_inputs(data, "held_out", _SHOWN)
        rules = sorted({quantizer.ste.value for _, _, quantizer in quantizers(model)})
        drawn = [part.to_dict() for part in histograms(model, batch)]
        return {"noise": noise_rows(model, batch), "histograms": drawn, "rules": rules}

    def report(self) -> dict[str, Any]:
        """Write the page."""
        write(make_report(self.run, self.command), self.run.folder / REPORT)
        return {}

    def _fit(
        self, name: str, model: nn.Module, data: Source, epochs: int, rate: float, callbacks: list[Callback]
    ) -> dict[str, list[float]]:
        config, folder = self.config, self.run.folder
        if epochs == 0:
            return {"loss": [], "accuracy": []}
        course = Course(epochs, config.batch_size, rate, config.weight_decay, config.seed, config.optimizer)
        options: dict[str, Any] = {"log_every_n_steps": 10}
        if importlib.util.find_spec("tensorboard") is not None:
            options["logger"] = TensorBoardLogger(folder / TENSORBOARD, name=name, version="")
        progress = _Progress(name, epochs, self.on_event)
        return fit(model, data, course, folder / name, callbacks=[*callbacks, progress], options=options)


_STEPS: dict[str, Callable[[_Work], dict[str, Any]]] = {
    "float": _Work.train_float,
    "calibrate": _Work.calibrate,
    "quantized": _Work.train_quantized,
    "export": _Work.export,
    "verify": _Work.verify,
    "measure": _Work.measure,
    "report": _Work.report,
}
_TOGETHER = ("float", "calibrate", "quantized")  # what all processes have a part in


class _Progress(Callback):
    """Tells each batch and each epoch."""

    def __init__(self, step: str, epochs: int, on_event: Callable[[Event], None]) -> None:
        self.step, self.epochs, self.on_event = step, epochs, on_event

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if done := trainer.current_epoch:
            self._tell(trainer, "epoch", f"epoch {done}/{self.epochs} is done already, going on from there")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._tell(trainer, "progress", f"epoch {trainer.current_epoch + 1}/{self.epochs}")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Classifier)
        accuracy = float(trainer.callback_metrics["accuracy"])
        text = f"loss {pl_module.epoch_loss:.4f}, accuracy {accuracy:.2f} % held out"
        self._tell(trainer, "epoch", f"epoch {trainer.current_epoch + 1}/{self.epochs}: {text}")

    def _tell(self, trainer: Trainer, kind: str, text: str) -> None:
        total = int(trainer.estimated_stepping_batches)
        self.on_event(Event(self.step, kind, text, trainer.global_step, total))


@torch.no_grad()
def _accuracies(model: nn.Module, data: Source) -> dict[str, dict[str, Any]]:
    parts = {part: count_hits(model, data, getattr(data, part)) for part in ("held_out", "test")}
    return {part: {"percent": 100 * hits / n, "right": hits, "of": n} for part, (hits, n) in parts.items()}
