"""AttentionLayer: multi-head attention with the operands of all its products quantized."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lowbit.nn.layer import Quantized

# The operands of the two products between queries, keys and values.
_BETWEEN = ("scores_query_quantizer", "scores_key_quantizer", "probability_quantizer", "attended_value_quantizer")
# Where a module keeps the flag that ``disable_fast_path`` changed.
_HELD = "_lowbit_fast_path"


class AttentionLayer(Quantized):
    """y = out_proj(q_p(p) @ q_v(v)),  p = softmax(q_sq(q / sqrt(d)) @ q_sk(k)^T + mask)

    q, k, v = q_in(x) @ q_w(w)^T + b,  of the query, the key and the value, each with its own q_in

    - ``query_quantizer``, ``key_quantizer``, ``value_quantizer`` are q_in. A tensor given as two of the three, or as
      all, is quantized once, by the first of them.
    - ``in_proj_weight_quantizer`` is q_w; with kdim or vdim there are ``q_proj_weight_quantizer``,
      ``k_proj_weight_quantizer`` and ``v_proj_weight_quantizer``.
    - ``scores_query_quantizer`` (q_sq), ``scores_key_quantizer`` (q_sk), ``probability_quantizer`` (q_p) and
      ``attended_value_quantizer`` (q_v) see a tensor of shape (batch * heads, length, ...). bias_k, bias_v and the
      zeros of add_zero_attn are part of k and v by then. Dropout comes after q_p, so that p stays between 0 and 1.
    - ``out_proj`` is a layer of its own, and is called as one.

    A quantizer that is None or disabled is the identity; with all of them so, out_proj's too, and none observing, this
    is the parent's forward. With need_weights, a row whose keys are all masked is NaN; without, it is 0: as in torch.
    """

    embed_dim: int
    num_heads: int
    head_dim: int
    dropout: float
    batch_first: bool
    add_zero_attn: bool
    in_proj_bias: Any
    bias_k: Any
    bias_v: Any
    out_proj: Any
    _qkv_same_embed_dim: bool

    def __init__(self, *args: Any, quantizers: Mapping[str, nn.Module | None] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.equip(quantizers or {})

    def slots(self) -> dict[str, str]:
        inputs = ("query_quantizer", "key_quantizer", "value_quantizer")
        packed = ("in_proj_weight",)
        weights = packed if self._qkv_same_embed_dim else ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        return {
            **dict.fromkeys(inputs, "activation"),
            **{f"{name}_quantizer": "weight" for name in weights},
            **dict.fromkeys(_BETWEEN, "activation"),
            "probability_quantizer": "share",
        }

    def slot_weight(self, slot: str) -> tuple[Tensor, int]:
        return getattr(self, slot.removesuffix("_quantizer")), 0

    def quantized_forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if not self._is_anything_active():
            options = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
            return self.float_class.forward(self, query, key, value, *options)
        is_batched = self._check(query, key, value, key_padding_mask, attn_mask, is_causal)
        query, key, value = self._take_inputs(query, key, value)
        (length, batch, _), source = query.shape, key.shape[0]
        added = (self.bias_k is not None) + self.add_zero_attn
        # As in torch, the hint then stands for the mask: bias_k and the zeros come last, and are keys like any other.
        causal = is_causal and key_padding_mask is None and not need_weights
        if causal:
            mask: Tensor | None = query.new_full((1, length, source + added), -math.inf).triu(1)
        else:
            mask = self._merge(attn_mask, key_padding_mask, query.dtype, (batch, length, source))
            mask = functional.pad(mask, (0, added)) if mask is not None and added else mask
        q, k, v = (self._split_heads(x) for x in self._project(query, key, value))
        if self.add_zero_attn:
            k, v = functional.pad(k, (0, 0, 0, 1)), functional.pad(v, (0, 0, 0, 1))
        dropout = self.dropout if self.training else 0.0
        if need_weights or any(self.is_on(slot) for slot in _BETWEEN):
            attended, shares = self._attend(q, k, v, mask, dropout, need_weights)
        else:
            if any(self.is_active(slot) for slot in _BETWEEN):
                with torch.no_grad():
                    self._attend(q, k, v, mask, 0.0, need_weights)
            attended, shares = self._attend_fused(q, k, v, mask, dropout, causal, batch), None
        attended = attended.view(batch, self.num_heads, length, self.head_dim)
        if not is_batched:
            attended = attended.squeeze(0).transpose(0, 1)
        else:
            attended = attended.permute(0, 2, 1, 3) if self.batch_first else attended.permute(2, 0, 1, 3)
        output = self.out_proj(attended.flatten(-2))
        if not need_weights or shares is None:
            return output, None
        shares = shares.view(batch, self.num_heads, length, -1)
        shares = shares.mean(1) if average_attn_weights else shares
        return output, shares if is_batched else shares.squeeze(0)

    def _is_anything_active(self) -> bool:
        # The parent's forward reads out_proj's weight, and would pass its quantizers by.
        modules = (self, self.out_proj) if isinstance(self.out_proj, Quantized) else (self,)
        return any(module.is_active(slot) for module in modules for slot in module.slots())

    def _check(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> bool:
        """Whether the tensors have a batch axis, once they fit together."""
        if query.is_nested or key.is_nested or value.is_nested:
            raise ValueError("quantized attention takes no nested tensors; pass padded ones, and a key_padding_mask")
        if is_causal and attn_mask is None:
            raise ValueError(
                "is_causal says that attn_mask is causal, but there is no attn_mask; pass one, such as "
                "nn.Transformer.generate_square_subsequent_mask(length)"
            )
        return functional._mha_shape_check(query, key, value, key_padding_mask, attn_mask, self.num_heads)  # type: ignore[attr-defined]  # noqa: SLF001

    def _take_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The quantized inputs, of shape (length, batch, features); what was one tensor still is."""

        def take(slot: str, x: Tensor) -> Tensor:
            x = self.quantize(slot, x)
            if x.dim() == 2:
                return x.unsqueeze(1)
            return x.transpose(0, 1) if self.batch_first else x

        q = take("query_quantizer", query)
        k = q if key is query else take("key_quantizer", key)
        if value is key or value is query:
            return q, k, k if value is key else q
        return q, k, take("value_quantizer", value)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of shape (length, batch, embed_dim), with bias_k and bias_v at the end of k and v"""
        q: Tensor
        if self._qkv_same_embed_dim:
            weight = self._quantized("in_proj_weight")
            q, k, v = functional._in_projection_packed(query, key, value, weight, self.in_proj_bias)  # type: ignore[attr-defined]  # noqa: SLF001
        else:
            weights = [self._quantized(f"{name}_proj_weight") for name in "qkv"]
            biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
            q, k, v = map(functional.linear, (query, key, value), weights, biases)
        if self.bias_k is not None:
            k, v = (torch.cat([x, bias.repeat(1, x.shape[1], 1)]) for x, bias in ((k, self.bias_k), (v, self.bias_v)))
        return q, k, v

    def _quantized(self, name: str) -> Tensor:
        slot = f"{name}_quantizer"
        weight, output_axis = self.slot_weight(slot)
        return self.quantize_weight(slot, weight, output_axis)

    def _split_heads(self, x: Tensor) -> Tensor:
        length, batch, _ = x.shape
        return x.reshape(length, batch * self.num_heads, self.head_dim).transpose(0, 1)

    def _merge(
        self,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        dtype: torch.dtype,
        sizes: tuple[int, int, int],
    ) -> Tensor | None:
        """Both masks as numbers to add to scores of shape (batch * heads, length, source); an axis may be 1"""
        batch, length, source = sizes
        key_padding_mask = functional._canonical_mask(  # noqa: SLF001
            key_padding_mask,
            "key_padding_mask",
            functional._none_or_dtype(attn_mask),  # noqa: SLF001
            "attn_mask",
            dtype,
        )
        mask = functional._canonical_mask(attn_mask, "attn_mask", None, "", dtype, check_other=False)  # noqa: SLF001
        if mask is not None:
            wanted = (length, source) if mask.dim() == 2 else (batch * self.num_heads, length, source)
            if mask.shape != wanted:
                raise ValueError(f"attn_mask has shape {tuple(mask.shape)}, but this attention needs {wanted}")
            mask = mask.unsqueeze(0) if mask.dim() == 2 else mask
        if key_padding_mask is not None:
            shape = tuple(key_padding_mask.shape)
            if shape not in ((batch, source), (source,)):
                raise ValueError(f"key_padding_mask has shape {shape}, but these keys need {(batch, source)}")
            padding = key_padding_mask.view(batch, 1, 1, source).expand(-1, self.num_heads, -1, -1).flatten(0, 1)
            mask = padding if mask is None else mask + padding
        return mask

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, need_weights: bool
    ) -> tuple[Tensor, Tensor]:
        """q_p(p) @ q_v(v), and q_p(p), both after dropout"""
        q = self.quantize("scores_query_quantizer", q * math.sqrt(1.0 / self.head_dim))
        k = self.quantize("scores_key_quantizer", k).transpose(1, 2)
        scores = torch.bmm(q, k) if mask is None else torch.baddbmm(mask, q, k)
        # torch gives NaN or 0 for a row with nothing to attend to, by which of its kernels runs.
        softmax = torch.softmax if need_weights else torch.ops.aten._safe_softmax  # noqa: SLF001
        shares = self.quantize("probability_quantizer", softmax(scores, -1))
        shares = functional.dropout(shares, dropout) if dropout > 0 else shares
        return torch.bmm(shares, self.quantize("attended_value_quantizer", v)), shares

    def _attend_fused(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool, batch: int
    ) -> Tensor:
        """p @ v, in one kernel"""
        q, k, v = (x.unflatten(0, (batch, self.num_heads)) for x in (q, k, v))
        if causal:
            mask = None
        elif mask is not None:
            mask = mask.unsqueeze(0) if mask.shape[0] == 1 else mask.unflatten(0, (batch, self.num_heads))
        return functional.scaled_dot_product_attention(q, k, v, mask, dropout, causal)


class QuantMultiheadAttention(AttentionLayer, nn.MultiheadAttention):
    """y = out_proj(q_p(p) @ q_v(v)),  p = softmax(q_sq(q / sqrt(d)) @ q_sk(k)^T + mask)

    Arguments as of nn.MultiheadAttention, and ``quantizers`` by their slots (see AttentionLayer).
    """


def disable_fast_path(module: nn.Module) -> None:
    """Keep an nn.TransformerEncoderLayer or nn.TransformerEncoder from the kernels that pass its layers by."""
    name = _fast_path_flag(module)
    if name and _HELD not in module.__dict__:
        setattr(module, _HELD, getattr(module, name))
        setattr(module, name, 0 if name == "activation_relu_or_gelu" else False)


def enable_fast_path(module: nn.Module) -> None:
    """Undo ``disable_fast_path``."""
    name = _fast_path_flag(module)
    if name and _HELD in module.__dict__:
        setattr(module, name, module.__dict__.pop(_HELD))


def _fast_path_flag(module: nn.Module) -> str:
    if isinstance(module, nn.TransformerEncoderLayer):
        return "activation_relu_or_gelu"
    return "use_nested_tensor" if isinstance(module, nn.TransformerEncoder) else ""
