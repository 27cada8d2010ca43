"""Attention: off it is torch's, on it is its products written out."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compare import assert_same_bits
from lowbit import FakeQuantize
from lowbit.nn.attention import AttentionLayer
from lowbit.nn.swap import swap
from lowbit.scale import PerBatch
from nn.attending import (
    BATCH,
    CONFIGS,
    EMBED,
    HEADS,
    MASKS,
    SLOTS,
    attention,
    compose,
    equip,
    fixed_quantizers,
    following_quantizers,
    gradients,
    inputs,
    masks,
    switch,
)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("kind", ["none", "padding", "float 2d", "3d padding", "causal"])
@pytest.mark.parametrize("config", CONFIGS)
def test_off_is_torch_to_the_bit(config: str, kind: str, need_weights: bool) -> None:
    plain = nn.MultiheadAttention(EMBED, HEADS, dropout=0.2, **CONFIGS[config])
    module = copy.deepcopy(plain)
    swap(module, AttentionLayer)
    equip(module, following_quantizers(module))
    switch(module, enabled=False, observing=False)
    options = masks(kind, dtype=torch.float32) | {"need_weights": need_weights}
    query, key, value = inputs(module, grad=True)
    for training in (True, False):
        results = []
        for each in (plain.train(training), module.train(training)):
            torch.manual_seed(1)
            output, weights = each(query, key, value, **options)
            results.append([output, weights, *gradients(each, output, query, key, value)])
        assert (results[0][1] is None) == (results[1][1] is None)
        for actual, expected in zip(results[1], results[0], strict=True):
            if expected is not None:
                assert_same_bits(actual, expected)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("config", CONFIGS)
def test_disabled_but_observing_is_torch_and_sees_its_data(config: str, need_weights: bool) -> None:
    plain = nn.MultiheadAttention(EMBED, HEADS, dropout=0.2, **CONFIGS[config])
    module = copy.deepcopy(plain)
    swap(module, AttentionLayer)
    quantizers = equip(module, following_quantizers(module))
    switch(module, enabled=False, observing=True)
    query, key, value = inputs(module, grad=True)
    results = []
    for each in (plain, module):
        torch.manual_seed(1)
        output, weights = each(query, key, value, need_weights=need_weights)
        results.append([output, weights, *gradients(each, output, query, key, value)])
    torch.testing.assert_close(results[1], results[0])
    assert_same_bits(results[1][0], results[0][0])
    assert all(quantizer.initialized.all() for quantizer in quantizers.values())


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("config", CONFIGS)
def test_equals_the_composition(config: str, kind: str, need_weights: bool) -> None:
    module = attention(**CONFIGS[config])
    quantizers = equip(module, fixed_quantizers(module))
    query, key, value = inputs(module, grad=True)
    options = masks(kind) | {"need_weights": need_weights}
    output, weights = module(query, key, value, **options)
    expected, shares = compose(module, quantizers, query, key, value, options)
    torch.testing.assert_close(output if module.batch_first else output.transpose(0, 1), expected)
    if need_weights:
        torch.testing.assert_close(weights, shares.mean(1))
        per_head = module(query, key, value, average_attn_weights=False, **options)[1]
        torch.testing.assert_close(per_head, shares)
    else:
        assert weights is None
    ours = gradients(module, output, query, key, value)
    theirs = gradients(module, expected, query, key, value)
    torch.testing.assert_close(ours, theirs)
    assert kind == "causal" or all((grad != 0).any() for grad in ours)  # it may hide bias_k


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("config", CONFIGS)
def test_of_many_bits_is_close_to_torch(config: str, kind: str, need_weights: bool) -> None:
    plain = nn.MultiheadAttention(EMBED, HEADS, dtype=torch.float64, **CONFIGS[config])
    module = copy.deepcopy(plain)
    swap(module, AttentionLayer)
    equip(module, {slot: FakeQuantize(16, scale_mode=PerBatch()) for slot in module.slots()})
    call, options = inputs(plain), masks(kind) | {"need_weights": need_weights}
    for actual, expected in zip(module(*call, **options), plain(*call, **options), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("slot", SLOTS)
def test_each_slot_alone_equals_the_composition(slot: str, need_weights: bool) -> None:
    module = attention()
    quantizers = equip(module, {slot: fixed_quantizers(module)[slot]})
    query, key, value = inputs(module)
    output, _ = module(query, key, value, need_weights=need_weights)
    torch.testing.assert_close(output.transpose(0, 1), compose(module, quantizers, query, key, value, {})[0])
    off = compose(module, {}, query, key, value, {})[0]
    assert (output.transpose(0, 1) - off).abs().max() > 1e-3


@pytest.mark.parametrize("slot", SLOTS)
def test_the_fused_kernel_runs_where_only_projections_are_quantized(slot: str) -> None:
    module = attention()
    equip(module, {slot: fixed_quantizers(module)[slot]})
    fused = F.scaled_dot_product_attention
    with mock.patch.object(F, "scaled_dot_product_attention", side_effect=fused) as kernel:
        module(*inputs(module), need_weights=False)
    assert kernel.call_count == (slot.split("_")[0] in ("query", "key", "value", "in"))


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("config", ["plain", "batch first", "kdim", "zero_attn"])
def test_the_fused_kernel_equals_the_composition(config: str, kind: str) -> None:
    module = attention(**CONFIGS[config])
    projections = {slot: q for slot, q in fixed_quantizers(module).items() if slot in SLOTS[:3] or "weight" in slot}
    equip(module, projections)
    query, key, value = inputs(module)
    options = masks(kind)
    options["need_weights"] = False
    output, _ = module(query, key, value, **options)
    expected, _ = compose(module, projections, query, key, value, options)
    torch.testing.assert_close(output if module.batch_first else output.transpose(0, 1), expected)


@pytest.mark.parametrize("config", ["plain", "batch first", "bias_kv"])
def test_one_tensor_is_quantized_once(config: str) -> None:
    module = attention(**CONFIGS[config])
    quantizers = equip(module, fixed_quantizers(module))
    seen: list[tuple[str, Tensor]] = []
    for slot in ("query_quantizer", "key_quantizer", "value_quantizer"):
        quantizers[slot].register_forward_pre_hook(lambda _, args, slot=slot: seen.append((slot[0], args[0])))
    x, other, third = (torch.randn(BATCH, BATCH, EMBED, dtype=torch.float64) for _ in range(3))
    for call, slots in (
        ((x, x, x), "q"),
        ((x, other, other), "qk"),
        ((x, x, other), "qv"),
        ((x, other, x), "qk"),
        ((x, other, third), "qkv"),
    ):
        seen.clear()
        output, _ = module(*call)
        assert "".join(slot for slot, _ in seen) == slots
        # The very tensor that came in, so that what shares it knows it again.
        assert all(any(tensor is given for given in call) for _, tensor in seen)
        expected, _ = compose(module, quantizers, *call, {})
        torch.testing.assert_close(output if module.batch_first else output.transpose(0, 1), expected)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("config", ["plain", "batch first", "all"])
@pytest.mark.parametrize("kind", ["none", "padding", "2d", "3d"])
def test_without_a_batch(config: str, kind: str, need_weights: bool) -> None:
    module = attention(**CONFIGS[config])
    equip(module, fixed_quantizers(module))
    options = masks(kind)
    if kind == "padding":
        options["key_padding_mask"] = options["key_padding_mask"][1]
    if kind == "3d":
        options["attn_mask"] = options["attn_mask"][:HEADS]
    axis = 0 if module.batch_first else 1
    batched = [x.narrow(axis, 0, 1) for x in inputs(module)]
    output, weights = module(*(x.squeeze(axis) for x in batched), need_weights=need_weights, **options)
    if kind == "padding":
        options["key_padding_mask"] = options["key_padding_mask"].unsqueeze(0)
    expected, expected_weights = module(*batched, need_weights=need_weights, **options)
    torch.testing.assert_close(output, expected.squeeze(axis))
    if need_weights:
        torch.testing.assert_close(weights, expected_weights.squeeze(0))


@pytest.mark.parametrize("config", CONFIGS)
def test_every_quantizer_follows_and_every_weight_learns(config: str) -> None:
    module = attention(torch.float32, **CONFIGS[config])
    quantizers = equip(module, following_quantizers(module))
    output, _ = module(*inputs(module), need_weights=False)
    output.square().sum().backward()
    assert all(quantizer.initialized.all() for quantizer in quantizers.values())
    assert all((parameter.grad != 0).any() for parameter in module.parameters())
    module.eval()
    module(*inputs(module))
