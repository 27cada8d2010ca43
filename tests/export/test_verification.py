"""Verification: the rules by which a file is ok, and the report as a table and as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from lowbit.export.verification import Codes, Layer, Optimised, Output, Probe, Values, Verification
from lowbit.export.verification import Tensor as Line
from lowbit.export.verify import verify
from verifying import Exports

EQUAL = Values(10, 0, 0.0, 0.0, math.inf, 1.0)


def report_of(**fields: Any) -> Verification:
    kept: dict[str, Any] = {
        "path": "m.onnx",
        "style": "qdq",
        "runtime": "1",
        "generated": False,
        "inputs": {},
        "tensors": (),
        "layers": (),
        "outputs": (Output("y", "float32", EQUAL, EQUAL, False),),
        "missing": (),
        "skipped": {},
        "first": "",
        "optimised": Optimised({}, {}, {}),
        "probe": Probe(True),
    }
    return Verification(**{**kept, **fields})


def line(
    name: str = "x", *, differing: int = 0, largest: int = 0, bits: int = 8, exact: bool = False, dtype: str = "float32"
) -> Line:
    codes = Codes(100_000, differing, largest)
    return Line(name, dtype, bits, 1, codes, codes, exact)


def small(*differing: int) -> list[Line]:
    """Tensors of five codes."""
    return [
        Line(f"small {number}", "float32", 8, 1, Codes(5, count, min(count, 1)), Codes(5, count, min(count, 1)), False)
        for number, count in enumerate(differing)
    ]


@pytest.mark.parametrize(
    ("tensors", "bad"),
    [
        ([line()], []),
        ([line(differing=10, largest=1)], []),
        ([line(differing=11, largest=1)], ["x"]),
        ([line(differing=1, largest=2)], ["x"]),
        ([line(differing=1, largest=1, exact=True)], ["x"]),
        ([line(differing=2560, largest=1, bits=16)], []),
        ([line(differing=2561, largest=1, bits=16)], ["x"]),
        ([line(differing=10_000, largest=1, dtype="float16")], []),
        ([line(differing=10_001, largest=1, dtype="float16")], ["x"]),
        ([line(differing=100_000, largest=1, bits=16, dtype="float16")], []),
        (small(1), []),
        (small(2), ["small 0"]),
        ([Line("free only", "float32", 8, 1, Codes(5, 5, 9), Codes(5, 0, 0), True)], []),
        # One share for all codes together, whichever tensors they are of.
        ([line("a"), line("b", differing=20, largest=1)], []),
        ([line("a"), line("b", differing=21, largest=1)], ["b"]),
        ([line("a", differing=9, largest=1), line("b", differing=12, largest=1)], ["b"]),
        ([line("a"), *small(5, 5)], []),
        (small(0, 1, 1), ["small 1", "small 2"]),
        # But not for a larger step, for what is exact, or with codes of finer grids.
        ([line("a"), line("b", differing=1, largest=2)], ["b"]),
        ([line("a"), line("b", differing=1, largest=1, exact=True)], ["b"]),
        ([line("a", bits=16), line("b", differing=11, largest=1)], ["b"]),
    ],
)
def test_the_rule_for_codes(tensors: list[Line], bad: list[str]) -> None:
    report = report_of(tensors=tuple(tensors))
    assert report.ok is (not bad)
    assert [row.split("  ")[0] for row in str(report).splitlines() if row.endswith("<-")] == bad


def test_the_share_of_each_tensor_is_told() -> None:
    report = report_of(tensors=(line("a"), line("b", differing=20, largest=1)))
    assert report.ok
    assert [tensor["alone"]["share"] for tensor in report.to_dict()["tensors"]] == [0.0, 2e-4]
    assert "0.02 %" in str(report)


@pytest.mark.parametrize(
    ("relative", "dtype", "exact", "ok"),
    [
        (0.9e-4, "float32", False, True),
        (1.1e-4, "float32", False, False),
        (0.9e-2, "float16", False, True),
        (1e-9, "float32", True, False),
    ],
)
def test_the_rule_for_values(relative: float, dtype: str, exact: bool, ok: bool) -> None:
    values = dataclasses.replace(EQUAL, differing=1, largest=relative, relative=relative, decibels=80.0)
    assert report_of(layers=(Layer("a", dtype, values, exact),)).ok is ok
    assert report_of(outputs=(Output("y", dtype, EQUAL, values, exact),)).ok is ok
    assert report_of(outputs=(Output("y", dtype, values, EQUAL, exact),)).ok


def test_the_rule_for_outputs() -> None:
    flipped = dataclasses.replace(EQUAL, differing=2, largest=1.0, relative=0.1, decibels=9.0, agreement=0.9)
    report = report_of(outputs=(Output("y", "float32", flipped, EQUAL, False),))
    assert not report.ok
    text = " ".join(str(report).split())
    assert text.startswith("layer by layer the file computes what the model computes, but NOT as a whole")
    assert "argmax agrees on 90 % of the rows" in text
    assert not report_of(missing=("x is in the file, but not in the model",)).ok
    assert report_of(outputs=(Output("i", "int64", EQUAL, flipped, False),)).ok
    assert not report_of(outputs=(Output("i", "int64", flipped, EQUAL, False),)).ok


def test_json(exported: Exports) -> None:
    report = verify(*exported("conv", "integer"))
    data = json.loads(report.to_json())
    assert data == report.to_dict()
    assert data["ok"] is True
    assert data["tensors"][0]["free"] == {"elements": 768, "differing": 0, "largest": 0, "share": 0.0}
    assert data["outputs"][0]["free"]["decibels"] == "inf"
    assert data["inputs"] == {"x": [4, 3, 8, 8]}
    assert {field.name for field in dataclasses.fields(report)} <= set(data)


def test_the_table(exported: Exports) -> None:
    text = str(verify(*exported("conv", "integer")))
    flat = " ".join(text.split())
    assert flat.startswith("the file computes what the model computes: given equal codes before them, all ")
    assert "the outputs are equal to the bit" in flat
    assert "style integer, ONNX Runtime" in flat
    for name in ("conv1.input_quantizer", "add_0.input_quantizer", "linear_0.input_quantizer", "pool", "head"):
        assert sum(line.startswith(f"{name} ") for line in text.splitlines()) == 1
    assert max(map(len, text.splitlines())) <= 120


def test_a_long_table_shows_what_differs() -> None:
    path = ".".join(["encoder", "layers", "attention", "projection"] * 4)
    tensors = tuple(line(f"{path}.{i}.input_quantizer", differing=i == 70, largest=i == 70) for i in range(100))
    layers = tuple(
        Layer(f"{path}.{i}", "float32", dataclasses.replace(EQUAL, differing=int(i == 9)), False) for i in range(60)
    )
    text = str(report_of(tensors=tensors, layers=layers, first=tensors[70].name)).splitlines()
    assert max(map(len, text)) <= 120
    assert [row.split()[0].endswith("projection.70.input_quantizer") for row in text if "input_quantizer" in row] == [
        True
    ]
    assert "and 99 quantized tensors, 9,900,000 codes, without a difference" in text
    assert "and 59 layers whose outputs are equal to the bit" in text
    few = str(report_of(tensors=tensors[:40])).splitlines()
    assert sum("input_quantizer" in row for row in few) == 40
    assert not any("without a difference" in row for row in few)
