"""What a study says of its results: rates chosen on held-out data, paired differences, honest words."""

from __future__ import annotations

from statistics import mean, stdev
from typing import Any

import pytest
from scipy import stats

from lowbit.app.analysis import analyse, interval
from lowbit.app.study_config import Case, StudyConfig

CONFIG = StudyConfig(bits=(2,), rules=("clipped_identity", "tanh"), roles=("weight",), rates=(0.01, 0.1), seeds=5)
FLOATS = [{"held_out": 97.0, "test": 96.0 + seed / 10} for seed in range(5)]


def results(tests: dict[str, list[float]], best: float = 0.1) -> dict[tuple[Case, float, int], dict[str, Any]]:
    """Held-out accuracies that favour one rate; the other rate's test accuracy would win, were it looked at."""
    found = {}
    for case in CONFIG.cases():
        for rate in CONFIG.rates:
            for seed, test in enumerate(tests[case.weight_rule]):
                chosen = rate == best
                found[case, rate, seed] = {"held_out": 90.0 if chosen else 80.0, "test": test if chosen else 99.9}
    return found


def test_cases_are_varied_one_at_a_time() -> None:
    config = StudyConfig(bits=(4, 2), rules=("clipped_identity", "tanh"), scales=("learned", "ema"))
    cases = config.cases()
    assert len(cases) == len(set(cases)) == 2 * (1 + 2 + 2)
    base = cases[0]
    assert (base.weight_rule, base.activation_scale) == ("clipped_identity", "learned")
    for case in cases:
        changed = [key for key in case.to_dict() if key != "bits" and getattr(case, key) != getattr(base, key)]
        assert len(changed) <= 1


def test_an_identity_is_no_case() -> None:
    config = StudyConfig(bits=(2,), rules=("clipped_identity", "identity", "tanh"), scales=("per_batch",))
    assert [(case.weight_rule, case.activation_rule) for case in config.cases()] == [
        ("identity", "identity"),
        ("tanh", "identity"),
        ("identity", "tanh"),
    ]


def test_the_rate_is_chosen_on_held_out_data() -> None:
    analysis = analyse(CONFIG, results({"clipped_identity": [90.0] * 5, "tanh": [91.0] * 5}), FLOATS)
    assert [row.rate for row in analysis.rows[2]] == [0.1, 0.1]
    assert [row.test for row in analysis.rows[2]] == [90.0, 91.0]


def test_differences_are_paired() -> None:
    base = [80.0, 90.0, 85.0, 70.0, 95.0]  # seeds differ far more than rules do
    other = [value + 1 + shift for value, shift in zip(base, (0.1, -0.1, 0.0, 0.2, -0.2), strict=True)]
    row = analyse(CONFIG, results({"clipped_identity": base, "tanh": other}), FLOATS).rows[2][1]
    low, high = stats.t.interval(0.95, 4, loc=1.0, scale=stats.sem([1.1, 0.9, 1.0, 1.2, 0.8]))
    assert (row.difference, row.low, row.high) == pytest.approx((1.0, low, high))
    assert row.differs


def test_a_finding_says_no_more_than_the_interval() -> None:
    base = [80.0, 90.0, 85.0, 70.0, 95.0]
    clear = analyse(CONFIG, results({"clipped_identity": base, "tanh": [value - 2.0 for value in base]}), FLOATS)
    assert "At 2 bits TANH for weights loses to it by 2.0 ± 0.0 points." in clear.findings()
    noisy = [value + shift for value, shift in zip(base, (5.0, -5.0, 4.0, -4.0, 1.0), strict=True)]
    unclear = analyse(CONFIG, results({"clipped_identity": base, "tanh": noisy}), FLOATS).findings()
    assert not any("beats" in line or "loses" in line for line in unclear)
    assert any("no difference" in line and "TANH for weights" in line for line in unclear)


def test_more_comparisons_need_more_evidence() -> None:
    values = [1.0, 2.0, 0.5, 1.5, 1.2]
    assert interval(values, 1) == pytest.approx(stats.t.ppf(0.975, 4) * stdev(values) / 5**0.5)
    assert interval(values, 4) > interval(values, 1)


def test_the_best_is_chosen_on_held_out_data() -> None:
    found = results({"clipped_identity": [90.0] * 5, "tanh": [80.0] * 5})
    for (case, _, _), result in found.items():
        result["held_out"] += case.weight_rule == "tanh"
    analysis = analyse(CONFIG, found, FLOATS)
    assert analysis.best.case.weight_rule == "tanh"
    assert analysis.float_test == pytest.approx(mean(result["test"] for result in FLOATS))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"bits": (1,)}, ValueError, "bits is 1, but it must be from 2 to 8"),
        ({"bits": 2}, TypeError, "bits is 2, but it must be a list"),
        ({"rules": ("straight",)}, ValueError, "rules is 'straight', but it must be one of 'identity'"),
        ({"rates": (0.0,)}, ValueError, "rates holds 0, but a rate must be above 0"),
        ({"seeds": 1}, ValueError, "seeds is 1, but it must be at least 2"),
        ({"data": "imagenet"}, ValueError, "data is 'imagenet'"),
        ({"colour": 1}, ValueError, "StudyConfig has no key 'colour'"),
    ],
)
def test_bad_configs_are_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        StudyConfig.from_dict(changes)
