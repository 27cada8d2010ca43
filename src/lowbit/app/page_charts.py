"""The charts of a page: figures that hold their data as JSON, which report.js draws."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from itertools import count
from typing import Any

import torch

from lowbit.app.report_parts import Accuracy, Curve, Histogram, Measure, Number
from lowbit.functional import fake_quantize, fake_quantize_backward
from lowbit.grid import Grid
from lowbit.ste import SteKind

# More than a chart has pixels for; a longer curve keeps the extremes between two pixels.
_POINTS = 1000
# Over a curve of more points, its running mean is drawn.
SMOOTH = 100
_UNITS = {
    "B": ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes")),
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
}
_FORMULAS = {
    SteKind.IDENTITY: "dx = g",
    SteKind.CLIPPED_IDENTITY: "dx = g where lo ≤ x ≤ hi, else 0",
    SteKind.IN_RANGE: "dx = g where round(x / s) + z is a code, else 0",
    SteKind.TANH: "dx = g · (1 - tanh²(x / s))",
    SteKind.HARD_TANH: "dx = g · (1 - |x| / bound) where |x| < bound, else 0",
}
_TONES = {"weight": 0, "activation": 1}


def lines(curves: Sequence[Curve], tones: Sequence[str] = (), *, log: bool = False) -> str:
    """Curves over one x axis; what ``tones`` names has its colour by its place there, as in the charts before"""
    first = curves[0]
    taken = {curve.name: tones.index(curve.name) for curve in curves if curve.name in tones}
    free = (tone for tone in count() if tone not in taken.values())
    series = []
    for curve in curves:
        x, y = _thin(curve.x, curve.y)
        tone = taken[curve.name] if curve.name in taken else next(free)
        smooth = not log and len(curve.x) > SMOOTH
        series.append({"name": curve.name, "x": x, "y": y, "tone": tone, "smooth": smooth})
    axes = {"x": first.x_label, "y": first.y_label, "log": log}
    spec = {"kind": "lines", **axes, "series": series}
    names = ", ".join(curve.name for curve in curves[:6]) + (", and more" if len(curves) > 6 else "")
    return figure(first.chart, spec, f"Line chart of {first.chart} over {first.x_label}: {names}")


def intervals(accuracy: Sequence[Accuracy]) -> str:
    """A dot for each accuracy, and the interval it is known to."""
    marks = [
        {"name": row.name, "marks": [{"value": row.value, "low": row.low, "high": row.high, "tone": tone}]}
        for tone, row in enumerate(accuracy)
        if row.value is not None
    ]
    spec = {"kind": "rows", "x": "accuracy (%)", "unit": "%", "zero": False, "rows": marks}
    return figure("", spec, f"Dot chart of the accuracy of {', '.join(row.name for row in accuracy)}")


def noise(rows: Iterable[dict[str, Any]], limit: int) -> str:
    """A row for each layer, a dot for each of its quantizers; the ``limit`` noisiest layers"""
    layers: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if isinstance(row.get("snr_db"), int | float):
            tensor = str(row.get("tensor", ""))
            mark = {"value": _short(row["snr_db"]), "series": tensor, "tone": _TONES.get(tensor, 2)}
            layers.setdefault(str(row.get("layer", "")), []).append(mark)
    if not layers:
        return ""
    worst = sorted(layers.items(), key=lambda item: min(mark["value"] for mark in item[1]))
    shown = [{"name": layer or "(model)", "marks": marks} for layer, marks in worst[:limit]]
    spec = {"kind": "rows", "x": "signal-to-noise (dB)", "unit": "dB", "zero": True, "rows": shown}
    return figure("", spec, f"Dot chart of the signal-to-noise ratio in decibels of {len(shown)} layers")


def bars(measures: Sequence[Measure], title: str) -> str:
    """A bar for each measure, all of one unit, relative to the first."""
    unit = measures[0].unit
    values = [measure.value for measure in measures if measure.value is not None]
    divisor, word = _scaled(max(values, default=0), unit)
    first = measures[0].value
    rows = []
    for tone, measure in enumerate(measures):
        if measure.value is not None:
            ratio = f" ({measure.value / first:.3g} \N{MULTIPLICATION SIGN})" if tone and first else ""
            mark = {"value": _short(measure.value / divisor), "text": amount(measure.value, unit) + ratio}
            rows.append({"name": measure.name, "marks": [mark | {"bar": True, "tone": 0, "faint": tone == 0}]})
    spec = {"kind": "rows", "x": word, "unit": word, "zero": True, "rows": rows}
    return figure(title, spec, f"Bar chart of {title.lower()}: {', '.join(measure.name for measure in measures)}")


def histogram(part: Histogram) -> str:
    """Counts of values, the grid over them, and below it which codes are in use."""
    grid = None
    if part.scale:
        grid = {"scale": part.scale, "zero": part.zero_point, "min": part.quant_min, "max": part.quant_max}
    spec = {
        "kind": "histogram",
        "x": part.label,
        "edges": [_short(edge) for edge in part.edges],
        "counts": part.counts,
        "grid": grid,
        "codes": part.codes or [],
        "tone": _TONES.get(part.tensor, 2),
    }
    name = part.layer or "(model)"
    title = f'<span class="layer">{escape(name)}</span>'
    note = []
    if part.scale:
        note.append(f"codes {part.quant_min} to {part.quant_max}")
        note.append(f"s = {part.scale:.3g}" + (f", z = {part.zero_point:g}" if part.zero_point else ""))
    if part.codes:
        note.append(f"{part.in_use} of {part.size} in use")
    text = f'<p class="note">{escape(" · ".join(note))}</p>' if note else ""
    return figure(title, spec, f"Histogram of {name}, {part.tensor}: {'; '.join(note)}", note=text, title_is_html=True)


def rule(name: str) -> str:
    """The staircase and, below it, the rule's gradient: computed by lowbit itself, on a grid of 3 bits"""
    try:
        ste = SteKind(name)
    except ValueError as error:
        raise ValueError(f"rules holds {name!r}, but it must hold names of SteKind: {', '.join(SteKind)}") from error
    grid, scale = Grid(3), 0.5
    x = torch.arange(-300, 251, 2, dtype=torch.float64) / 100
    y = fake_quantize(x, scale, grid=grid)
    dx = fake_quantize_backward(torch.ones_like(x), x, scale, grid=grid, ste=ste)
    band = [grid.quant_min * scale, grid.quant_max * scale]
    shared = {"kind": "lines", "band": band, "legend": False, "left": 30}
    at = [_short(value) for value in x.tolist()]
    ends = [at[0], at[-1]]
    forward = [
        {"name": "y", "x": at, "y": [_short(value) for value in y.tolist()], "tone": 0},
        {"name": "x", "x": ends, "y": ends, "faint": True},
    ]
    gradient = [{"name": "dx", "x": at, "y": [_short(value) for value in dx.tolist()], "tone": 1}]
    above = shared | {"x": "", "y": "y", "series": forward, "height": 150, "range": [-3, 2.5]}
    below = shared | {"x": "x", "y": "dx for g = 1", "series": gradient, "height": 110, "range": [-0.1, 1.15]}
    text = f'<div class="rule"><h3>{escape(ste.name)}</h3><p class="note">{escape(_FORMULAS[ste])}</p>'
    text += figure("", above, f"{ste.name}, forward: a staircase of 8 steps")
    return text + figure("", below, f"{ste.name}, gradient: {_FORMULAS[ste]}") + "</div>"


def figure(title: str, spec: dict[str, Any], label: str, *, note: str = "", title_is_html: bool = False) -> str:
    """The frame of a chart, its data in it."""
    head = title if title_is_html else escape(title)
    caption = f"<figcaption>{head}</figcaption>" if title else ""
    plot = f'<div class="plot" tabindex="0" role="img" aria-label="{escape(label)}"></div>'
    data = f'<script type="application/json">{to_script(spec)}</script>'
    return f'<figure class="chart {spec["kind"]}">{caption}<div class="legend"></div>{plot}{note}{data}</figure>\n'


def to_script(data: Any) -> str:
    """JSON that no HTML parser takes for the end of its element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def amount(value: float, unit: str) -> str:
    """Three digits and a unit: 12.3 kB, 4.56 ms"""
    divisor, word = _scaled(value, unit)
    return f"{value / divisor:,.3g} {word}" if value / divisor < 1000 else f"{value / divisor:,.0f} {word}"


def _scaled(value: float, unit: str) -> tuple[float, str]:
    sizes = _UNITS.get(unit, ((1.0, unit),))
    return next((size for size in sizes if abs(value) >= size[0]), sizes[-1])


def _short(value: Number) -> Number:
    """Six digits: more than a chart can show."""
    return None if value is None else float(f"{value:.6g}")


def _thin(x: Sequence[Number], y: Sequence[Number]) -> tuple[list[Number], list[Number]]:
    """At most _POINTS points: of each bucket the lowest and the highest, in their order."""
    kept: Iterable[int] = range(len(x))
    if len(x) > _POINTS:
        chosen: set[int] = set()
        size = 2 * len(x) / _POINTS
        for bucket in range(_POINTS // 2):
            inside = range(int(bucket * size), int((bucket + 1) * size))
            known = [(value, i) for i in inside if (value := y[i]) is not None]
            chosen |= {min(known)[1], max(known)[1]} if known else {inside[0]}
        kept = sorted(chosen | {0, len(x) - 1})
    return [_short(x[i]) for i in kept], [_short(y[i]) for i in kept]
