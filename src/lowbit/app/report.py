"""Report: what a run found, as one HTML file that needs nothing else."""

from __future__ import annotations

import math
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from lowbit.app import page
from lowbit.app.report_parts import Accuracy, Curve, Histogram, Measure, Table
from lowbit.record import Record

_PARTS: dict[str, type[Record]] = {
    "accuracy": Accuracy,
    "curves": Curve,
    "histograms": Histogram,
    "scales": Curve,
    "sizes": Measure,
    "tables": Table,
}


@dataclass(frozen=True)
class Report:
    """from_dict(report.to_dict()) == report, with None for each number that is not finite

    The page leaves out what is empty.

    - ``facts``: what was trained: model, data, recipe, seed, versions, time, command
    - ``findings``: sentences, for the top of the page
    - ``accuracy``: the first is what the others are compared with
    - ``noise``: rows with "layer", "tensor" ("weight" or "activation"), "snr_db" and what else is known
    - ``rules``: names of SteKind, drawn as pictures
    - ``curves`` have linear axes; ``scales``, how scales moved, logarithmic ones
    - ``sizes``: bytes and seconds
    - ``verification``: what Verification.to_dict gives
    - ``tables``: results of a study

    >>> report = Report("digits", findings=["4 bits cost 0.3 points."])
    >>> Report.from_dict(report.to_dict()) == report
    True
    """

    title: str
    facts: dict[str, str] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    accuracy: list[Accuracy] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    noise: list[dict[str, Any]] = field(default_factory=list)
    histograms: list[Histogram] = field(default_factory=list)
    rules: list[str] = field(default_factory=list)
    scales: list[Curve] = field(default_factory=list)
    sizes: list[Measure] = field(default_factory=list)
    verification: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """For JSON, without what is empty."""
        kept = {part.name: value for part in fields(self) if (value := getattr(self, part.name))}
        return _plain({"title": self.title} | kept)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        """The report that ``to_dict`` wrote."""
        known = [part.name for part in fields(cls)]
        for key in data:
            if key not in known:
                raise ValueError(f"Report has no key {key!r}; its keys are {', '.join(known)}")
        if "title" not in data:
            raise ValueError("Report needs the key 'title'")
        read: dict[str, Any] = {
            name: [_PARTS[name].from_dict(item) for item in value] if name in _PARTS else value
            for name, value in data.items()
            if value is not None
        }
        return cls(**read)


def render(report: Report) -> str:
    """The page: one HTML text that loads nothing"""
    # What is written from the run's folder later is the same page.
    report = Report.from_dict(report.to_dict())
    sections = [
        page.findings(report.findings),
        page.facts(report.facts),
        page.accuracy(report.accuracy),
        *(page.study(table, number) for number, table in enumerate(report.tables, 1)),
        page.curves(report.curves, [part.name for part in report.accuracy]),
        page.noise(report.noise),
        page.histograms(report.histograms),
        page.codes(report.histograms),
        page.rules(report.rules),
        page.scales(report.scales),
        page.sizes(report.sizes),
        page.verification(report.verification),
    ]
    return page.document(report.title, [section for section in sections if section is not None])


def write(report: Report, path: str | os.PathLike[str]) -> None:
    """Write the page; a file that is there already is replaced at once, or stays as it is."""
    path = Path(path)
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        draft.write_text(render(report), encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return _plain(value.to_dict())
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
