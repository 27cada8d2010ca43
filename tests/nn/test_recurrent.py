"""Recurrent layers: off they are torch's, on they are their steps written out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

from compare import assert_same_bits
from lowbit import EMA, FakeQuantize, Learned
from lowbit.nn.recurrent import (
    QuantLSTM,
    RecurrentLayer,
)
from lowbit.nn.swap import swap, swap_back
from lowbit.observers import MinMax
from lowbit.scale import NotCalibratedError, PerBatch
from nn.recurring import (
    BATCH,
    CONFIGS,
    FORMS,
    HIDDEN,
    LENGTHS,
    QUANT,
    SIZE,
    compose,
    compose_all,
    copies,
    equip,
    example,
    fixed_quantizers,
    following_quantizers,
    gradients,
    layer,
    switch,
    tensors,
)

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


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
