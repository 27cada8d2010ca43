"""The best network of a study as files, and the report of the whole."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lowbit.app.analysis import Analysis
from lowbit.app.report import Report
from lowbit.app.report_parts import Accuracy, Curve, Table
from lowbit.app.run import ONNX, SAFETENSORS
from lowbit.app.sources import build, example_inputs
from lowbit.app.study import Job, train_case
from lowbit.app.study_config import ROLES, StudyConfig
from lowbit.conversion import convert
from lowbit.export.artifact import save
from lowbit.export.onnx import STYLES, export_onnx
from lowbit.export.verify import verify
from lowbit.files import write_json
from lowbit.version import __version__

VERIFICATION = "verification.json"
_SHOWN = 256  # samples


def ship_best(config: StudyConfig, folder: Path, analysis: Analysis) -> dict[str, Any]:
    """Train the best case's first seed once more, to the same bits; write its files, and verify them"""
    path = folder / VERIFICATION
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    row = analysis.best
    prepared, _, test = train_case(config, folder, Job(row.case, row.rate, 0))
    prepared.eval()
    _, data = build(config.train_config(0))
    export_onnx(prepared, example_inputs(data), folder / ONNX, config.style)
    save(convert(prepared, STYLES[config.style]), folder / SAFETENSORS)
    # The file by its name: the folder may be moved, and what is found does not depend on it.
    report = replace(verify(prepared, folder / ONNX, example_inputs(data, "test", _SHOWN)), path=ONNX)
    found = {
        "ok": report.ok,
        "case": row.case.name,
        "test": test,
        "verification": report.to_dict(),
        "text": str(report),
    }
    write_json(path, found)
    return found


def make_report(config: StudyConfig, analysis: Analysis, shipped: dict[str, Any], command: str = "") -> Report:
    """What the study found"""
    columns, rows = analysis.table()
    note = (
        f"Means over {config.seeds} seeds; ± is their standard deviation. The difference is that from the first row of "
        "the same bits, seed by seed, with its 95 % interval, corrected for the number of comparisons."
    )
    facts = {
        "data": config.data,
        "model": config.model,
        "training": f"{config.float_epochs} epochs in float at {config.float_rate:g}, then {config.epochs} at the best "
        f"of {', '.join(f'{rate:g}' for rate in config.rates)}, chosen on held-out data for each case",
        "runs": str(len(config.cases()) * len(config.rates) * config.seeds),
        "versions": f"lowbit {__version__}, torch {torch.__version__}",
    }
    return Report(
        title=f"Study: {config.data}, {' and '.join(map(str, config.bits))} bits",
        facts=facts | ({"command": command} if command else {}),
        findings=analysis.findings(),
        accuracy=[
            _accuracy("float", analysis.float_test, analysis.float_spread),
            *(_accuracy(f"{bits} bits", rows[0].test, rows[0].spread) for bits, rows in analysis.rows.items()),
        ],
        tables=[Table("Every case", columns, rows, note)],
        curves=_curves(config, analysis),
        rules=list(config.rules),
        verification=shipped["verification"],
    )


def _accuracy(name: str, value: float, spread: float) -> Accuracy:
    return Accuracy(name, value, value - spread, value + spread)


def _curves(config: StudyConfig, analysis: Analysis) -> list[Curve]:
    """Accuracy over bits, a line for each rule, weights and activations apart"""
    curves = []
    for role in ROLES if len(config.bits) > 1 else ():
        other = next(name for name in ROLES if name != role)
        for rule in config.rules:
            points = [
                (bits, row.test)
                for bits, rows in analysis.rows.items()
                for row in rows
                if getattr(row.case, f"{role}_rule") == rule
                and getattr(row.case, f"{other}_rule") == config.rules[0]
                and (row.case.weight_scale, row.case.activation_scale) == (config.scales[0], config.scales[0])
            ]
            if len(points) > 1:
                x, y = zip(*sorted(points), strict=True)
                curves.append(Curve(rule, f"rules of {role}s", list(x), list(y), "bits", "test %"))
    return curves
