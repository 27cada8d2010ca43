"""Recurrent layers written out step by step, and their inputs."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence

from lowbit import EMA, FakeQuantize
from lowbit.nn.recurrent import (
    QuantGRU,
    QuantGRUCell,
    QuantLSTM,
    QuantLSTMCell,
    QuantRNN,
    QuantRNNCell,
    RecurrentCell,
)
from lowbit.nn.slots import Slotted

SIZE, HIDDEN, BATCH = 5, 6, 3
LENGTHS = [3, 5, 2]  # out of order, so that packing sorts
CONFIGS: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "rnn": (nn.RNN, {}),
    "relu": (nn.RNN, {"nonlinearity": "relu", "bidirectional": True}),
    "lstm": (nn.LSTM, {}),
    "gru": (nn.GRU, {}),
    "deep rnn": (nn.RNN, {"num_layers": 2, "bidirectional": True, "bias": False}),
    "deep lstm": (nn.LSTM, {"num_layers": 3, "bidirectional": True, "batch_first": True}),
    "deep gru": (nn.GRU, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    "projected": (nn.LSTM, {"proj_size": 4}),
    "deep projected": (nn.LSTM, {"proj_size": 4, "num_layers": 2, "bidirectional": True, "bias": False}),
    "no bias": (nn.GRU, {"bias": False, "batch_first": True}),
}
QUANT = {nn.RNN: QuantRNN, nn.LSTM: QuantLSTM, nn.GRU: QuantGRU}
CELLS: dict[str, tuple[type[nn.RNNCellBase], type[RecurrentCell], dict[str, Any]]] = {
    "rnn": (nn.RNNCell, QuantRNNCell, {}),
    "relu": (nn.RNNCell, QuantRNNCell, {"nonlinearity": "relu", "bias": False}),
    "lstm": (nn.LSTMCell, QuantLSTMCell, {}),
    "gru": (nn.GRUCell, QuantGRUCell, {}),
    "no bias": (nn.GRUCell, QuantGRUCell, {"bias": False}),
}
FORMS = ["padded", "packed", "unbatched"]
Quantizers = dict[str, Any]


def fixed_quantizers(module: Slotted) -> Quantizers:
    """Coarse quantizers, each with a scale of its own, so that none can stand in for another."""
    return {slot: FakeQuantize(8, scale=0.02 + 0.0013 * n) for n, slot in enumerate(module.slots())}


def following_quantizers(module: Slotted) -> Quantizers:
    return {slot: FakeQuantize(8, scale_mode=EMA()) for slot in module.slots()}


def equip(module: Any, quantizers: Quantizers) -> Quantizers:
    module.equip(quantizers)
    return quantizers


def layer(config: str, dtype: torch.dtype = torch.float64, **more: Any) -> Any:
    cls, arguments = CONFIGS[config]
    return QUANT[cls](SIZE, HIDDEN, dtype=dtype, **arguments, **more)


def example(module: Any, form: str, *, with_state: bool = True) -> tuple[Any, Any, list[Tensor]]:
    """An input of that form, initial states, and the tensors among them that take a gradient."""
    dtype = module.weight_ih_l0.dtype
    batch = 1 if form == "unbatched" else BATCH
    x = torch.randn(max(LENGTHS), batch, SIZE, dtype=dtype, requires_grad=True)
    count = module.num_layers * (2 if module.bidirectional else 1)
    widths = [module.proj_size or HIDDEN, HIDDEN] if module.mode == "LSTM" else [HIDDEN]
    states = [(0.5 * torch.randn(count, batch, width, dtype=dtype)).requires_grad_() for width in widths]
    leaves = [x, *states]
    shaped: Any = x.transpose(0, 1) if module.batch_first else x
    if form == "packed":
        shaped = pack_padded_sequence(x, torch.tensor(LENGTHS), enforce_sorted=False)
    elif form == "unbatched":
        shaped, states = x.squeeze(1), [state.squeeze(1) for state in states]
    hx = tuple(states) if module.mode == "LSTM" else states[0]
    return shaped, hx if with_state else None, leaves if with_state else leaves[:1]


def tensors(result: Any) -> list[Tensor]:
    """The output and the states, as tensors."""
    output, states = result
    output = output.data if isinstance(output, PackedSequence) else output
    return [output, *(states if isinstance(states, tuple) else (states,))]


def gradients(module: nn.Module, outputs: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    loss = sum((output.sin().sum() for output in outputs), torch.zeros(()))
    wanted = [*leaves, *module.parameters()]
    return list(torch.autograd.grad(loss, wanted, retain_graph=True, materialize_grads=True))


def switch(module: nn.Module, *, enabled: bool, observing: bool) -> None:
    for child in module.modules():
        if isinstance(child, FakeQuantize):
            child.enabled, child.observing = enabled, observing


def one_step(mode: str, x: Tensor, h: Tensor, states: list[Tensor]) -> list[Tensor]:
    """torch's documented formulas, for one row."""
    if mode == "LSTM":
        i, f, g, o = (x + h).split(HIDDEN)
        c = f.sigmoid() * states[1] + i.sigmoid() * g.tanh()
        return [o.sigmoid() * c.tanh(), c]
    if mode == "GRU":
        r, z = (x + h)[: 2 * HIDDEN].sigmoid().split(HIDDEN)
        n = (x[2 * HIDDEN :] + r * h[2 * HIDDEN :]).tanh()
        return [(1 - z) * n + z * states[0]]
    return [(x + h).tanh() if mode == "RNN_TANH" else (x + h).relu()]


def compose(module: Any, quantizers: Quantizers, x: Tensor, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """One sequence (length, features), states (layers * directions, features): step by step, row by row."""

    def q(slot: str, value: Tensor) -> Tensor:
        return quantizers[slot](value) if slot in quantizers else value

    finals = []
    for number in range(module.num_layers):
        x = q(f"input_quantizer_l{number}" if number else "input_quantizer", x)
        directions = []
        for suffix in ("", "_reverse")[: 1 + module.bidirectional]:
            name = f"_l{number}{suffix}"
            w = {
                part: q(f"weight_{part}{name}_quantizer", getattr(module, f"weight_{part}{name}"))
                for part in (("ih", "hh", "hr") if module.proj_size else ("ih", "hh"))
            }
            b = [getattr(module, f"bias_{part}{name}") if module.bias else 0 for part in ("ih", "hh")]
            state = [initial[len(finals)] for initial in states]
            outputs = []
            for row in x.flip(0) if suffix else x:
                h = w["hh"] @ q(f"hidden_quantizer{name}", state[0]) + b[1]
                state = one_step(module.mode, w["ih"] @ row + b[0], h, state)
                if module.proj_size:
                    state[0] = w["hr"] @ q(f"projection_quantizer{name}", state[0])
                outputs.append(state[0])
            finals.append(state)
            directions.append(torch.stack(outputs).flip(0) if suffix else torch.stack(outputs))
        x = torch.cat(directions, -1)
    return x, [torch.stack(column) for column in zip(*finals, strict=True)]


def compose_all(module: Any, quantizers: Quantizers, form: str, leaves: list[Tensor]) -> list[Tensor]:
    """What ``tensors`` gives, from one sequence at a time."""
    x, *states = leaves
    lengths = LENGTHS if form == "packed" else [max(LENGTHS)] * x.shape[1]
    if not states:
        count = module.num_layers * (2 if module.bidirectional else 1)
        widths = [module.proj_size or HIDDEN, HIDDEN] if module.mode == "LSTM" else [HIDDEN]
        states = [torch.zeros(count, x.shape[1], width, dtype=x.dtype) for width in widths]
    results = [
        compose(module, quantizers, x[:length, n], [state[:, n] for state in states])
        for n, length in enumerate(lengths)
    ]
    finals = [torch.stack(column, 1) for column in zip(*(finals for _, finals in results), strict=True)]
    outputs = [output for output, _ in results]
    if form == "packed":
        return [pack_sequence(outputs, enforce_sorted=False).data, *finals]
    if form == "unbatched":
        return [outputs[0], *(final.squeeze(1) for final in finals)]
    return [torch.stack(outputs, 0 if module.batch_first else 1), *finals]


def copies(module: nn.Module) -> list[Any]:
    return [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
