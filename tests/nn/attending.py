"""Attention written out, and its inputs."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowbit import EMA, FakeQuantize
from lowbit.nn.attention import AttentionLayer, QuantMultiheadAttention

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
