"""The parts of a report: plain values, as JSON has them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from lowbit.record import Record

# JSON has no NaN and no infinities; they are None in a report.
Number = float | None


@dataclass(frozen=True)
class Accuracy(Record):
    """Percent of the answers that are right, and the interval it is known to, where that is known"""

    name: str
    value: Number = None
    low: Number = None
    high: Number = None


@dataclass(frozen=True)
class Curve(Record):
    """y over x; curves with the same ``chart`` are drawn in one, which takes the labels of its axes from the first"""

    name: str
    chart: str
    x: list[Number]
    y: list[Number]
    x_label: str = "step"
    y_label: str = ""

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise ValueError(
                f"curve {self.name!r} has {len(self.x)} x and {len(self.y)} y, but it needs as many of both"
            )


@dataclass(frozen=True)
class Histogram(Record):
    """counts[i] values from edges[i] to edges[i + 1]; the grid over them is (q - z) * s, q = quant_min ... quant_max

    ``tensor`` is "weight" or "activation". ``codes`` counts the values that have each code, from quant_min up; None
    where nobody counted. Bins may differ in width: the first and the last may hold all that is far out.

    Without a ``scale`` no grid is drawn. A tensor with many scales has one grid in units of its steps: count x / s, say
    so in ``label``, and give 1 as the scale.
    """

    layer: str
    tensor: str
    edges: list[Number]
    counts: list[int]
    scale: Number = None
    zero_point: float = 0
    quant_min: int = 0
    quant_max: int = 0
    codes: list[int] | None = None
    label: str = "value"

    def __post_init__(self) -> None:
        name = f"the histogram of {self.layer!r}, {self.tensor}"
        if len(self.edges) != len(self.counts) + 1:
            raise ValueError(
                f"{name} has {len(self.edges)} edges and {len(self.counts)} counts, but it needs one edge more"
            )
        if self.codes and len(self.codes) != self.size:
            raise ValueError(
                f"{name} has {len(self.codes)} codes, but {self.quant_min} to {self.quant_max} are {self.size}"
            )

    @property
    def size(self) -> int:
        """The codes of the grid."""
        return self.quant_max - self.quant_min + 1

    @property
    def in_use(self) -> int:
        """The codes that some value has."""
        return sum(count > 0 for count in self.codes or ())

    @property
    def entropy(self) -> float:
        """-sum p log2 p over the codes: the bits that a code tells"""
        counts = [count for count in self.codes or () if count]
        return sum(n / sum(counts) * math.log2(sum(counts) / n) for n in counts)

    @property
    def beyond(self) -> Number:
        """The share of values more than half a step outside the grid, to a bin's width; None without a grid"""
        if not self.scale or not sum(self.counts):
            return None
        low, high = ((q - self.zero_point) * self.scale for q in (self.quant_min - 0.5, self.quant_max + 0.5))
        outside = 0
        for count, left, right in zip(self.counts, self.edges, self.edges[1:], strict=False):
            # An edge that is not finite is outside of every grid.
            if left is None or right is None or not low <= (left + right) / 2 <= high:
                outside += count
        return outside / sum(self.counts)


@dataclass(frozen=True)
class Measure(Record):
    """A size or a time; those of one ``unit`` ("B" or "s", or any other) are drawn together, relative to the first"""

    name: str
    value: Number = None
    unit: str = "B"


@dataclass(frozen=True)
class Table(Record):
    """Rows of text and numbers, one for each column; ``note`` says what they are"""

    title: str
    columns: list[str]
    rows: list[list[Any]]
    note: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"table {self.title!r} has {len(self.columns)} columns, but one of its rows has {len(row)}: {row!r}"
                )
