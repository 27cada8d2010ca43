"""Analysis: what the results of a study say, with intervals, and in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from lowbit.app.study_config import ROLES, Case, StudyConfig
from lowbit.export.extra import require

_CONFIDENCE = 0.95
# A difference that is less than this is none, whatever its interval: half of the last digit that is shown.
_NOTHING = 0.05

Results = Mapping[tuple[Case, float, int], Mapping[str, Any]]


@dataclass(frozen=True)
class Row:
    """One case at the rate that was chosen for it: test accuracy in %, and its paired difference from the base

    ``low`` and ``high`` are the ends of the interval of the difference, over seeds, corrected for the number of
    comparisons within its bits (Bonferroni).
    """

    case: Case
    rate: float
    held_out: float
    test: float
    spread: float
    difference: float = 0.0
    low: float = 0.0
    high: float = 0.0

    @property
    def differs(self) -> bool:
        """Whether the interval leaves out 0."""
        return (self.low > 0 or self.high < 0) and abs(self.difference) >= _NOTHING


@dataclass(frozen=True)
class Analysis:
    """The rows of every number of bits, the one they are compared with first; and what they say."""

    float_test: float
    float_spread: float
    seeds: int
    rows: dict[int, list[Row]]

    @property
    def best(self) -> Row:
        """Of the fewest bits, the row with the best held-out accuracy."""
        return max(self.rows[min(self.rows)], key=lambda row: row.held_out)

    def findings(self) -> list[str]:
        """Plain sentences."""
        said = [f"The float network has {self.float_test:.1f} ± {self.float_spread:.1f} % on the test data."]
        for bits, rows in self.rows.items():
            base, others = rows[0], rows[1:]
            lost = self.float_test - base.test
            said.append(
                f"At {bits} bits {_describe(base.case)} has {base.test:.1f} ± {base.spread:.1f} %, "
                f"{abs(lost):.1f} points {'below' if lost >= 0 else 'above'} float."
            )
            said.extend(_compare(bits, row, base) for row in others if row.differs)
            same = [_changed(row.case, base.case) for row in others if not row.differs]
            if same:
                said.append(
                    f"At {bits} bits no difference from it is shown by {self.seeds} seeds for {'; '.join(same)}."
                )
        return said

    def table(self) -> tuple[list[str], list[list[str | float]]]:
        """Columns, and rows of cells."""
        columns = ["bits", "weights", "activations", "rate", "held out %", "test %", "±", "difference", "from", "to"]
        cells: list[list[str | float]] = []
        for bits, rows in self.rows.items():
            for row in rows:
                case = row.case
                weights = f"{case.weight_rule}, {case.weight_scale}"
                activations = f"{case.activation_rule}, {case.activation_scale}"
                figures = (row.rate, row.held_out, row.test, row.spread, row.difference, row.low, row.high)
                cells.append([bits, weights, activations, *(round(figure, 3) for figure in figures)])
        return columns, cells


def analyse(config: StudyConfig, results: Results, floats: Sequence[Mapping[str, float]]) -> Analysis:
    """Choose each case's rate on the held-out data, then compare test accuracies seed by seed."""
    by_bits: dict[int, list[Row]] = {}
    tests: dict[Case, list[float]] = {}
    for case in config.cases():
        rate = max(config.rates, key=lambda rate: mean(_of(results, case, rate, config.seeds, "held_out")))
        tests[case] = _of(results, case, rate, config.seeds, "test")
        held_out = mean(_of(results, case, rate, config.seeds, "held_out"))
        by_bits.setdefault(case.bits, []).append(Row(case, rate, held_out, mean(tests[case]), stdev(tests[case])))
    for bits, rows in by_bits.items():
        base = tests[rows[0].case]
        by_bits[bits] = [rows[0], *(_with_difference(row, tests[row.case], base, len(rows) - 1) for row in rows[1:])]
    float_tests = [result["test"] for result in floats]
    return Analysis(mean(float_tests), stdev(float_tests), config.seeds, by_bits)


def _of(results: Results, case: Case, rate: float, seeds: int, key: str) -> list[float]:
    return [float(results[case, rate, seed][key]) for seed in range(seeds)]


def _with_difference(row: Row, values: list[float], base: list[float], comparisons: int) -> Row:
    differences = [value - other for value, other in zip(values, base, strict=True)]
    middle, half = mean(differences), interval(differences, comparisons)
    return Row(row.case, row.rate, row.held_out, row.test, row.spread, middle, middle - half, middle + half)


def interval(values: Sequence[float], comparisons: int = 1) -> float:
    """t * s / sqrt(n): half of the interval that holds the mean in 95 % of all studies, all comparisons together"""
    scipy_stats = require("scipy.stats", "app")
    tail = (1 - _CONFIDENCE) / 2 / max(comparisons, 1)
    quantile = float(scipy_stats.t.ppf(1 - tail, len(values) - 1))
    return quantile * stdev(values) / math.sqrt(len(values))


def _describe(case: Case) -> str:
    if (case.weight_rule, case.weight_scale) == (case.activation_rule, case.activation_scale):
        return f"{case.weight_rule.upper()} with {case.weight_scale} scales"
    return (
        f"{case.weight_rule.upper()} with {case.weight_scale} scales for weights and {case.activation_rule.upper()} "
        f"with {case.activation_scale} scales for activations"
    )


def _changed(case: Case, base: Case) -> str:
    """What of the case is not as in the base."""
    parts = []
    for role in ROLES:
        rule, scale = getattr(case, f"{role}_rule"), getattr(case, f"{role}_scale")
        if rule != getattr(base, f"{role}_rule"):
            parts.append(f"{rule.upper()} for {role}s")
        if scale != getattr(base, f"{role}_scale"):
            parts.append(f"{scale} scales for {role}s")
    return " and ".join(parts)


def _compare(bits: int, row: Row, base: Row) -> str:
    verb = "beats" if row.difference > 0 else "loses to"
    half = (row.high - row.low) / 2
    return f"At {bits} bits {_changed(row.case, base.case)} {verb} it by {abs(row.difference):.1f} ± {half:.1f} points."
