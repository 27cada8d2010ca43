from __future__ import annotations

import json

import pytest

from lowbit import Grid


@pytest.mark.parametrize("bits", range(1, 17))
def test_ends(bits: int) -> None:
    assert (Grid(bits, signed=False).quant_min, Grid(bits, signed=False).quant_max) == (0, 2**bits - 1)
    if bits > 1:
        assert (Grid(bits).quant_min, Grid(bits).quant_max) == (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        narrow = Grid(bits, narrow=True)
        assert (narrow.quant_min, narrow.quant_max) == (-(2 ** (bits - 1) - 1), 2 ** (bits - 1) - 1)


@pytest.mark.parametrize("grid", [Grid(8), Grid(1, signed=False), Grid(16, narrow=True)])
def test_json_round_trip(grid: Grid) -> None:
    assert Grid.from_dict(json.loads(json.dumps(grid.to_dict()))) == grid


def test_defaults_may_be_left_out() -> None:
    assert Grid.from_dict({"bits": 4}) == Grid(4)
