"""Comparisons of codes and of values, each with a case in which it fails."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import lowbit
from lowbit.export import comparison, runtime
from lowbit.export.comparison import compare_codes, compare_values
from lowbit.export.recording import recording
from lowbit.export.verification import Codes, Values
from verifying import Exports


def test_comparisons_of_codes_can_fail() -> None:
    a = np.asarray([0, 255, 7], np.uint8)
    assert compare_codes(a, a.astype(np.int32)) == Codes(3, 0, 0)
    assert compare_codes(a, np.asarray([255, 0, 7], np.uint8)) == Codes(3, 2, 255)
    assert compare_codes(a, np.asarray([0, 254, 7], np.int32)).share == 1 / 3
    assert compare_codes(a[:0], a[:0]) == Codes(0, 0, 0)
    assert Codes(0, 0, 0).share == 0
    assert Codes(2, 1, 1) + Codes(3, 1, 4) == Codes(5, 2, 4)


def test_codes_that_a_file_repeats() -> None:
    few = np.arange(2 * 3 * 4).reshape(2, 3, 4)
    many = few.repeat(2, 1)
    assert np.array_equal(comparison._without_repeats(many, few.shape), few)
    assert comparison._without_repeats(few, few.shape) is few
    many[0, 1, 0] += 1
    assert comparison._without_repeats(many, few.shape) is many
    assert comparison._without_repeats(many, (2, 4, 4)) is many
    assert comparison._without_repeats(many, (2, 24)) is many
    assert comparison._without_repeats(many[:0], few.shape).shape == (0, 6, 4)


def test_which_calls_were_merged_is_found_by_their_codes(exported: Exports) -> None:
    """All begin with zeros, of two quantizers: those of the second run are the ones that the file has dropped."""
    model, path, batch = exported("lstm", "integer")
    file = runtime.File(path)
    converted = lowbit.convert(model)
    with recording(converted) as run, torch.no_grad():
        converted(*batch)
    values = [value for found in file.codes.values() for value in found]
    feeds = {wanted.name: tensor.numpy() for wanted, tensor in zip(file.inputs, batch, strict=True)}
    pairs, missing = comparison.align(run, file, file.run(feeds, values))
    assert missing == []
    for name in ("lstm.hidden_quantizer_l0", "lstm.hidden_quantizer_l0_reverse"):
        assert len(file.codes[name]) == 7
        taken = [pairs[name, number] for number in range(8)]
        assert taken[:4] + taken[5:] == file.codes[name]
        assert taken[4] == taken[0]


def test_comparisons_of_values_can_fail() -> None:
    a = np.asarray([[1.0, 2.0], [4.0, 3.0]], np.float32)
    assert compare_values(a, a) == Values(4, 0, 0.0, 0.0, math.inf, 1.0)
    b = a.copy()
    b[1] = [3.0, 4.0]
    found = compare_values(b, a)
    assert (found.differing, found.largest, found.relative, found.agreement) == (2, 1.0, 0.25, 0.5)
    assert found.decibels == pytest.approx(10 * math.log10(30 / 2))
    nudged = compare_values(np.nextafter(a, np.float32(9)), a)
    assert (nudged.differing, nudged.agreement) == (4, 1.0)
    assert 130 < nudged.decibels < 160


def test_sums_that_cancel_are_as_close_as_their_terms() -> None:
    """s + s - 2 s is 0 in one order, and with a product that is not rounded it is not."""
    a, b = np.asarray([[3e-8, 0.0]], np.float32), np.zeros((1, 2), np.float32)
    assert compare_values(a, b).relative == math.inf
    assert compare_values(a, b, terms=0.5).relative == pytest.approx(6e-8)
    assert compare_values(a, b + 2, terms=0.5).relative == 1.0
    assert compare_values(a, b, terms=0.5).agreement == 1.0


def test_two_values_that_only_the_order_of_a_sum_tells_apart() -> None:
    eps = float(np.finfo(np.float32).eps)
    row = np.asarray([[3.0, 3.0 * (1 + 4 * eps), -1.0]], np.float32)
    assert compare_values(row[:, [1, 0, 2]], row).agreement == 1.0
    row = np.asarray([[3.0, 3.0 * (1 + 16 * eps), -1.0]], np.float32)
    assert compare_values(row[:, [1, 0, 2]], row).agreement == 0.0


def test_values_that_are_no_numbers() -> None:
    a = np.asarray([np.nan, np.inf, -np.inf, 0.0], np.float32)
    assert compare_values(a, a).differing == 0
    assert compare_values(a * np.float32(1), np.asarray([np.nan, np.inf, -np.inf, -0.0], np.float32)).differing == 0
    found = compare_values(a, np.asarray([1.0, np.inf, np.inf, 0.0], np.float32))
    assert (found.differing, found.largest, found.relative, found.decibels) == (2, math.inf, math.inf, -math.inf)
    assert compare_values(np.ones(3), np.zeros(3)).relative == math.inf
    assert compare_values(np.ones(3), np.zeros(3)).decibels == -math.inf
    for empty in (np.zeros((0, 3)), np.zeros((3, 0))):
        assert compare_values(empty, empty) == Values(0, 0, 0.0, 0.0, math.inf, 1.0)
    assert compare_values(np.asarray(1.0), np.asarray(2.0)).agreement == 0.0
    assert compare_values(np.asarray([1, 2, 3, 4]), np.asarray([1, 2, 3, 5])).agreement == 0.75
    assert compare_values(np.asarray([True, False]), np.asarray([True, True])).differing == 1
