from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

from compare import assert_same_bits
from lowbit import EMA, FakeQuantize, Learned
from lowbit.nn.recurrent import (
    QuantGRU,
    QuantGRUCell,
    QuantLSTM,
    QuantLSTMCell,
    QuantRNN,
    QuantRNNCell,
    RecurrentCell,
    RecurrentLayer,
)
from lowbit.nn.slots import Slotted
from lowbit.nn.swap import swap, swap_back
from lowbit.observers import MinMax
from lowbit.scale import NotCalibratedError, PerBatch

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")

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


@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("config", CONFIGS)
def test_off_is_torch_to_the_bit(config: str, form: str, with_state: bool) -> None:
    cls, arguments = CONFIGS[config]
    dropout = 0.3 if arguments.get("num_layers", 1) > 1 else 0.0
    plain = cls(SIZE, HIDDEN, dropout=dropout, **arguments)
    module = copy.deepcopy(plain)
    swap(module, RecurrentLayer)
    equip(module, following_quantizers(module))
    switch(module, enabled=False, observing=False)
    x, hx, leaves = example(plain, form, with_state=with_state)
    results = []
    for each in (plain, module):
        torch.manual_seed(1)
        outputs = tensors(each(x, hx))
        results.append([*outputs, *gradients(each, outputs, leaves)])
    for actual, expected in zip(results[1], results[0], strict=True):
        assert_same_bits(actual, expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("config", CONFIGS)
def test_disabled_but_observing_is_torch_and_sees_its_data(config: str, form: str) -> None:
    cls, arguments = CONFIGS[config]
    dropout = 0.3 if arguments.get("num_layers", 1) > 1 else 0.0
    plain = cls(SIZE, HIDDEN, dropout=dropout, dtype=torch.float64, **arguments)
    module = copy.deepcopy(plain)
    swap(module, RecurrentLayer)
    quantizers = equip(module, following_quantizers(module))
    switch(module, enabled=False, observing=True)
    x, hx, leaves = example(plain, form)
    results = []
    for each in (plain, module):
        torch.manual_seed(1)
        outputs = tensors(each(x, hx))
        results.append([*outputs, *gradients(each, outputs, leaves)])
    torch.testing.assert_close(results[1], results[0])
    assert all(quantizer.initialized.all() for quantizer in quantizers.values())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("config", CONFIGS)
def test_weights_alone_run_in_torchs_kernel(config: str, form: str) -> None:
    cls, arguments = CONFIGS[config]
    plain = cls(SIZE, HIDDEN, **arguments)
    module = copy.deepcopy(plain)
    swap(module, RecurrentLayer)
    quantizers = {slot: q for slot, q in fixed_quantizers(module).items() if slot.startswith("weight")}
    equip(module, quantizers)
    with torch.no_grad():
        for slot, quantizer in quantizers.items():
            name = slot.removesuffix("_quantizer")
            getattr(plain, name).copy_(quantizer(getattr(plain, name)))
    x, hx, leaves = example(plain, form)
    outputs, expected = tensors(module(x, hx)), tensors(plain(x, hx))
    for one, other in zip(outputs, expected, strict=True):
        assert_same_bits(one, other)
    grads, wanted = gradients(module, outputs, leaves), gradients(plain, expected, leaves)
    for one, other in zip(grads, wanted, strict=True):
        assert_same_bits(one, other)  # nothing was clipped
    held = [getattr(module, name) for name in module._flat_weights_names]
    assert all(one is other for one, other in zip(module._flat_weights, held, strict=True))
    with pytest.raises(RuntimeError):
        module(torch.zeros(2, 2, SIZE + 1))
    assert all(one is other for one, other in zip(module._flat_weights, held, strict=True))
    assert "_holds_quantized" not in module.__dict__


def test_weights_alone_with_parameters_exchanged() -> None:
    module = layer("lstm")
    quantizers = {slot: q for slot, q in fixed_quantizers(module).items() if slot.startswith("weight")}
    equip(module, quantizers)
    x, _, _ = example(module, "padded", with_state=False)
    other = {name: torch.randn_like(parameter) for name, parameter in module.named_parameters()}
    outputs = tensors(torch.func.functional_call(module, other, (x,)))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(other[name])
    torch.testing.assert_close(outputs, compose_all(module, quantizers, "padded", [x]))


def test_steps_with_parameters_of_another_dtype_exchanged() -> None:
    module = layer("lstm")
    equip(module, fixed_quantizers(module))
    x, _, _ = example(module, "padded", with_state=False)
    narrow = {name: parameter.float() for name, parameter in module.named_parameters()}
    output, _ = torch.func.functional_call(module, narrow, (x.float(),))
    assert output.dtype == torch.float32


class _Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@pytest.mark.parametrize("slots", ["weight", ""])
def test_parametrized_weights(slots: str) -> None:
    plain = nn.GRU(SIZE, HIDDEN, dtype=torch.float64)
    module = copy.deepcopy(plain)
    parametrize.register_parametrization(module, "weight_hh_l0", _Twice())
    swap(module, RecurrentLayer)
    quantizers = {slot: q for slot, q in fixed_quantizers(module).items() if slot.startswith(slots)}
    equip(module, quantizers)
    with torch.no_grad():
        plain.weight_hh_l0.mul_(2)
    x, hx, leaves = example(plain, "padded")
    outputs = tensors(module(x, hx))
    torch.testing.assert_close(outputs, compose_all(plain, quantizers, "padded", leaves))


@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("config", CONFIGS)
def test_equals_the_composition(config: str, form: str, with_state: bool) -> None:
    module = layer(config)
    quantizers = equip(module, fixed_quantizers(module))
    x, hx, leaves = example(module, form, with_state=with_state)
    result = module(x, hx)
    outputs, expected = tensors(result), compose_all(module, quantizers, form, leaves)
    torch.testing.assert_close(outputs, expected)
    ours, theirs = gradients(module, outputs, leaves), gradients(module, expected, leaves)
    torch.testing.assert_close(ours, theirs)
    assert all((grad != 0).any() for grad in ours)
    if form == "packed":
        for one, other in zip(result[0][1:], x[1:], strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("config", ["deep projected", "deep gru"])
def test_each_slot_alone_equals_the_composition(config: str) -> None:
    module = layer(config)
    x, hx, leaves = example(module, "padded")
    off = compose_all(module, {}, "padded", leaves)
    for slot, quantizer in fixed_quantizers(module).items():
        quantizers = equip(module, {slot: quantizer})
        outputs = tensors(module(x, hx))
        torch.testing.assert_close(outputs, compose_all(module, quantizers, "padded", leaves))
        assert any((one - other).abs().max() > 1e-4 for one, other in zip(outputs, off, strict=True)), slot


@pytest.mark.parametrize("config", CONFIGS)
def test_packed_is_a_loop_over_the_sequences(config: str) -> None:
    module = layer(config)
    equip(module, fixed_quantizers(module))
    sequences = [torch.randn(length, SIZE, dtype=torch.float64) for length in LENGTHS]
    output, state = module(pack_sequence(sequences, enforce_sorted=False))
    padded, lengths = pad_packed_sequence(output)
    assert lengths.tolist() == LENGTHS
    for n, sequence in enumerate(sequences):
        alone, last = module(sequence)
        torch.testing.assert_close(padded[: len(sequence), n], alone)
        for one, other in zip(
            state if module.mode == "LSTM" else (state,), last if module.mode == "LSTM" else (last,), strict=True
        ):
            torch.testing.assert_close(one[:, n], other)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("config", CONFIGS)
def test_every_quantizer_follows_and_every_weight_learns(config: str, form: str) -> None:
    module = layer(config, torch.float32)
    for make in (following_quantizers, lambda module: {s: FakeQuantize(scale_mode=Learned()) for s in module.slots()}):
        quantizers = equip(module, make(module))
        module.train()
        x, hx, leaves = example(module, form, with_state=False)
        outputs = tensors(module(x, hx))
        assert all(quantizer.initialized.all() for quantizer in quantizers.values())
        grads = gradients(module, outputs, leaves)
        assert all((grad != 0).any() for grad in grads)
        module.eval()
        module(x, hx)


def test_the_hidden_quantizer_takes_statistics_once_for_each_forward() -> None:
    module = layer("lstm")
    quantizers = equip(module, {"hidden_quantizer_l0": FakeQuantize(4, scale_mode=EMA(0.5), observer=MinMax())})
    quantizer = quantizers["hidden_quantizer_l0"]
    x, hx, _ = example(module, "padded")

    def hidden_max() -> Tensor:
        output, _ = module(x, hx)
        return torch.cat([hx[0], output[:-1]]).abs().max()

    quantizer.enabled = quantizer.observing = False
    in_float = hidden_max()
    quantizer.enabled = quantizer.observing = True
    first = hidden_max()
    torch.testing.assert_close(quantizer.scale, (in_float / 7).float())
    assert quantizer.observer.count == max(LENGTHS) * BATCH * HIDDEN
    expected, _ = compose(
        module, {"hidden_quantizer_l0": copy.deepcopy(quantizer).eval()}, x[:, 0], [h[:, 0] for h in hx]
    )
    before = quantizer.scale.clone()
    output, _ = module(x, hx)
    torch.testing.assert_close(output[:, 0], expected)  # with the scale from before
    torch.testing.assert_close(quantizer.scale, (0.5 * before + 0.5 * first / 7).float())
    assert quantizer.observer.count == 2 * max(LENGTHS) * BATCH * HIDDEN
    assert quantizer.enabled
    assert quantizer.observing
    passed: list[bool] = []
    hook = quantizer.register_forward_hook(lambda _, args, output: passed.append(output is args[0]))
    module(x, hx)
    hook.remove()
    assert passed == [False] * max(LENGTHS) + [True]  # what is taken in is not quantized once more
    held = quantizer.scale.clone()
    module.eval()
    module(x, hx)
    module.train()
    quantizer.observing = False
    module(x, hx)
    assert_same_bits(quantizer.scale, held)
    assert quantizer.observer.count == 3 * max(LENGTHS) * BATCH * HIDDEN


def test_a_hidden_state_without_values_needs_no_scale_in_training() -> None:
    module = layer("lstm")
    quantizer = equip(module, {"hidden_quantizer_l0": FakeQuantize(4, scale_mode=EMA())})["hidden_quantizer_l0"]
    x = torch.randn(1, BATCH, SIZE, dtype=torch.float64)
    torch.testing.assert_close(tensors(module(x)), tensors(nn.LSTM.forward(module, x)))
    assert not quantizer.initialized
    with pytest.raises(NotCalibratedError):
        module.eval()(x)


def test_per_batch_quantizers() -> None:
    module = layer("gru")
    quantizers = equip(module, {slot: FakeQuantize(4, scale_mode=PerBatch()) for slot in module.slots()})
    x, hx, _ = example(module, "unbatched")
    expected, final = compose(module, quantizers, x, [hx])
    torch.testing.assert_close(tensors(module(x, hx)), [expected, *final])


def test_weights_are_quantized_once_for_each_forward() -> None:
    module = layer("deep projected")
    quantizers = equip(module, fixed_quantizers(module))
    calls: dict[str, int] = {}
    for slot, quantizer in quantizers.items():
        quantizer.register_forward_hook(lambda *_, slot=slot: calls.update({slot: calls.get(slot, 0) + 1}))
    x, hx, _ = example(module, "padded")
    module(x, hx)
    steps = {slot: max(LENGTHS) if slot.startswith(("hidden", "projection")) else 1 for slot in quantizers}
    # One call more takes all steps in.
    assert calls == {slot: count + (count > 1) for slot, count in steps.items()}


def test_the_input_quantizer_sees_the_tensor_that_came_in() -> None:
    for config in ("deep gru", "rnn"):
        module = layer(config)
        seen: list[Tensor] = []
        equip(module, fixed_quantizers(module))["input_quantizer"].register_forward_pre_hook(
            lambda _, args, seen=seen: seen.append(args[0])
        )
        for form in FORMS:
            x, hx, _ = example(module, form)
            module(x, hx)
            assert seen[-1] is (x.data if form == "packed" else x)


def test_dropout_between_layers() -> None:
    module = layer("deep gru", dropout=0.5)
    quantizers = equip(
        module, {slot: q for slot, q in fixed_quantizers(module).items() if slot != "input_quantizer_l1"}
    )
    x, hx, leaves = example(module, "padded")
    seen: list[Tensor] = []
    watcher = quantizers["input_quantizer_l1"] = FakeQuantize(scale=1e-3, bits=16)
    equip(module, quantizers)
    watcher.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    module(x, hx)
    assert 0.2 < (seen[0] == 0).double().mean() < 0.8
    module.eval()
    output = tensors(module(x, hx))
    assert not (seen[1] == 0).any()
    torch.testing.assert_close(output, compose_all(module, quantizers, "padded", leaves))
    assert module.dropout == 0.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("config", ["rnn", "deep lstm", "deep gru", "projected"])
def test_half_precision(config: str, dtype: torch.dtype) -> None:
    module = layer(config, torch.float32)
    quantizers = equip(module, following_quantizers(module))
    x, _, _ = example(module, "packed", with_state=False)
    wide, _ = module.float_class.forward(module, x)
    with torch.autocast("cpu", dtype):
        output, _ = module(x)
    torch.testing.assert_close(output.data.float(), wide.data, atol=0.05, rtol=0.05)
    module.to(dtype)
    output, _ = module(x._replace(data=x.data.to(dtype)))
    assert output.data.dtype == dtype
    torch.testing.assert_close(output.data.float(), wide.data, atol=0.05, rtol=0.05)
    assert all(quantizer.scale.dtype == torch.float32 for quantizer in quantizers.values())


def copies(module: nn.Module) -> list[Any]:
    return [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]


@pytest.mark.parametrize("config", CONFIGS)
def test_copies_pickles_and_swaps_back(config: str) -> None:
    cls, arguments = CONFIGS[config]
    module: Any = cls(SIZE, HIDDEN, **arguments)
    x, hx, _ = example(module, "padded")
    keys, names, in_float = list(module.state_dict()), sorted(module.__dict__), tensors(module(x, hx))
    swap(module, RecurrentLayer)
    assert type(module) is QUANT[cls]
    equip(module, following_quantizers(module))
    assert [key for key in module.state_dict() if "quantizer" not in key] == keys
    module(x, hx)
    module.eval()
    expected = tensors(module(x, hx))
    for other in copies(module):
        assert type(other) is QUANT[cls]
        assert other._flat_weights[0] is other.weight_ih_l0
        for one, same in zip(tensors(other(x, hx)), expected, strict=True):
            assert_same_bits(one, same)
        other.weight_hh_l0_quantizer.enabled = False
        assert module.weight_hh_l0_quantizer.enabled
    module.train()
    module.strip()
    swap_back(module)
    assert type(module) is cls
    assert (list(module.state_dict()), sorted(module.__dict__)) == (keys, names)
    for one, other in zip(tensors(module(x, hx)), in_float, strict=True):
        assert_same_bits(one, other)


def test_slots() -> None:
    assert layer("rnn").slots() == {
        "input_quantizer": "activation",
        "hidden_quantizer_l0": "activation",
        "weight_ih_l0_quantizer": "weight",
        "weight_hh_l0_quantizer": "weight",
    }
    slots = layer("deep projected").slots()
    assert [slot for slot in slots if "_l1" in slot] == [
        "input_quantizer_l1",
        "hidden_quantizer_l1",
        "projection_quantizer_l1",
        "hidden_quantizer_l1_reverse",
        "projection_quantizer_l1_reverse",
        "weight_ih_l1_quantizer",
        "weight_hh_l1_quantizer",
        "weight_hr_l1_quantizer",
        "weight_ih_l1_reverse_quantizer",
        "weight_hh_l1_reverse_quantizer",
        "weight_hr_l1_reverse_quantizer",
    ]
    module = layer("projected")
    assert module.slot_weight("weight_hr_l0_quantizer") == (module.weight_hr_l0, 0)
    held = FakeQuantize()
    assert QuantLSTM(SIZE, HIDDEN, quantizers={"hidden_quantizer_l0": held}).hidden_quantizer_l0 is held


def test_refusals() -> None:
    module = layer("lstm")
    equip(module, fixed_quantizers(module))
    x, hx, _ = example(module, "padded")
    with pytest.raises(ValueError, match="input has 4 dimensions, but an LSTM takes 3, or 2 without a batch"):
        module(x.unsqueeze(0))
    with pytest.raises(ValueError, match="length 0"):
        module(x[:0])
    with pytest.raises(RuntimeError, match="Expected hidden size"):
        module(x, (hx[0][:, :2], hx[1]))
    with pytest.raises(RuntimeError, match="must be equal to input_size"):
        module(x[..., 1:])
    with pytest.raises(ValueError, match="does not match weight dtype"):
        module(x.float())
    assert module(x[:, :0])[0].shape == (max(LENGTHS), 0, HIDDEN)


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
