"""The report of a training run, from what its folder holds."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

import torch

from lowbit.app.report import Report
from lowbit.app.report_parts import Accuracy, Curve, Histogram, Measure
from lowbit.app.run import ONNX, SAFETENSORS, Run
from lowbit.version import __version__

# The steps whose models are compared, and what they are called.
NAMES = {"float": "float", "calibrate": "post-training", "quantized": "quantized"}

_Z = 1.96  # standard errors of a 95 % interval


def make_report(run: Run, command: str = "") -> Report:
    """What the finished steps of a run found"""
    steps, config = run.steps, run.config
    accuracy = [_accuracy(name, steps[step]["accuracy"]["test"]) for step, name in NAMES.items()]
    sizes = steps["export"]["sizes"]
    return Report(
        title=f"{config.data if config.is_builtin else config.model}, {config.recipe}",
        facts=_facts(run, command),
        findings=_findings(steps),
        accuracy=accuracy,
        curves=[*_curves(steps, "loss", "cross entropy"), *_curves(steps, "accuracy", "% held out")],
        noise=steps["measure"]["noise"],
        histograms=[Histogram.from_dict(part) for part in steps["measure"]["histograms"]],
        rules=steps["measure"]["rules"],
        scales=_scales(steps),
        sizes=[
            Measure("float", sizes["float"]),
            Measure("codes and scales", sizes["codes"]),
            Measure(ONNX, sizes[ONNX]),
            Measure(SAFETENSORS, sizes[SAFETENSORS]),
        ],
        verification=steps["verify"]["verification"],
    )


def interval(right: int, of: int) -> tuple[float, float]:
    """The share, in %, that is known from so many answers: Wilson's 95 % interval

    >>> [round(end, 1) for end in interval(95, 100)]
    [88.8, 97.8]
    """
    share, weight = right / of, _Z**2 / of
    middle = share + weight / 2
    half = _Z * math.sqrt(share * (1 - share) / of + weight / (4 * of))
    return 100 * (middle - half) / (1 + weight), 100 * (middle + half) / (1 + weight)


def _accuracy(name: str, found: dict[str, Any]) -> Accuracy:
    low, high = interval(found["right"], found["of"])
    return Accuracy(name, found["percent"], low, high)


def _facts(run: Run, command: str) -> dict[str, str]:
    config, steps = run.config, run.steps
    facts = {
        "data": config.data if config.is_builtin else config.model,
        "model": f"{config.model}, {steps['export']['parameters']:,} parameters",
        "recipe": config.recipe,
        "training": f"{config.float_epochs} epochs in float at {config.rate:g}, "
        f"{config.epochs} with quantizers at {config.quantized_rate:g}, batches of {config.batch_size}",
        "seed": str(config.seed),
        "versions": f"lowbit {__version__}, torch {torch.__version__}",
        "time": f"{sum(run.seconds.values()):.0f} s, finished {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    }
    return facts | ({"command": command} if command else {})


def _findings(steps: dict[str, Any]) -> list[str]:
    values = {step: steps[step]["accuracy"]["test"]["percent"] for step in NAMES}
    gained, sizes = values["quantized"] - values["float"], steps["export"]["sizes"]
    total = steps["quantized"]["accuracy"]["test"]["of"]
    share = 100 * sizes["codes"] / sizes["float"]
    right = f"Quantized, {values['quantized']:.2f} % of {total:,} test answers are right"
    weight = f"The parameters take {sizes['codes']:,} bytes as codes and scales"
    verdict = steps["verify"]["verdict"]
    return [
        f"{right}: {gained:+.2f} points against float.",
        f"Rounding without training leaves {values['calibrate']:.2f} %.",
        f"{weight}, {share:.0f} % of the {sizes['float']:,} that they take in float.",
        f"{verdict[:1].upper()}{verdict[1:]}.",
    ]


def _curves(steps: dict[str, Any], key: str, label: str) -> list[Curve]:
    return [
        Curve(NAMES[step], key, list(range(1, len(values) + 1)), values, "epoch", label)
        for step in ("float", "quantized")
        if (values := steps[step]["history"][key])
    ]


def _scales(steps: dict[str, Any]) -> list[Curve]:
    """From the calibration on, at 0, one value after each epoch"""
    begin, later = steps["calibrate"]["scales"], steps["quantized"]["scales"]
    curves = []
    for path, values in later.items():
        y = [begin[path], *values] if path in begin else values
        chart = "weights" if path.endswith("weight_quantizer") else "activations"
        x = range(len(values) + 1 - len(y), len(values) + 1)
        curves.append(Curve(path.removesuffix("_quantizer"), chart, list(x), y, "epoch", "scale"))
    return curves
