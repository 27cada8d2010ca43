"""RecurrentLayer, RecurrentCell: RNN, LSTM and GRU with the operands of all their products quantized."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence

from lowbit.nn.context import quantize_only
from lowbit.nn.layer import Quantized
from lowbit.scale_state import ScaleState

# The hidden state, and an LSTM's cell state after it.
State = tuple[Tensor, ...]


def _rnn_tanh(x: Tensor, h: Tensor, state: State) -> State:
    """h' = tanh(W_h h + W_x x)"""
    return (torch.tanh(h + x),)


def _rnn_relu(x: Tensor, h: Tensor, state: State) -> State:
    """h' = relu(W_h h + W_x x)"""
    return (torch.relu(h + x),)


def _lstm(x: Tensor, h: Tensor, state: State) -> State:
    """c' = sigmoid(f) * c + sigmoid(i) * tanh(g),  h' = sigmoid(o) * tanh(c')"""
    i, f, g, o = (h + x).chunk(4, -1)
    cell = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(cell), cell


def _gru(x: Tensor, h: Tensor, state: State) -> State:
    """n = tanh(x_n + r * h_n),  h' = (1 - z) * n + z * h"""
    (x_r, x_z, x_n), (h_r, h_z, h_n) = x.chunk(3, -1), h.chunk(3, -1)
    n = torch.tanh(x_n + torch.sigmoid(h_r + x_r) * h_n)
    return ((state[0] - n) * torch.sigmoid(h_z + x_z) + n,)  # as torch's kernels write it


# One step: the products with the input and with the hidden state, biases added, and the state before -> that after.
_STEPS: dict[str, Callable[[Tensor, Tensor, State], State]] = {
    "RNN_TANH": _rnn_tanh,
    "RNN_RELU": _rnn_relu,
    "LSTM": _lstm,
    "GRU": _gru,
}


class Recurrent(Quantized):
    """What layers and cells have in common: where their quantizers and weights are."""

    def __init__(self, *args: Any, quantizers: Mapping[str, nn.Module | None] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.equip(quantizers or {})

    def slot_weight(self, slot: str) -> tuple[Tensor, int]:
        return getattr(self, slot.removesuffix("_quantizer")), 0

    def _active_roles(self) -> set[str]:
        """The roles of the quantizers that quantize, or take statistics of what they see."""
        return {role for slot, role in self.slots().items() if self.is_active(slot)}

    def _weight(self, name: str) -> Tensor:
        slot = f"{name}_quantizer"
        weight, output_axis = self.slot_weight(slot)
        return self.quantize_weight(slot, weight, output_axis)


class RecurrentLayer(Recurrent):
    """h_t = step(W_x q_x(x_t) + b_x, W_h q_h(h_{t-1}) + b_h),  all W quantized, once for all steps; biases stay float

    The slots of layer k, with ``_reverse`` after them for the other direction:

    - ``input_quantizer`` is q_x of the first layer, ``input_quantizer_l{k}`` of each above it, after dropout; both
      directions take what it gives
    - ``hidden_quantizer_l{k}`` is q_h; the state itself stays as it is
    - ``projection_quantizer_l{k}`` takes what weight_hr multiplies, with proj_size
    - ``weight_ih_l{k}_quantizer``, ``weight_hh_l{k}_quantizer``, ``weight_hr_l{k}_quantizer`` take the weights

    q_h quantizes every step with the scale from before this forward, and takes all steps into its statistics at once,
    at the end: one update for each forward, whatever the length. As long as it has no scale, the steps run with q_h
    off first, to start it. Activation checkpointing runs the steps again with the scale from after the forward.

    A quantizer that is None or disabled is the identity. While nothing is on or observing, this is the parent's
    forward; while only weights are, the parent's with the quantized weights, so in torch's own kernel.
    """

    mode: str
    input_size: int
    num_layers: int
    bias: bool
    batch_first: bool
    dropout: float
    bidirectional: bool
    proj_size: int
    _flat_weights: list[Any]
    _flat_weights_names: list[str]
    _holds_quantized = False

    def slots(self) -> dict[str, str]:
        slots = {}
        for layer in range(self.num_layers):
            slots[_input_slot(layer)] = "activation"
            for suffix in self._suffixes(layer):
                operands = ("hidden", "projection") if self.proj_size else ("hidden",)
                slots.update({f"{operand}_quantizer{suffix}": "activation" for operand in operands})
        weights = [name for name in self._flat_weights_names if name.startswith("weight")]
        return slots | {f"{name}_quantizer": "weight" for name in weights}

    def quantized_forward(self, input: Tensor | PackedSequence, hx: Any = None) -> Any:  # noqa: A002 (torch's own name)
        roles = self._active_roles()
        if not roles:
            return self.float_class.forward(self, input, hx)
        return self._forward_fused(input, hx) if roles == {"weight"} else self._forward_steps(input, hx)

    def _forward_fused(self, input: Any, hx: Any) -> Any:  # noqa: A002
        self._update_flat_weights()
        held = self._flat_weights
        names = zip(self._flat_weights_names, held, strict=True)
        self._flat_weights = [self._weight(name) if name.startswith("weight") else bias for name, bias in names]
        self._holds_quantized = True
        try:
            with warnings.catch_warnings():
                # New weights on every call are never in one piece, and cuDNN makes them so.
                warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
                return self.float_class.forward(self, input, hx)
        finally:
            self._flat_weights = held
            del self._holds_quantized

    def _update_flat_weights(self) -> None:
        """torch's own; where parameters were exchanged, it would put the float weights back."""
        if not (self._holds_quantized or self._is_coded()):
            super()._update_flat_weights()  # type: ignore[misc]

    def _init_flat_weights(self) -> None:
        """torch's own; in the place of a weight that is kept as codes is an empty one, whose dtype torch asks for."""
        if not self._is_coded():
            super()._init_flat_weights()  # type: ignore[misc]
            return
        coded = [self.coded(f"{name}_quantizer") for name in self._flat_weights_names]
        self._flat_weights = [
            getattr(self, name, None) if codes is None else codes.scale.new_empty(0, dtype=codes.dtype)
            for name, codes in zip(self._flat_weights_names, coded, strict=True)
        ]

    def _is_coded(self) -> bool:
        return any(self.coded(f"{name}_quantizer") is not None for name in self._flat_weights_names)

    def _forward_steps(self, input: Any, hx: Any) -> Any:  # noqa: A002
        self._update_flat_weights()
        if isinstance(input, PackedSequence):
            data, batch_sizes, sorted_indices, unsorted_indices = input
            states = self._start(data, hx, batch_sizes, sorted_indices)
            rows = self.quantize("input_quantizer", data)
            rows, finals = self._run(rows, batch_sizes.tolist(), states)
            packed = PackedSequence(rows, batch_sizes, sorted_indices, unsorted_indices)
            return packed, self._hidden([_permute(final, unsorted_indices) for final in finals])
        if input.dim() not in (2, 3):
            raise ValueError(f"input has {input.dim()} dimensions, but an {self.mode} takes 3, or 2 without a batch")
        batch_axis = 0 if self.batch_first else 1
        batched = input if input.dim() == 3 else input.unsqueeze(batch_axis)
        states = self._start(batched, hx, None, None, has_batch=input.dim() == 3)
        batch, length = batched.shape[batch_axis], batched.shape[1 - batch_axis]
        if length == 0:
            raise ValueError("input has length 0, but a sequence needs at least one step")
        x = self.quantize("input_quantizer", input)
        if input.dim() == 3:
            x = (x.transpose(0, 1) if self.batch_first else x).flatten(0, 1)
        rows, finals = self._run(x, [batch] * length, states)
        if input.dim() == 2:
            return rows, self._hidden([final.squeeze(1) for final in finals])
        output = rows.unflatten(0, (length, batch))
        return output.transpose(0, 1) if self.batch_first else output, self._hidden(finals)

    def _start(
        self, data: Tensor, hx: Any, batch_sizes: Tensor | None, order: Tensor | None, *, has_batch: bool = True
    ) -> State:
        """The states before the first step, each (layers * directions, batch, features), in the order of the data"""
        parent: Any = self
        parent.check_input(data, batch_sizes)
        shapes = [parent.get_expected_hidden_size(data, batch_sizes)]
        if self.mode == "LSTM":
            shapes.append(parent.get_expected_cell_size(data, batch_sizes))
        if hx is None:
            return tuple(data.new_zeros(shape) for shape in shapes)
        states = hx if self.mode == "LSTM" else (hx,)
        states = tuple(state if has_batch else state.unsqueeze(1) for state in states)
        for state, shape in zip(states, shapes, strict=True):
            parent.check_hidden_size(state, shape)
        return tuple(_permute(state, order) for state in states)

    def _hidden(self, states: Sequence[Tensor]) -> Tensor | State:
        """The states as the forward returns them."""
        return tuple(states) if self.mode == "LSTM" else states[0]

    def _run(self, x: Tensor, sizes: list[int], states: State) -> tuple[Tensor, list[Tensor]]:
        """All layers, over rows of which the first ``sizes[0]`` are step 0, and so on."""
        finals: list[State] = []
        for layer in range(self.num_layers):
            if layer > 0:
                x = functional.dropout(x, self.dropout) if self.dropout and self.training else x
                x = self.quantize(_input_slot(layer), x)
            outputs = []
            for reverse, suffix in enumerate(self._suffixes(layer)):
                initial = tuple(state[len(finals)] for state in states)
                output, final = self._run_direction(suffix, x, sizes, initial, reverse=bool(reverse))
                outputs.append(output)
                finals.append(final)
            x = torch.cat(outputs, -1) if self.bidirectional else outputs[0]
        return x, [torch.stack(column) for column in zip(*finals, strict=True)]

    def _run_direction(
        self, suffix: str, x: Tensor, sizes: list[int], initial: State, *, reverse: bool
    ) -> tuple[Tensor, State]:
        bias_ih, bias_hh = (getattr(self, f"bias_{name}{suffix}") if self.bias else None for name in ("ih", "hh"))
        weight_hh = self._weight(f"weight_hh{suffix}")
        weight_hr = self._weight(f"weight_hr{suffix}") if self.proj_size else None
        products = functional.linear(x, self._weight(f"weight_ih{suffix}"), bias_ih).split(sizes)
        hidden = _StepQuantizer(self._modules[f"hidden_quantizer{suffix}"])
        projection = _StepQuantizer(self._modules.get(f"projection_quantizer{suffix}"))

        def step(product: Tensor, state: State) -> State:
            state = _STEPS[self.mode](product, functional.linear(hidden(state[0]), weight_hh, bias_hh), state)
            return state if weight_hr is None else (functional.linear(projection(state[0]), weight_hr), *state[1:])

        if hidden.lacks_scale or projection.lacks_scale:
            with torch.no_grad():
                _walk(products, initial, step, reverse=reverse)
            hidden.take_in()
            projection.take_in()
        outputs, final = _walk(products, initial, step, reverse=reverse)
        hidden.take_in()
        projection.take_in()
        return torch.cat(outputs), final

    def _suffixes(self, layer: int) -> tuple[str, ...]:
        return (f"_l{layer}", f"_l{layer}_reverse") if self.bidirectional else (f"_l{layer}",)


class QuantRNN(RecurrentLayer, nn.RNN):
    """h_t = tanh(W_x q_x(x_t) + b_x + W_h q_h(h_{t-1}) + b_h), or relu

    Arguments as of nn.RNN, and ``quantizers`` by their slots (see RecurrentLayer).
    """


class QuantLSTM(RecurrentLayer, nn.LSTM):
    """i, f, g, o = W_x q_x(x_t) + b_x + W_h q_h(h_{t-1}) + b_h

    c_t = sigmoid(f) * c_{t-1} + sigmoid(i) * tanh(g),  h_t = sigmoid(o) * tanh(c_t)

    Arguments as of nn.LSTM, and ``quantizers`` by their slots (see RecurrentLayer).
    """


class QuantGRU(RecurrentLayer, nn.GRU):
    """r, z = sigmoid(W_x q_x(x_t) + b_x + W_h q_h(h_{t-1}) + b_h)

    n = tanh(W_xn q_x(x_t) + b_xn + r * (W_hn q_h(h_{t-1}) + b_hn)),  h_t = (1 - z) * n + z * h_{t-1}

    Arguments as of nn.GRU, and ``quantizers`` by their slots (see RecurrentLayer).
    """


class RecurrentCell(Recurrent):
    """h' = step(q_wx(W_x) q_x(x) + b_x, q_wh(W_h) q_h(h) + b_h)

    The slots are ``input_quantizer`` (q_x), ``hidden_quantizer`` (q_h), ``weight_ih_quantizer`` (q_wx) and
    ``weight_hh_quantizer`` (q_wh). Each call is a forward of its own: q_h takes its statistics at every step
    that is given a state.

    A quantizer that is None or disabled is the identity; with all of them so, and none observing, this is the parent's
    forward.
    """

    hidden_size: int
    nonlinearity: str
    bias_ih: Any
    bias_hh: Any

    def slots(self) -> dict[str, str]:
        operands = {"input_quantizer": "activation", "hidden_quantizer": "activation"}
        return operands | {"weight_ih_quantizer": "weight", "weight_hh_quantizer": "weight"}

    def quantized_forward(self, input: Tensor, hx: Any = None) -> Any:  # noqa: A002 (torch's own name)
        if not self._active_roles():
            return self.float_class.forward(self, input, hx)
        if input.dim() not in (1, 2):
            raise ValueError(f"input has {input.dim()} dimensions, but a cell takes 2, or 1 without a batch")
        shape = (*input.shape[:-1], self.hidden_size)
        is_lstm = isinstance(self, nn.LSTMCell)
        zeros = input.new_zeros(shape)
        state = (zeros, zeros) if hx is None else hx if is_lstm else (hx,)
        for before in state:
            if before.shape != shape:
                raise ValueError(f"hx has shape {tuple(before.shape)}, but this input needs {shape}")
        x = functional.linear(self.quantize("input_quantizer", input), self._weight("weight_ih"), self.bias_ih)
        # Zeros are on every grid, and tell nothing of a scale.
        hidden = zeros if hx is None else self.quantize("hidden_quantizer", state[0])
        h = functional.linear(hidden, self._weight("weight_hh"), self.bias_hh)
        after = _STEPS[self._mode](x, h, state)
        return after if is_lstm else after[0]

    @property
    def _mode(self) -> str:
        if isinstance(self, nn.RNNCell):
            return f"RNN_{self.nonlinearity.upper()}"
        return "LSTM" if isinstance(self, nn.LSTMCell) else "GRU"


class QuantRNNCell(RecurrentCell, nn.RNNCell):
    """h' = tanh(W_x q_x(x) + b_x + W_h q_h(h) + b_h), or relu"""


class QuantLSTMCell(RecurrentCell, nn.LSTMCell):
    """c' = sigmoid(f) * c + sigmoid(i) * tanh(g),  h' = sigmoid(o) * tanh(c')

    i, f, g, o = W_x q_x(x) + b_x + W_h q_h(h) + b_h
    """


class QuantGRUCell(RecurrentCell, nn.GRUCell):
    """h' = (1 - z) * n + z * h,  n = tanh(W_xn q_x(x) + b_xn + r * (W_hn q_h(h) + b_hn))"""


class _StepQuantizer:
    """One quantizer on its way through the steps: it quantizes each of them, and takes them in all at once."""

    def __init__(self, quantizer: Any) -> None:
        self.quantizer = quantizer
        self.observes = quantizer is not None and quantizer.training and quantizer.observing
        self.lacks_scale = self.observes and quantizer.enabled and not _has_scale(quantizer)
        self.seen: list[Tensor] = []

    def __call__(self, x: Tensor) -> Tensor:
        if self.observes:
            self.seen.append(x.detach())
        return x if self.quantizer is None or self.lacks_scale else quantize_only(self.quantizer, x)

    def take_in(self) -> None:
        """Show the quantizer all steps as one tensor; the first time counts."""
        if not self.observes:
            return
        enabled, self.quantizer.enabled = self.quantizer.enabled, False
        try:
            self.quantizer(torch.cat(self.seen))
        finally:
            self.quantizer.enabled = enabled
        self.observes, self.seen = False, []
        # Without a value other than 0 there still is no scale, nor anything to round.
        self.lacks_scale = enabled and not _has_scale(self.quantizer)


def _walk(
    products: Sequence[Tensor], initial: State, step: Callable[[Tensor, State], State], *, reverse: bool
) -> tuple[list[Tensor], State]:
    """The hidden states of all steps, and the last state of every sequence

    The sequences are sorted by length, the longest first: a step has as many rows as there are sequences at that time.
    """
    outputs: list[Tensor] = []
    if reverse:
        rows = products[-1].shape[0]
        state = tuple(part[:rows] for part in initial)
        for product in reversed(products):
            begun, rows = rows, product.shape[0]
            if rows > begun:
                state = tuple(torch.cat([part, first[begun:rows]]) for part, first in zip(state, initial, strict=True))
            state = step(product, state)
            outputs.append(state[0])
        return outputs[::-1], state
    ended: list[State] = []
    state = initial
    for product in products:
        rows = product.shape[0]
        if rows < state[0].shape[0]:
            ended.append(tuple(part[rows:] for part in state))
            state = tuple(part[:rows] for part in state)
        state = step(product, state)
        outputs.append(state[0])
    ended.append(state)
    return outputs, tuple(torch.cat(parts) for parts in zip(*reversed(ended), strict=True))


def _input_slot(layer: int) -> str:
    return f"input_quantizer_l{layer}" if layer else "input_quantizer"


def _permute(state: Tensor, order: Tensor | None) -> Tensor:
    return state if order is None else state.index_select(1, order)


def _has_scale(quantizer: Any) -> bool:
    return not isinstance(quantizer, ScaleState) or quantizer.is_ready
