from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compare import assert_same_bits
from lowbit import EMA, FakeQuantize
from lowbit.nn.attention import AttentionLayer, QuantMultiheadAttention, disable_fast_path, enable_fast_path
from lowbit.nn.layer import QuantLayer
from lowbit.nn.swap import swap, swap_back
from lowbit.observers import MinMax
from lowbit.scale import PerBatch

EMBED, HEADS, BATCH, LENGTH, SOURCE = 8, 2, 3, 4, 5
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True, "batch_first": True},
    "kdim": {"kdim": 6, "vdim": 10},
    "vdim": {"vdim": 10, "bias": False},
    "all": {"kdim": 6, "vdim": 10, "add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
}
SLOTS = [
    "query_quantizer",
    "key_quantizer",
    "value_quantizer",
    "in_proj_weight_quantizer",
    "scores_query_quantizer",
    "scores_key_quantizer",
    "probability_quantizer",
    "attended_value_quantizer",
]


def fixed_quantizers(module: AttentionLayer) -> dict[str, nn.Module]:
    """Coarse quantizers, each with a scale of its own, so that none can stand in for another."""
    signed = {slot: role != "share" for slot, role in module.slots().items()}
    return {
        slot: FakeQuantize(4, scale=0.11 + 0.007 * number, signed=signed[slot]) for number, slot in enumerate(signed)
    }


def following_quantizers(module: AttentionLayer) -> dict[str, nn.Module]:
    return {slot: FakeQuantize(8, scale_mode=EMA(), signed=role != "share") for slot, role in module.slots().items()}


def attention(dtype: torch.dtype = torch.float64, **config: Any) -> QuantMultiheadAttention:
    module = QuantMultiheadAttention(EMBED, HEADS, dtype=dtype, **config)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "bias" in name:
                parameter.normal_()
    return module


def equip(module: AttentionLayer, quantizers: dict[str, nn.Module]) -> dict[str, nn.Module]:
    module.equip(quantizers)
    return quantizers


def inputs(module: nn.MultiheadAttention, *, grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    dtype = module.out_proj.weight.dtype
    sizes = ((LENGTH, EMBED), (SOURCE, module.kdim), (SOURCE, module.vdim))
    shapes = [(BATCH, n, size) if module.batch_first else (n, BATCH, size) for n, size in sizes]
    return tuple(torch.randn(shape, dtype=dtype).requires_grad_(grad) for shape in shapes)


def masks(kind: str, length: int = LENGTH, source: int = SOURCE, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    padding = torch.arange(source) >= torch.tensor([[source], [source - 1], [source - 2]])
    banned = torch.ones(length, source).triu(1).bool()
    spread = torch.rand(BATCH * HEADS, length, source) < 0.3
    spread[..., 0] = False
    return {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "float padding": {"key_padding_mask": torch.randn(BATCH, source, dtype=dtype)},
        "2d": {"attn_mask": banned},
        "float 2d": {"attn_mask": torch.randn(length, source, dtype=dtype)},
        "3d": {"attn_mask": spread},
        "float 3d": {"attn_mask": torch.randn(BATCH * HEADS, length, source, dtype=dtype)},
        "2d padding": {"attn_mask": banned, "key_padding_mask": padding},
        "3d padding": {"attn_mask": spread, "key_padding_mask": padding},
        "causal": {"attn_mask": banned, "is_causal": True},
        "causal padding": {"attn_mask": banned, "is_causal": True, "key_padding_mask": padding},
    }[kind]


MASKS = [
    "none",
    "padding",
    "float padding",
    "2d",
    "float 2d",
    "3d",
    "float 3d",
    "2d padding",
    "3d padding",
    "causal",
    "causal padding",
]


def compose(
    module: Any, quantizers: dict[str, Any], query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """The output and the shares of every head, batch first, from the formula: one head of one sample at a time."""

    def q(slot: str, x: Tensor) -> Tensor:
        return quantizers[slot](x) if slot in quantizers else x

    once = {id(x): q(f"{name}_quantizer", x) for name, x in (("value", value), ("key", key), ("query", query))}
    query, key, value = (once[id(x)] for x in (query, key, value))
    if not module.batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    if module.in_proj_weight is not None:
        weights = q("in_proj_weight_quantizer", module.in_proj_weight).split(EMBED)
    else:
        weights = [q(f"{name}_proj_weight_quantizer", getattr(module, f"{name}_proj_weight")) for name in "qkv"]
    q_, k_, v_ = (x @ w.T for x, w in zip((query, key, value), weights, strict=True))
    if module.in_proj_bias is not None:
        q_, k_, v_ = (x + b for x, b in zip((q_, k_, v_), module.in_proj_bias.split(EMBED), strict=True))
    batch, length, source = len(query), query.shape[1], key.shape[1]
    mask = torch.zeros(batch, HEADS, length, source, dtype=query.dtype)
    for name, shape in (("key_padding_mask", (batch, 1, 1, source)), ("attn_mask", (-1, HEADS, length, source))):
        if (given := options.get(name)) is not None:
            given = (
                torch.zeros(given.shape).double().masked_fill(given, -math.inf) if given.dtype == torch.bool else given
            )
            mask = mask + (given if given.dim() == 2 and name == "attn_mask" else given.reshape(shape))
    if module.bias_k is not None:
        k_, v_ = (torch.cat([x, b.expand(batch, 1, EMBED)], 1) for x, b in ((k_, module.bias_k), (v_, module.bias_v)))
        mask = F.pad(mask, (0, 1))
    if module.add_zero_attn:
        k_, v_ = (torch.cat([x, torch.zeros(batch, 1, EMBED).to(x)], 1) for x in (k_, v_))
        mask = F.pad(mask, (0, 1))
    if options.get("is_causal") and "key_padding_mask" not in options and not options["need_weights"]:
        mask = torch.full_like(mask, -math.inf).triu(1)  # torch's kernel goes by the hint
    width = EMBED // HEADS
    rows, shares = [], []
    for n in range(batch):
        heads = []
        for head in range(HEADS):
            part = slice(head * width, (head + 1) * width)
            left = q("scores_query_quantizer", q_[n, :, part] / math.sqrt(width))
            right = q("scores_key_quantizer", k_[n, :, part])
            p = q("probability_quantizer", torch.softmax(left @ right.T + mask[n, head], -1))
            shares.append(p)
            heads.append(p @ q("attended_value_quantizer", v_[n, :, part]))
        rows.append(torch.cat(heads, -1))
    output = F.linear(torch.stack(rows), module.out_proj.weight, module.out_proj.bias)
    return output, torch.stack(shares).unflatten(0, (batch, HEADS))


def switch(module: nn.Module, *, enabled: bool, observing: bool) -> None:
    for child in module.modules():
        if isinstance(child, FakeQuantize):
            child.enabled, child.observing = enabled, observing


def gradients(module: nn.Module, output: Tensor, *tensors: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(output.sin().sum(), [*tensors, *module.parameters()], materialize_grads=True))


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
