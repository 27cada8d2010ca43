"""Attention in its surroundings: dropout, masks, half precision, compile, copies, torch's encoder."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from compare import assert_same_bits
from lowbit import FakeQuantize
from lowbit.nn.attention import AttentionLayer, QuantMultiheadAttention, disable_fast_path, enable_fast_path
from lowbit.nn.layer import QuantLayer
from lowbit.nn.swap import swap, swap_back
from lowbit.observers import MinMax
from lowbit.scale import PerBatch
from nn.attending import (
    BATCH,
    CONFIGS,
    EMBED,
    HEADS,
    LENGTH,
    SLOTS,
    SOURCE,
    attention,
    compose,
    equip,
    fixed_quantizers,
    following_quantizers,
    gradients,
    inputs,
    masks,
)


def test_dropout_comes_after_the_probability_quantizer() -> None:
    module = attention(dropout=0.5)
    quantizers = equip(module, fixed_quantizers(module) | {"probability_quantizer": FakeQuantize(8, signed=False)})
    quantizers["probability_quantizer"].observer = MinMax()
    quantizers["probability_quantizer"].update_params(1 / 255)
    query, key, value = inputs(module)
    torch.manual_seed(3)
    _, weights = module(query, key, value, average_attn_weights=False)
    assert quantizers["probability_quantizer"].observer.high <= 1
    torch.manual_seed(3)
    keep = F.dropout(torch.ones(BATCH * HEADS, LENGTH, SOURCE, dtype=torch.float64), 0.5).unflatten(0, (BATCH, HEADS))
    _, shares = compose(module, quantizers, query, key, value, {})
    assert (keep == 0).any()
    torch.testing.assert_close(weights, shares * keep)
    dropped = module(query, key, value, need_weights=False)[0]
    assert not torch.equal(dropped, module(query, key, value, need_weights=False)[0])
    module.eval()
    assert_same_bits(module(query, key, value)[0], module(query, key, value)[0])


@pytest.mark.parametrize("need_weights", [True, False])
def test_rows_with_every_key_masked(need_weights: bool) -> None:
    plain = nn.MultiheadAttention(EMBED, HEADS)
    module = copy.deepcopy(plain)
    swap(module, AttentionLayer)
    quantizers = equip(module, following_quantizers(module))
    query, key, value = inputs(module, grad=True)
    padding = torch.zeros(BATCH, SOURCE, dtype=torch.bool)
    padding[1] = True
    output, _ = module(query, key, value, key_padding_mask=padding, need_weights=need_weights)
    expected, _ = plain(query, key, value, key_padding_mask=padding, need_weights=need_weights)
    assert torch.equal(output.isnan(), expected.isnan())
    assert output.isnan().any() == need_weights
    assert all(quantizer.scale.isfinite().all() for quantizer in quantizers.values())
    if not need_weights:
        assert all(grad.isfinite().all() for grad in gradients(module, output, query, key, value))


def test_out_proj_is_called_as_a_layer() -> None:
    module = attention(torch.float32)
    swap(module.out_proj, QuantLayer)
    quantizer = FakeQuantize(3, scale_mode=PerBatch())
    module.out_proj.equip({"weight_quantizer": quantizer})
    query, key, value = inputs(module)
    output, _ = module(query, key, value)
    expected, _ = compose(copy.deepcopy(module), {}, query, key, value, {})
    assert (output.transpose(0, 1) - expected).abs().max() > 1e-3
    with torch.no_grad():
        module.out_proj.weight.copy_(quantizer(module.out_proj.weight))
    torch.testing.assert_close(output.transpose(0, 1), compose(module, {}, query, key, value, {})[0])
    quantizer.enabled = quantizer.observing = False
    plain = nn.MultiheadAttention(EMBED, HEADS)
    plain.load_state_dict(module.state_dict(), strict=False)
    assert_same_bits(module(query, key, value)[0], plain(query, key, value)[0])


def test_out_proj_sees_the_layout_of_the_inputs() -> None:
    for batch_first, shape in ((True, (BATCH, LENGTH, EMBED)), (False, (LENGTH, BATCH, EMBED))):
        module = attention(batch_first=batch_first)
        equip(module, fixed_quantizers(module))
        seen = []
        module.out_proj.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].shape))
        module(*inputs(module))
        module(*inputs(module), need_weights=False)
        assert seen == [shape, shape]


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype, need_weights: bool) -> None:
    plain = nn.MultiheadAttention(EMBED, HEADS)
    module = copy.deepcopy(plain)
    swap(module, AttentionLayer)
    quantizers = equip(module, following_quantizers(module))
    query, key, value = inputs(module)
    padding = {"key_padding_mask": masks("padding")["key_padding_mask"], "need_weights": need_weights}
    expected, _ = plain(query, key, value, **padding)
    with torch.autocast("cpu", dtype):
        output, weights = module(query, key, value, **padding)
        torch_output, torch_weights = plain(query, key, value, **padding)
    assert output.dtype == torch_output.dtype
    assert not need_weights or weights.dtype == torch_weights.dtype
    torch.testing.assert_close(output.float(), expected, atol=0.05, rtol=0.05)
    module.to(dtype)
    output, _ = module(query.to(dtype), key.to(dtype), value.to(dtype), **padding)
    assert output.dtype == dtype
    torch.testing.assert_close(output.float(), expected, atol=0.05, rtol=0.05)
    assert all(quantizer.scale.dtype == torch.float32 for quantizer in quantizers.values())


@pytest.mark.parametrize(("need_weights", "backend"), [(True, "aot_eager"), (False, "inductor")])
def test_compiled(need_weights: bool, backend: str) -> None:
    module = attention(torch.float32, batch_first=True)
    equip(module, following_quantizers(module))
    x = torch.randn(BATCH, LENGTH, EMBED, requires_grad=True)
    options = masks("padding", source=LENGTH) | {"need_weights": need_weights}
    module(x, x, x, **options)
    module.eval()
    expected = module(x, x, x, **options)[0]
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    output = compiled(x, x, x, **options)[0]
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(gradients(module, output, x), gradients(module, expected, x))
    compiled.train()
    compiled(x, x, x, **options)[0].sum().backward()


def test_copies_and_pickles() -> None:
    module = attention(torch.float32)
    equip(module, following_quantizers(module))
    call = inputs(module)
    module(*call)
    module.eval()
    expected, _ = module(*call)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    copies = copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(buffer, weights_only=False)
    for other in copies:
        assert type(other) is QuantMultiheadAttention
        assert isinstance(other, nn.MultiheadAttention)
        assert_same_bits(other(*call)[0], expected)
    copies[0].in_proj_weight_quantizer.enabled = False
    assert module.in_proj_weight_quantizer.enabled


@pytest.mark.parametrize("config", CONFIGS)
def test_swaps_there_and_back(config: str) -> None:
    module = nn.MultiheadAttention(EMBED, HEADS, **CONFIGS[config])
    call, keys, names = inputs(module), list(module.state_dict()), sorted(module.__dict__)
    expected, _ = module(*call)
    swap(module, AttentionLayer)
    equip(module, following_quantizers(module))
    assert [key for key in module.state_dict() if "quantizer" not in key] == keys
    assert (module(*call)[0] != expected).any()
    module.strip()
    swap_back(module)
    assert type(module) is nn.MultiheadAttention
    assert (list(module.state_dict()), sorted(module.__dict__)) == (keys, names)
    assert_same_bits(module(*call)[0], expected)


def test_slots() -> None:
    assert list(attention().slots()) == SLOTS
    roles = attention(kdim=6).slots()
    assert [slot for slot, role in roles.items() if role == "weight"] == [
        f"{name}_proj_weight_quantizer" for name in "qkv"
    ]
    assert [slot for slot, role in roles.items() if role == "share"] == ["probability_quantizer"]
    module = attention(kdim=6)
    assert module.slot_weight("k_proj_weight_quantizer") == (module.k_proj_weight, 0)
    held = FakeQuantize()
    assert QuantMultiheadAttention(EMBED, HEADS, quantizers={"key_quantizer": held}).key_quantizer is held


def test_refusals() -> None:
    module = attention()
    equip(module, fixed_quantizers(module))
    query, key, value = inputs(module)
    with pytest.raises(ValueError, match="there is no attn_mask"):
        module(query, key, value, is_causal=True)
    with pytest.raises(ValueError, match=r"attn_mask has shape \(4, 4\), but this attention needs \(4, 5\)"):
        module(query, key, value, attn_mask=torch.zeros(LENGTH, LENGTH))
    with pytest.raises(ValueError, match=r"attn_mask has shape \(1, 4, 5\), but this attention needs \(6, 4, 5\)"):
        module(query, key, value, attn_mask=torch.zeros(1, LENGTH, SOURCE))
    with pytest.raises(ValueError, match=r"key_padding_mask has shape \(3, 4\), but these keys need \(3, 5\)"):
        module(query, key, value, key_padding_mask=torch.zeros(BATCH, LENGTH))
    nested = torch.nested.nested_tensor([torch.zeros(2, EMBED)], layout=torch.jagged)
    with pytest.raises(ValueError, match="no nested tensors"):
        module(nested, nested, nested)


def encoder() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(EMBED, HEADS, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2).eval()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_in_eval_mode_runs_its_quantizers() -> None:
    model = encoder()
    x = torch.randn(BATCH, LENGTH, EMBED)
    padding = masks("padding", source=LENGTH)["key_padding_mask"]
    prepared = copy.deepcopy(model)
    for layer in prepared.layers:
        swap(layer.self_attn, AttentionLayer)
        equip(layer.self_attn, fixed_quantizers(layer.self_attn))
        layer.self_attn.eval()
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=padding)
        passed_by = prepared(x, src_key_padding_mask=padding)
        assert_same_bits(passed_by, expected)  # so this test can see what it is about
        for module in prepared.modules():
            disable_fast_path(module)
            disable_fast_path(module)  # a second time changes nothing
        quantized = prepared(x, src_key_padding_mask=padding)
        assert (quantized - expected)[~padding].abs().max() > 1e-3
        lone = prepared.layers[0](x, src_key_padding_mask=padding)
        assert (lone - model.layers[0](x, src_key_padding_mask=padding))[~padding].abs().max() > 1e-3
        for module in copy.deepcopy(prepared).modules():
            enable_fast_path(module)
        for module in prepared.modules():
            enable_fast_path(module)
            enable_fast_path(module)
        assert_same_bits(prepared(x, src_key_padding_mask=padding), expected)


def test_the_fast_path_is_given_back_as_it_was() -> None:
    layers = [
        nn.TransformerEncoderLayer(EMBED, HEADS, 16, activation=name, batch_first=True) for name in ("relu", "gelu")
    ]
    whole = encoder()
    modules = [*layers, whole, nn.Linear(2, 2)]
    before = [dict(module.__dict__) for module in modules]
    for module in modules:
        disable_fast_path(module)
    assert [layer.activation_relu_or_gelu for layer in layers] == [0, 0]
    assert whole.use_nested_tensor is False
    for module in modules:
        enable_fast_path(module)
    assert [layer.activation_relu_or_gelu for layer in layers] == [1, 2]
    assert [dict(module.__dict__) for module in modules] == before
