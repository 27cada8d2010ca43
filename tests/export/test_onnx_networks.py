"""Whole networks as files: what verify says of them, with batches of any length, and in a process without torch."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch.utils._pytree import tree_map

import lowbit
from exporting import STYLES, assert_equal_throughout, exported, nodes, verified
from lowbit.flow import call
from models.networks import ALL, Case

PRESETS = lowbit.recipes.presets()
# Networks of linear layers, convolutions, ReLU, pooling and sums: with integers, not a bit may differ.
PLAIN = ("resnet", "mobilenet", "efficientnet", "inception", "in_place", "twice")
TRAINED = ("efficientnet", "minilm")
# Four in both styles; the others as integers alone, and each other preset once in each style, for time.
BOTH = ("resnet", "efficientnet", "minilm", "gpt2")
OTHERS = [preset for preset in PRESETS if preset != "w8a8"]
CASES = [
    *((name, "w8a8", style) for name in ALL for style in (STYLES if name in BOTH else ["integer"])),
    *(("resnet", preset, STYLES[number % 2]) for number, preset in enumerate(OTHERS)),
    *(("gpt2", preset, STYLES[1 - number % 2]) for number, preset in enumerate(OTHERS)),
]


@functools.cache
def ready(name: str, preset: str) -> tuple[Any, Case]:
    """Trained for three steps: without a bias, sums of codes lie on rounding boundaries, and go either way in float"""
    torch.manual_seed(0)
    case = ALL[name]()
    model: Any = lowbit.prepare(case.model, PRESETS[preset](), case.batch)
    if name not in TRAINED:
        sgd = torch.optim.SGD(model.train().parameters(), 0.05)
        for _ in range(3):
            sgd.zero_grad()
            case.loss(call(model, case.batch)).backward()
            sgd.step()
    lowbit.calibrate(model.eval(), [case.batch])
    return model, case


@pytest.mark.parametrize(("name", "preset", "style"), CASES)
def test_networks(name: str, preset: str, style: str, tmp_path: Path) -> None:
    model, case = ready(name, preset)
    path = tmp_path / "model.onnx"
    any_length = name in BOTH and (preset, style) == ("w8a8", "qdq")  # which takes the exporter longer
    proto = exported(model, case.batch, path, style, dynamic_batch=any_length)
    report = verified(model, path, case.batch)
    if any_length:
        verified(model, path, tree_map(lambda leaf: leaf[:1] if isinstance(leaf, torch.Tensor) else leaf, case.batch))
    if name in PLAIN and style == "integer" and preset != "w4":
        assert_equal_throughout(report)
    assert not report.optimised.error, str(report)
    check_file(proto, path)


def check_file(proto: onnx.ModelProto, path: Path) -> None:
    """What holds for every file."""
    assert [opset.domain for opset in proto.opset_import] == [""]
    assert not nodes(proto, "Dropout", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
    for kind in ("QuantizeLinear", "DequantizeLinear"):
        pairs = Counter((*node.input[:2], *(str(each) for each in node.attribute)) for node in nodes(proto, kind))
        assert not [pair for pair, count in pairs.items() if count > 1], "quantized twice"
    content = path.read_bytes()
    for text in (b"/work", b"site-packages", b"/tmp", b"Traceback", b".py"):
        assert text not in content
