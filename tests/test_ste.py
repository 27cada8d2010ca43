from __future__ import annotations

import json

import pytest

from lowbit import SteKind


@pytest.mark.parametrize("kind", SteKind)
def test_the_value_is_the_lower_case_name_and_round_trips(kind: SteKind) -> None:
    assert kind.value == kind.name.lower()
    assert SteKind(kind.value) is kind
    assert SteKind.from_dict(json.loads(json.dumps(kind.to_dict()))) is kind


def test_the_five_rules() -> None:
    assert [kind.name for kind in SteKind] == ["IDENTITY", "CLIPPED_IDENTITY", "IN_RANGE", "TANH", "HARD_TANH"]
