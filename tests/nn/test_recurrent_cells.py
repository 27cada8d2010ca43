"""Recurrent cells, as the layers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compare import assert_same_bits
from lowbit import FakeQuantize
from lowbit.nn.recurrent import (
    QuantGRUCell,
    RecurrentCell,
)
from lowbit.nn.swap import swap, swap_back
from nn.recurring import (
    BATCH,
    CELLS,
    HIDDEN,
    SIZE,
    Quantizers,
    copies,
    equip,
    fixed_quantizers,
    following_quantizers,
    gradients,
    one_step,
    switch,
)


def cell(config: str, dtype: torch.dtype = torch.float64) -> Any:
    _, quantized, arguments = CELLS[config]
    return quantized(SIZE, HIDDEN, dtype=dtype, **arguments)


def cell_example(module: Any, *, batched: bool, with_state: bool) -> tuple[Tensor, Any, list[Tensor]]:
    dtype = module.weight_ih.dtype
    shape = (BATCH,) if batched else ()
    count = 2 if isinstance(module, nn.LSTMCell) else 1
    x, *states = (
        torch.randn(*shape, width, dtype=dtype, requires_grad=True) for width in (SIZE, *(HIDDEN for _ in range(count)))
    )
    hx = tuple(states) if count == 2 else states[0]
    return x, hx if with_state else None, [x, *states] if with_state else [x]


def listed(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("config", CELLS)
def test_a_cell_off_is_torch_to_the_bit(config: str, batched: bool, with_state: bool) -> None:
    cls, quantized, arguments = CELLS[config]
    plain = cls(SIZE, HIDDEN, **arguments)
    module: Any = copy.deepcopy(plain)
    swap(module, RecurrentCell)
    assert type(module) is quantized
    quantizers = equip(module, following_quantizers(module))
    x, hx, leaves = cell_example(plain, batched=batched, with_state=with_state)
    expected = listed(plain(x, hx))
    for observing in (False, True):
        switch(module, enabled=False, observing=observing)
        outputs = listed(module(x, hx))
        results = [*outputs, *gradients(module, outputs, leaves)]
        for one, other in zip(results, [*expected, *gradients(plain, expected, leaves)], strict=True):
            if observing:
                torch.testing.assert_close(one, other)
            else:
                assert_same_bits(one, other)
    assert all(q.initialized for slot, q in quantizers.items() if slot != "hidden_quantizer" or with_state)


@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("config", CELLS)
def test_a_cell_equals_the_composition(config: str, batched: bool, with_state: bool) -> None:
    module = cell(config)
    mode = {"rnn": "RNN_TANH", "relu": "RNN_RELU", "lstm": "LSTM"}.get(config, "GRU")
    x, hx, leaves = cell_example(module, batched=batched, with_state=with_state)
    states = leaves[1:] or [torch.zeros(*x.shape[:-1], HIDDEN, dtype=x.dtype)] * 2

    def expected(quantizers: Quantizers) -> list[Tensor]:
        def q(slot: str, value: Tensor) -> Tensor:
            return quantizers[slot](value) if slot in quantizers else value

        w_x, w_h = q("weight_ih_quantizer", module.weight_ih), q("weight_hh_quantizer", module.weight_hh)
        b_x, b_h = (0, 0) if module.bias_ih is None else (module.bias_ih, module.bias_hh)
        step: Callable[..., list[Tensor]] = lambda x, *states: one_step(  # noqa: E731
            mode, w_x @ q("input_quantizer", x) + b_x, w_h @ q("hidden_quantizer", states[0]) + b_h, list(states)
        )
        if not batched:
            return step(x, *states)
        return [torch.stack(column) for column in zip(*map(step, x, *states), strict=True)]

    everything = fixed_quantizers(module)
    for quantizers in (everything, *({slot: q} for slot, q in everything.items())):
        equip(module, quantizers)
        outputs, wanted = listed(module(x, hx)), expected(quantizers)
        torch.testing.assert_close(outputs, wanted)
        grads = gradients(module, outputs, leaves)
        torch.testing.assert_close(grads, gradients(module, wanted, leaves))
        if with_state:
            assert all((grad != 0).any() for grad in grads)
    assert isinstance(module(x, hx), tuple) == (mode == "LSTM")


@pytest.mark.parametrize("config", CELLS)
def test_a_cell_copies_and_swaps_back(config: str) -> None:
    cls, _, arguments = CELLS[config]
    module: Any = cls(SIZE, HIDDEN, **arguments)
    x, hx, _ = cell_example(module, batched=True, with_state=True)
    keys, in_float = list(module.state_dict()), listed(module(x, hx))
    swap(module, RecurrentCell)
    equip(module, fixed_quantizers(module))
    for other in copies(module):
        assert type(other) is type(module)
        for one, same in zip(listed(other(x, hx)), listed(module(x, hx)), strict=True):
            assert_same_bits(one, same)
    module.strip()
    swap_back(module)
    assert list(module.state_dict()) == keys
    for one, other in zip(listed(module(x, hx)), in_float, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("config", CELLS)
def test_a_cell_that_never_gets_a_state_needs_no_hidden_scale(config: str) -> None:
    module = cell(config)
    quantizers = equip(module, following_quantizers(module))
    x, _, _ = cell_example(module, batched=True, with_state=False)
    outputs = listed(module(x))
    assert [slot for slot, q in quantizers.items() if not q.initialized] == ["hidden_quantizer"]
    for one, other in zip(listed(module.eval()(x)), outputs, strict=True):
        assert_same_bits(one, other)


def test_cell_refusals() -> None:
    module = cell("gru")
    equip(module, fixed_quantizers(module))
    x, _, _ = cell_example(module, batched=True, with_state=True)
    with pytest.raises(ValueError, match="input has 3 dimensions, but a cell takes 2, or 1 without a batch"):
        module(x.unsqueeze(0))
    with pytest.raises(ValueError, match=r"hx has shape \(1, 6\), but this input needs \(3, 6\)"):
        module(x, torch.zeros(1, HIDDEN, dtype=torch.float64))
    held = FakeQuantize()
    assert QuantGRUCell(SIZE, HIDDEN, quantizers={"hidden_quantizer": held}).hidden_quantizer is held
