"""The page of a report: its sections as HTML, and the document around them. All text is escaped here."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any, NamedTuple

from lowbit.app import page_charts as charts
from lowbit.app.report_parts import Accuracy, Curve, Histogram, Measure, Table
from lowbit.version import __version__

# What is open at once; the rest is in a <details>, and drawn when that is opened.
_LAYERS = 12
_NOISY = 40
_NONE = "\N{EN DASH}"


class Section(NamedTuple):
    """A part of the page; ``link`` is its short name, ``lead`` says how to read it."""

    name: str
    link: str
    title: str
    lead: str
    body: str


def findings(sentences: Sequence[str]) -> Section | None:
    """Sentences for the top of the page."""
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return Section("findings", "Findings", "Findings", "", f'<ul class="findings">{items}</ul>') if sentences else None


def facts(known: Mapping[str, Any]) -> Section | None:
    """What was trained; a command is shown as one."""
    rows = [
        f"<div{' class=wide' if key == 'command' else ''}><dt>{escape(str(key))}</dt>"
        f"<dd>{f'<code>{escape(str(value))}</code>' if key == 'command' else escape(str(value))}</dd></div>"
        for key, value in known.items()
    ]
    return Section("run", "Run", "What was trained", "", f'<dl class="facts">{"".join(rows)}</dl>') if rows else None


def accuracy(parts: Sequence[Accuracy]) -> Section | None:
    """A card for each, and all as dots on one axis."""
    if not parts:
        return None
    cards = "".join(_card(part, None if i == 0 else parts[0]) for i, part in enumerate(parts))
    chart = charts.intervals(parts) if sum(part.value is not None for part in parts) > 1 else ""
    lead = "Bars are the intervals that the values are known to." if any(part.low is not None for part in parts) else ""
    return Section("accuracy", "Accuracy", "Accuracy", lead, f'<div class="cards">{cards}</div>{chart}')


def study(part: Table, number: int) -> Section:
    """One table of results."""
    return Section(f"table-{number}", part.title, part.title, part.note, table(part.columns, part.rows, part.title))


def curves(parts: Sequence[Curve], tones: Sequence[str]) -> Section | None:
    """A chart for each name of one."""
    lead = "Thin lines are what was measured, thick ones its running mean."
    noisy = any(len(part.x) > charts.SMOOTH for part in parts)
    return Section("training", "Training", "Training", lead if noisy else "", _charts(parts, tones)) if parts else None


def scales(parts: Sequence[Curve]) -> Section | None:
    """How the scales moved."""
    lead = "The step between two codes of each quantizer, during training; on a logarithmic axis."
    return Section("scales", "Scales", "Scales", lead, _charts(parts, log=True)) if parts else None


def noise(rows: Sequence[Mapping[str, Any]]) -> Section | None:
    """Layers as rows of dots, then all of it as a table."""
    if not rows:
        return None
    keys = list(dict.fromkeys(key for row in rows for key in row))
    words = {"snr_db": "SNR (dB)"}
    body = charts.noise([dict(row) for row in rows], _NOISY)
    body += table([words.get(key, key) for key in keys], [[row.get(key) for key in keys] for row in rows], "Noise")
    body = f'<div class="split">{body}</div>'
    lead = (
        "How much of the signal each quantizer leaves: 10 log₁₀ of the signal's power over that of the error. "
        "About 6 dB are one bit; at 0 dB the error is as large as the signal."
    )
    layers = len({row.get("layer") for row in rows})
    if layers > _NOISY:
        lead += f" The chart has the noisiest {_NOISY} of {layers} layers, the table all."
    return Section("noise", "Noise", "Noise of each layer", lead, body)


def histograms(parts: Sequence[Histogram]) -> Section | None:
    """Small multiples of weights, then of activations; from _LAYERS of them on, the rest on demand."""
    if not parts:
        return None
    body = '<label class="switch"><input type="checkbox" id="log-counts" checked> Logarithmic counts</label>'
    order = {"weight": 0, "activation": 1}
    for tensor in sorted(dict.fromkeys(part.tensor for part in parts), key=lambda name: order.get(name, 2)):
        drawn = [charts.histogram(part) for part in parts if part.tensor == tensor]
        title = f"{tensor.capitalize()}s" if tensor in order else tensor
        body += f'<h3>{escape(title)}</h3><div class="multiples">{"".join(drawn[:_LAYERS])}</div>'
        if rest := drawn[_LAYERS:]:
            words = f"{len(rest)} more"
            body += f'<details><summary>{words}</summary><div class="multiples">{"".join(rest)}</div></details>'
    lead = (
        "Lines are the values that codes stand for (of a fine grid only some), and the shaded band is the range of the "
        "grid: what lies outside is clipped. The strip below has a cell for each code, stronger the more values have "
        "it, empty where none has."
    )
    return Section("histograms", "Histograms", "Weights and activations on their grids", lead, body)


def codes(parts: Sequence[Histogram]) -> Section | None:
    """How many codes of each quantizer are in use, as a table."""
    columns = ["layer", "tensor", "codes", "in use", "in use (%)", "entropy (bits)", "most used (%)", "beyond grid (%)"]
    rows = [
        [
            part.layer or "(model)",
            part.tensor,
            part.size,
            part.in_use,
            100 * part.in_use / part.size,
            part.entropy,
            100 * max(part.codes) / (sum(part.codes) or 1),
            None if part.beyond is None else 100 * part.beyond,
        ]
        for part in parts
        if part.codes
    ]
    lead = "A code that no value has is a bit paid for in vain; entropy is the bits that the codes in use tell."
    return Section("codes", "Codes", "Codes in use", lead, table(columns, rows, "Codes in use")) if rows else None


def rules(names: Sequence[str]) -> Section | None:
    """The gradient rules as pictures."""
    if not names:
        return None
    lead = (
        "What the forward computes, above, and below it the gradient that the backward passes in its place; "
        "on a grid of 3 bits with s = 0.5. The shaded band is the range of the grid, from lo to hi."
    )
    pictures = "".join(charts.rule(name) for name in dict.fromkeys(name.lower() for name in names))
    return Section("rules", "Rules", "Gradient rules", lead, f'<div class="multiples rules">{pictures}</div>')


def sizes(parts: Sequence[Measure]) -> Section | None:
    """Bars, a chart for each unit."""
    titles = {"B": "Size", "s": "Time"}
    units = dict.fromkeys(part.unit for part in parts)
    groups = {unit: [part for part in parts if part.unit == unit] for unit in units}
    body = "".join(charts.bars(group, titles.get(unit, unit)) for unit, group in groups.items())
    lead = "Each as a multiple of the first, in grey." if len(parts) > len(units) else ""
    body = f'<div class="pair">{body}</div>'
    return Section("sizes", "Size and speed", "Size and speed", lead, body) if parts else None


def verification(found: Mapping[str, Any] | None) -> Section | None:
    """The verdict on the exported file, and what was compared."""
    if not found:
        return None
    ok = bool(found.get("ok"))
    verdict = "The file computes what the model computes."
    if not ok:
        where = f" They part at {found['first']}." if found.get("first") else " One has what the other lacks."
        verdict = "The file does not compute what the model computes." + where
    body = f'<p class="verdict {"good" if ok else "bad"}">{escape(verdict)}</p>'
    known = {key: found[key] for key in ("path", "style") if found.get(key)}
    if found.get("runtime"):
        known["ONNX Runtime"] = found["runtime"]
    if (section := facts(known)) is not None:
        body += section.body
    said = [f"Missing: {text}" for text in found.get("missing") or ()]
    said += [f"Not compared: {path}, {reason}" for path, reason in (found.get("skipped") or {}).items()]
    said += [f"Not exact on this processor: {text}" for text in (found.get("probe") or {}).get("wrong") or ()]
    if error := (found.get("optimised") or {}).get("error"):
        said.append(f"With its optimisations on, ONNX Runtime does not run the file: {error}")
    body += "".join(f'<p class="note">{escape(text)}</p>' for text in said)
    for title, columns, rows in _compared(found):
        if rows:
            body += f"<h3>{title}</h3>" + table(columns, rows, title)
    lead = (
        "The exported file in ONNX Runtime against the model in torch, each run from the inputs; "
        "“alone” is given the file's codes of all quantizers before."
    )
    return Section("verification", "Verification", "Verification of the exported file", lead, body)


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str) -> str:
    """A table whose columns sort."""
    numeric = [all(_is_number(row[i]) for row in rows if row[i] is not None) for i in range(len(columns))]
    head = "".join(
        f'<th scope="col" aria-sort="none"{" class=n" if right else ""}>'
        f'<button type="button">{escape(column)}</button></th>'
        for column, right in zip(columns, numeric, strict=True)
    )
    cells = [_column([row[i] for row in rows], right, i == 0) for i, right in enumerate(numeric)]
    body = "".join(f"<tr>{''.join(row)}</tr>\n" for row in zip(*cells, strict=True))
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(name)}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def document(title: str, sections: Sequence[Section]) -> str:
    """The whole file: its style and script inside, and a policy that lets it load nothing and run nothing else"""
    style, script = (files(__package__).joinpath(name).read_text("utf-8") for name in ("report.css", "report.js"))
    policy = f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'"
    links = "".join(f'<a href="#{section.name}">{escape(section.link)}</a>' for section in sections)
    parts = "".join(
        f'<section id="{part.name}" aria-labelledby="{part.name}-title">'
        f'<h2 id="{part.name}-title">{escape(part.title)}</h2>'
        f"{f'<p class=lead>{escape(part.lead)}</p>' if part.lead else ''}\n{part.body}</section>\n"
        for part in sections
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escape(title)}</title>
<style>{style}</style>
</head>
<body>
<header><h1>{escape(title)}</h1></header>
<nav aria-label="Sections"><div>{links}</div></nav>
<main>
<noscript><p class="verdict bad">The charts need JavaScript, which is off here. The tables do not.</p></noscript>
{parts}</main>
<footer>Written by lowbit {escape(__version__)}.</footer>
<div id="tip" hidden></div>
<div id="spoken" aria-live="polite"></div>
<script>{script}</script>
</body>
</html>
"""


def _charts(parts: Sequence[Curve], tones: Sequence[str] = (), *, log: bool = False) -> str:
    names = dict.fromkeys(part.chart for part in parts)
    groups = [[part for part in parts if part.chart == name] for name in names]
    return f'<div class="pair">{"".join(charts.lines(group, tones, log=log) for group in groups)}</div>'


def _card(part: Accuracy, first: Accuracy | None) -> str:
    value = _NONE if part.value is None else f"{part.value:.2f}<small> %</small>"
    words = ""
    if first is not None and first.value is not None and part.value is not None:
        gained = part.value - first.value
        sign = "\N{MINUS SIGN}" if gained < 0 else "+"
        words = f"{sign}{abs(gained):.2f} points against {first.name}"
    interval = "" if part.low is None or part.high is None else f"{part.low:.2f} to {part.high:.2f}"
    lines = "".join(f'<p class="note">{escape(text)}</p>' for text in (interval, words) if text)
    return f'<div class="card"><h3>{escape(part.name)}</h3><p class="figure">{value}</p>{lines}</div>'


def _compared(found: Mapping[str, Any]) -> list[tuple[str, list[str], list[list[Any]]]]:
    """The tables of a Verification: title, columns, rows."""
    measured = ("elements", "differing", "largest")
    outputs = [
        [part["name"], part["dtype"], *(part["free"][key] for key in measured), part["free"]["decibels"],
         _percent(part["free"]["agreement"]), part["ok"]]
        for part in found.get("outputs") or ()
    ]  # fmt: skip
    tensors = [
        [part["name"], part["bits"], *(part["free"][key] for key in measured),
         *(part["alone"][key] for key in measured[1:]), part["ok"]]
        for part in found.get("tensors") or ()
    ]  # fmt: skip
    layers = [
        [part["path"] or "(model)", "integer" if part["exact"] else "float", part["values"]["elements"],
         part["values"]["differing"], part["values"]["relative"], part["ok"]]
        for part in found.get("layers") or ()
    ]  # fmt: skip
    return [
        ("Outputs", ["output", "dtype", "values", "differ", "by at most", "dB", "argmax agrees (%)", "ok"], outputs),
        ("Codes", ["tensor", "bits", "codes", "differ", "steps", "alone: differ", "alone: steps", "ok"], tensors),
        ("Layers, given equal codes", ["layer", "product", "values", "differ", "of the largest", "ok"], layers),
    ]


def _percent(share: Any) -> Any:
    return 100 * share if _is_number(share) and not isinstance(share, str) else share


def _is_number(value: Any) -> bool:
    """Numbers, and the infinities that Verification writes as text."""
    return (isinstance(value, int | float) and not isinstance(value, bool)) or value in ("inf", "-inf")


def _column(values: Sequence[Any], right: bool, is_first: bool) -> list[str]:
    """The cells of a column, its numbers with as many decimals as each other."""
    tag, end = ('th scope="row"', "th") if is_first else ("td", "td")
    numbers = [abs(value) for value in values if isinstance(value, float) and value]
    whole = all(number.is_integer() for number in numbers)
    # As many decimals as give the smallest two digits; where that takes more than four, three digits of each.
    decimals = next((d for d in (2, 3, 4) if not whole and min(numbers) * 10**d >= 10), None)
    style = ",.0f" if whole else ".3g" if decimals is None else f",.{decimals}f"
    cells = []
    for value in values:
        kind, key = "n" if right else "", ""
        if value is None:
            text = _NONE
        elif isinstance(value, bool):
            text, key, kind = ("yes" if value else "no"), str(int(value)), "good" if value else "bad"
        elif value in ("inf", "-inf"):
            text, key = value.replace("inf", "∞"), value.replace("inf", "Infinity")
        elif isinstance(value, int | float):
            text, key = f"{value:{style if isinstance(value, float) else ','}}", f"{value:.17g}"
        else:
            text = str(value)
        shown = escape(text)
        if is_first:  # a long name may break where its parts do
            shown = shown.replace(".", ".<wbr>").replace("_", "_<wbr>")
        named = (f' class="{kind}"' if kind else "") + (f' data-v="{key}"' if key else "")
        cells.append(f"<{tag}{named}>{shown}</{end}>")
    return cells


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
