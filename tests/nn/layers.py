"""Every kind of layer, each small, and a batch for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils._pytree import tree_map


def _conv1d_of_transformers() -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    layer = Conv1D(12, 8)
    nn.init.normal_(layer.bias)
    return layer


class Attention(nn.Module):
    """Queries, and a memory that is key and value."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **options)

    def forward(self, query: Tensor, memory: Tensor) -> Any:
        return self.attention(query, memory, memory)


class Bag(nn.EmbeddingBag):
    """Two bags of words."""

    def forward(self, words: Tensor, *rest: Any) -> Tensor:  # type: ignore[override]
        return super().forward(words, torch.tensor([0, 4]))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(8, 12),
    "linear without bias": lambda: nn.Linear(8, 4, bias=False),
    "conv1d": lambda: nn.Conv1d(4, 8, 3, stride=2, padding=1),
    "conv2d": lambda: nn.Conv2d(4, 8, (3, 2), stride=(2, 1), padding=(2, 1), dilation=(1, 2)),
    "conv3d": lambda: nn.Conv3d(4, 8, 2, padding=1, bias=False),
    "same": lambda: nn.Conv2d(4, 8, (2, 4), padding="same", dilation=(3, 1)),
    "valid": lambda: nn.Conv2d(4, 8, 2, padding="valid"),
    "reflect": lambda: nn.Conv2d(4, 8, (3, 4), padding=(1, 2), padding_mode="reflect"),
    "replicate": lambda: nn.Conv3d(4, 8, 2, padding=(1, 0, 2), padding_mode="replicate"),
    "circular": lambda: nn.Conv1d(4, 8, 4, padding="same", padding_mode="circular"),
    "grouped": lambda: nn.Conv2d(4, 8, 2, padding=1, groups=2),
    "depthwise": lambda: nn.Conv2d(4, 8, 3, padding=1, groups=4),
    "conv transpose1d": lambda: nn.ConvTranspose1d(4, 8, 2, stride=2, output_padding=1),
    "conv transpose2d": lambda: nn.ConvTranspose2d(4, 8, 2, stride=2, padding=1),
    "conv transpose3d": lambda: nn.ConvTranspose3d(4, 8, 2, bias=False),
    "transposed groups": lambda: nn.ConvTranspose2d(4, 8, 2, groups=2),
    "embedding": lambda: nn.Embedding(12, 8, padding_idx=0),
    "bag of sums": lambda: Bag(12, 8, mode="sum"),
    "bag of means": lambda: Bag(12, 8, mode="mean"),
    "bag of maxima": lambda: Bag(12, 8, mode="max"),
    "transformers conv1d": _conv1d_of_transformers,
    "avg pool1d": lambda: nn.AvgPool1d(2, padding=1),
    "avg pool2d": lambda: nn.AvgPool2d((3, 2), stride=(1, 2), padding=1),
    "avg pool3d": lambda: nn.AvgPool3d(2, divisor_override=3),
    "ragged pool": lambda: nn.AvgPool2d(3, padding=1, count_include_pad=False),
    "ceiling pool": lambda: nn.AvgPool2d(4, ceil_mode=True),
    "adaptive pool1d": lambda: nn.AdaptiveAvgPool1d(3),
    "adaptive pool2d": lambda: nn.AdaptiveAvgPool2d((1, None)),
    "adaptive pool3d": lambda: nn.AdaptiveAvgPool3d(2),
    "attention": lambda: Attention(),
    "attention of other widths": lambda: Attention(kdim=8, vdim=8, bias=False, add_bias_kv=True, add_zero_attn=True),
    "rnn": lambda: nn.RNN(8, 4, nonlinearity="relu"),
    "lstm": lambda: nn.LSTM(8, 4, num_layers=2, bidirectional=True, batch_first=True),
    "projected": lambda: nn.LSTM(8, 8, proj_size=4, bidirectional=True),
    "gru": lambda: nn.GRU(8, 4, bidirectional=True, bias=False),
    "packed lstm": lambda: nn.LSTM(8, 4, bidirectional=True),
    "packed gru": lambda: nn.GRU(8, 4),
    "rnn cell": lambda: nn.RNNCell(8, 4),
    "lstm cell": lambda: nn.LSTMCell(8, 4),
    "gru cell": lambda: nn.GRUCell(8, 4, bias=False),
}


def batch_of(name: str) -> Any:
    """A batch that the layer of this name takes."""
    if name.startswith("packed"):
        return pack_sequence([torch.randn(length, 8) for length in (3, 5, 2)], enforce_sorted=False)
    if "cell" in name:
        state = torch.randn(3, 4)
        return torch.randn(3, 8), (state, torch.randn(3, 4)) if "lstm" in name else state
    if name.startswith("attention"):
        return torch.randn(2, 5, 8), torch.randn(2, 6, 8)
    if name in ("rnn", "lstm", "gru", "projected", "linear", "linear without bias", "transformers conv1d"):
        return torch.randn(3, 5, 8)
    if name.startswith(("embedding", "bag")):
        return torch.randint(0, 12, (9,))
    dims = {"same": 2, "valid": 2, "reflect": 2, "replicate": 3, "circular": 1, "grouped": 2, "depthwise": 2}
    dims |= {"transposed groups": 2, "ragged pool": 2, "ceiling pool": 2}
    return torch.randn(2, 4, *[6] * (dims[name] if name in dims else int(name[-2])))


def in_dtype(tree: Any, dtype: torch.dtype) -> Any:
    """Modules and float tensors of a tree in another dtype."""

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, PackedSequence):
            return leaf.to(dtype)
        is_float = isinstance(leaf, nn.Module) or (isinstance(leaf, Tensor) and leaf.is_floating_point())
        return leaf.to(dtype) if is_float else leaf

    return tree_map(convert, tree, is_leaf=lambda leaf: isinstance(leaf, PackedSequence))
