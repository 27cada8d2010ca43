"""recording: what a model computes on the way, with given codes or its own, and nothing left behind."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import lowbit
from lowbit.export.recording import Given, recording
from verifying import Exports, assert_clean


def test_recording_ends_with_an_error(exported: Exports) -> None:
    model, batch = exported.model("conv")
    converted = lowbit.convert(model)
    with pytest.raises(AssertionError), recording(converted):
        assert_clean(converted)
    with pytest.raises(RuntimeError), recording(converted):
        converted(batch[:, :2])
    assert_clean(converted)
    assert torch.equal(converted(batch), lowbit.convert(model)(batch))


def test_given_codes_go_on_and_own_codes_are_kept(exported: Exports) -> None:
    model, batch = exported.model("mlp")
    converted = lowbit.convert(model)
    with recording(converted) as free, torch.no_grad():
        wanted = converted(batch)
    own = free.calls["2.input_quantizer"][0].codes
    given = {("2.input_quantizer", 0): Given(torch.zeros_like(own.q))}
    with recording(converted, given) as alone, torch.no_grad():
        got = converted(batch)
    assert torch.equal(alone.calls["2.input_quantizer"][0].codes.q, own.q)
    assert not torch.equal(alone.calls["4.input_quantizer"][0].codes.q, free.calls["4.input_quantizer"][0].codes.q)
    assert not torch.equal(got, wanted)
    assert alone.integer == {"0", "2", "4"}
    assert [event if isinstance(event, str) else event.name for event in free.events] == [
        text for layer in "024" for text in (f"{layer}.input_quantizer", layer)
    ]


def test_the_terms_of_a_layer(exported: Exports) -> None:
    """The largest input, quantized, times the largest weight; products of integers have no need of them."""
    model, batch = exported.model("mlp")
    converted: Any = lowbit.convert(model, "float")
    wide = batch.clone()
    wide[0, 0], wide[1, 1] = 1e30, math.inf
    with recording(converted) as run, torch.no_grad():
        converted(wide)
        largest = converted[0].input_quantizer(wide).abs().max() * converted[0].weight_quantizer().abs().max()
    assert list(run.terms) == ["0", "2", "4"]
    assert run.terms["0"] == pytest.approx(float(largest))
    assert run.terms["0"] < 100
    converted = lowbit.convert(model)
    with recording(converted) as run, torch.no_grad():
        converted(batch)
    assert run.terms == {}
