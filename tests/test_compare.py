"""Each comparison fails when it should."""

from __future__ import annotations

import math

import pytest
import torch

import oracle
from compare import assert_codes, assert_gradient, assert_same_bits
from lowbit import Grid, PerTensor

ONE = torch.ones(3)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (ONE, ONE.double()),
        (ONE, torch.ones(3, 1)),
        (ONE, torch.tensor([1.0, 1.0, 1.0 + 2**-23])),
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([math.nan]), torch.tensor([0.0])),
    ],
)
def test_same_bits_fails(actual: torch.Tensor, expected: torch.Tensor) -> None:
    with pytest.raises(AssertionError):
        assert_same_bits(actual, expected)


def test_same_bits_takes_any_nan() -> None:
    assert_same_bits(torch.tensor([math.nan, 1.0]), torch.tensor([-math.nan, 1.0]))


@pytest.mark.parametrize("wrong", [[0.0, 2.0, 1.0], [0.0, 1.0, 3.0], [math.nan, 1.0, 1.0]])
def test_codes_fails(wrong: list[float]) -> None:
    x = torch.tensor([0.0, 0.5, 0.25])  # codes 0, 1 and a tie between 0 and 1
    expected = oracle.quantize(x, torch.tensor(0.5), None, Grid(8), PerTensor())
    assert_codes(torch.tensor([0.0, 1.0, 1.0]), expected, 1e-7)
    with pytest.raises(AssertionError):
        assert_codes(torch.tensor(wrong), expected, 1e-7)


@pytest.mark.parametrize("wrong", [[1.0, 1.0], [0.0, 1.0 + 1e-5], [0.0, math.nan]])
def test_gradient_fails(wrong: list[float]) -> None:
    expected, margin, v = torch.tensor([0.0, 1.0]).double(), torch.tensor([1.0, math.inf]), torch.tensor([2.0, 1.0])
    assert_gradient(expected, expected, margin, v, 1e-7, torch.full((2,), 1e-6))
    with pytest.raises(AssertionError):
        assert_gradient(torch.tensor(wrong), expected, margin, v, 1e-7, torch.full((2,), 1e-6))
