from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from lowbit import SteKind
from lowbit.app.report import Report, render, write
from lowbit.app.report_parts import Accuracy, Curve, Histogram, Measure, Table
from reporting import sample

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&amp;"
NAN, INF = math.nan, math.inf


class Page(HTMLParser):
    """The elements of a page, its text, and the data of its charts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.data: list[dict[str, Any]] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        tag, attributes = self.elements[-1] if self.elements else ("", {})
        if tag == "script" and attributes.get("type") == "application/json" and data.strip():
            # What json.loads refuses, JSON.parse does too: NaN and Infinity.
            self.data.append(json.loads(data, parse_constant=pytest.fail))
        elif tag == "script" and not attributes and data.strip():
            self.scripts.append(data)
        else:
            self.words.append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)

    @property
    def sections(self) -> list[str | None]:
        return [attributes["id"] for tag, attributes in self.elements if tag == "section"]


def one_of_each(name: str = "x", bad: float = 1.0) -> dict[str, Any]:
    """Every part of a report with little in it; ``name`` wherever text may be, ``bad`` wherever a number may be."""
    free = {"elements": 4, "differing": 1, "largest": bad, "relative": bad, "decibels": "inf", "agreement": bad}
    return {
        "facts": {name: name, "command": name},
        "findings": [name],
        "accuracy": [Accuracy(name, 90.0, 89.0, 91.0), Accuracy("quantized", bad, bad, bad)],
        "tables": [Table(name, [name, "y"], [[name, bad], [name, None]], name)],
        "curves": [Curve(name, name, [0, 1, bad], [bad, 1, 2], name, name)],
        "noise": [{"layer": name, "tensor": name, "snr_db": bad, name: name}],
        "histograms": [Histogram(name, "weight", [0, 1, bad], [3, 4], 0.5, 0, -1, 1, [1, 0, 2], name)],
        "rules": ["TANH"],
        "scales": [Curve(name, "scale", [0, 1, 2], [bad, 0, -1])],
        "sizes": [Measure(name, 100.0), Measure(name, bad), Measure(name, 1.0, name)],
        "verification": {
            "ok": False,
            "first": name,
            "path": name,
            "style": "qdq",
            "runtime": name,
            "missing": [name],
            "skipped": {name: name},
            "outputs": [{"name": name, "dtype": "float32", "free": free, "ok": False}],
            "tensors": [{"name": name, "bits": 4, "free": free, "alone": free, "ok": True}],
            "layers": [{"path": name, "exact": True, "values": free, "ok": True}],
            "probe": {"exact": False, "wrong": [name]},
            "optimised": {"error": name},
        },
    }


def test_a_run_goes_through_json() -> None:
    report = sample()
    text = json.dumps(report.to_dict(), allow_nan=False)
    again = Report.from_dict(json.loads(text))
    assert again == report
    assert render(again) == render(report)


def test_the_page_of_a_run_has_every_section() -> None:
    page = Page(render(sample()))
    names = ["findings", "run", "accuracy", "training", "noise", "histograms", "codes", "rules", "scales", "sizes"]
    assert [name for name in page.sections if not (name or "").startswith("table-")] == [*names, "verification"]
    kinds = [data["kind"] for data in page.data]
    # Loss and accuracy, two pictures for each of three rules, scales of weights and of activations.
    assert kinds.count("lines") == 2 + 2 * 3 + 2
    assert kinds.count("rows") == 1 + 1 + 2
    assert kinds.count("histogram") == len(sample().histograms) >= 8
    assert page.count("table") == 1 + 1 + 1 + 3


@pytest.mark.parametrize("name", one_of_each())
def test_a_part_alone_is_a_page(name: str) -> None:
    section = {"facts": "run", "curves": "training", "tables": None}.get(name, name)
    found = Page(render(Report("t", **{name: one_of_each()[name]}))).sections
    assert len(found) == (2 if name == "histograms" else 1)
    assert section is None or found[0] == section


@pytest.mark.parametrize("nothing", [{}, dict.fromkeys(one_of_each())], ids=["empty", "None"])
def test_an_empty_report_is_a_page(nothing: dict[str, Any]) -> None:
    report = Report("", **nothing)
    assert Page(render(report)).sections == []
    assert Report.from_dict(report.to_dict()) == Report("")


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_numbers_that_are_not_finite_are_null(bad: float) -> None:
    report = Report("t", **one_of_each(bad=bad))
    again = Report.from_dict(json.loads(json.dumps(report.to_dict(), allow_nan=False)))
    assert again.curves[0].y == [None, 1, 2]
    assert again.histograms[0].beyond == pytest.approx(4 / 7)
    assert again.verification is not None
    assert again.verification["outputs"][0]["free"]["largest"] is None
    page = Page(render(report))
    # The dots of accuracy and noise have no place then.
    assert len(page.data) == page.count("figure") == Page(render(Report("t", **one_of_each()))).count("figure") - 2
    assert not {"nan", "inf", "NaN"} & {word.strip() for word in page.words}
    assert "∞" in page.words


def test_text_is_text() -> None:
    page, plain = Page(render(Report(EVIL, **one_of_each(EVIL)))), Page(render(Report("t", **one_of_each())))
    assert [tag for tag, _ in page.elements] == [tag for tag, _ in plain.elements]
    assert [set(attributes) for _, attributes in page.elements] == [set(attributes) for _, attributes in plain.elements]
    assert len(page.scripts) == 1
    assert EVIL in [row["name"] for data in page.data if data["kind"] == "rows" for row in data["rows"]]
    # Title, heading, link of the table, its heading, its note, facts, finding and so on, each in full.
    assert sum(EVIL in word for word in page.words) > 12


def test_the_file_needs_nothing_else() -> None:
    text = render(sample())
    assert set(re.findall(r"https?://[^\s\"'<]+", text)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert "@import" not in text
    assert "url(" not in text
    page = Page(text)
    assert all("src" not in attributes and "style" not in attributes for _, attributes in page.elements)
    assert all((attributes.get("href") or "#").startswith("#") for _, attributes in page.elements)
    assert page.count("link") == 0


def test_the_policy_allows_the_script_and_no_other() -> None:
    page = Page(render(sample()))
    (policy,) = [a["content"] for tag, a in page.elements if tag == "meta" and "http-equiv" in a]
    digest = base64.b64encode(hashlib.sha256(page.scripts[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in (policy or "")
    assert "unsafe" not in (policy or "")


def test_long_lists_of_layers_are_opened_on_demand() -> None:
    def layers(number: int) -> Page:
        bars = [Histogram(f"layer.{i}", "weight", [0, 1], [1]) for i in range(number)]
        rows = [{"layer": f"layer.{i}", "tensor": "weight", "snr_db": float(i)} for i in reversed(range(number))]
        return Page(render(Report("t", histograms=bars, noise=rows)))

    assert layers(12).count("details") == 0
    many = layers(60)
    assert many.count("details") == 1
    assert "48 more" in many.words
    (noise,) = [data for data in many.data if data["kind"] == "rows"]
    assert [row["name"] for row in noise["rows"]] == [f"layer.{i}" for i in range(40)]  # the noisiest
    assert sum(tag == "th" and attributes.get("scope") == "row" for tag, attributes in many.elements) == 60


def test_a_long_curve_keeps_its_extremes() -> None:
    y = [math.sin(i / 1000) for i in range(100_000)]
    y[12_345], y[54_321], y[77_777] = 9.0, -9.0, NAN
    (data,) = Page(render(Report("t", curves=[Curve("a", "loss", list(range(100_000)), y)]))).data
    (series,) = data["series"]
    assert len(series["x"]) == len(series["y"]) <= 1002
    assert {9.0, -9.0} <= set(series["y"])
    assert (series["x"][0], series["x"][-1]) == (0, 99_999)
    assert series["x"] == sorted(series["x"])


def test_a_name_keeps_its_colour_from_chart_to_chart() -> None:
    accuracy = [Accuracy(name, 90.0) for name in ("float", "post-training", "quantized")]
    curves = [
        Curve(name, chart, [0], [1.0]) for chart in ("loss", "rate") for name in ("lr", "quantized", "float", "b")
    ]
    report = Report("t", accuracy=accuracy, curves=curves)
    dots, loss, rate = Page(render(report)).data
    assert [row["marks"][0]["tone"] for row in dots["rows"]] == [0, 1, 2]
    for data in (loss, rate):
        assert [(series["name"], series["tone"]) for series in data["series"]] == [
            ("lr", 1), ("quantized", 2), ("float", 0), ("b", 3),
        ]  # fmt: skip


@pytest.mark.parametrize("ste", SteKind)
def test_the_picture_of_a_rule_is_what_it_computes(ste: SteKind) -> None:
    forward, gradient = Page(render(Report("t", rules=[ste.name, ste.value]))).data  # one rule, by two spellings
    (staircase, _), (dx,) = forward["series"], gradient["series"]
    assert sorted(set(staircase["y"])) == [step / 2 for step in range(-4, 4)]
    at = dict(zip(dx["x"], dx["y"], strict=True))
    lo, hi = forward["band"]
    assert (lo, hi) == (-2, 1.5)
    wanted = {
        SteKind.IDENTITY: (1, 1, 1),
        SteKind.CLIPPED_IDENTITY: (0, 0, 1),
        SteKind.IN_RANGE: (0, 1, 1),
        SteKind.TANH: (1 - math.tanh(4.8) ** 2, 1 - math.tanh(3.2) ** 2, 1 - math.tanh(2) ** 2),
        SteKind.HARD_TANH: (0, 0, 1 - 1 / 1.5),
    }[ste]
    assert (at[-2.4], at[1.6], at[1.0]) == pytest.approx(wanted, rel=1e-4)


def test_numbers_of_a_column_have_one_precision() -> None:
    rows = [["a.b_c", 1, 97.4, 1e-7, True], ["b", 20_000, 0.025, 0.25, False], ["c", None, None, None, True]]
    words = Page(render(Report("t", tables=[Table("s", list("vwxyz"), rows)]))).words
    cells = [word for word in words if word.strip()]
    start = cells.index("z") + 1
    assert cells[start : start + 7] == ["a.", "b_", "c", "1", "97.400", "1e-07", "yes"]
    assert cells[start + 7 : start + 12] == ["b", "20,000", "0.025", "0.25", "no"]


def test_a_histogram_says_what_its_grid_holds() -> None:
    bars = Histogram("l", "weight", [-3, -2, -1, 0, 1, 2], [1, 2, 3, 4, 10], 1.0, 0, -2, 1, [5, 0, 5, 10])
    assert (bars.size, bars.in_use, bars.entropy) == (4, 3, 1.5)
    assert bars.beyond == 0  # to half a step outside, 1.5, a value has a code
    assert Histogram("l", "weight", [1, 2, 3], [1, 3], 1.0, 0, -2, 1).beyond == 0.75
    assert Histogram("l", "weight", [1, 2, 3], [1, 3]).beyond is None
    assert Histogram("l", "weight", [1, 2], [0], 1.0, 0, -2, 1, [0, 0, 0, 0]).entropy == 0


def test_verdicts() -> None:
    def words(found: dict[str, Any]) -> str:
        return " ".join(Page(render(Report("t", verification=found))).words)

    assert "The file computes what the model computes." in words({"ok": True})
    assert "does not compute what the model computes. They part at head." in words({"ok": False, "first": "head"})
    assert "One has what the other lacks." in words({"ok": False, "missing": ["an output"]})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Curve("train", "loss", [1, 2], [1]), "curve 'train' has 2 x and 1 y"),
        (lambda: Histogram("l", "weight", [1, 2], [1, 2]), "'l', weight has 2 edges and 2 counts"),
        (lambda: Histogram("l", "weight", [1, 2], [1], 1.0, 0, 0, 3, [1]), "has 1 codes, but 0 to 3 are 4"),
        (lambda: Table("t", ["a", "b"], [[1, 2], [3]]), "table 't' has 2 columns, but one of its rows has 1: "),
        (
            lambda: render(Report("t", rules=["sine"])),
            "rules holds 'sine', but it must hold names of SteKind: identity",
        ),
        (
            lambda: Report.from_dict({"title": "t", "colour": 1}),
            "Report has no key 'colour'; its keys are title, facts",
        ),
        (lambda: Report.from_dict({}), "Report needs the key 'title'"),
        (lambda: Report.from_dict({"title": "t", "sizes": [{"size": 1}]}), "Measure has no key 'size'"),
    ],
)
def test_refusals(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        make()


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write(Report("first"), path)
    with pytest.raises(ValueError, match="rules holds"):
        write(Report("second", rules=["sine"]), path)
    assert "<title>first</title>" in path.read_text("utf-8")
    write(Report("third ∞"), str(path))
    assert "<title>third ∞</title>" in path.read_text("utf-8")
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
