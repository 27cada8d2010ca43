"""Recipes and networks that tests prepare and convert."""

from __future__ import annotations

import functools

import lowbit
from lowbit import EMA, Learned, PerChannel, PerGroup, PerToken, QuantSpec, Recipe
from models import networks

PRESETS = lowbit.recipes.presets()
ARITHMETICS = ["float", "integer"]
SPECS: dict[str, Recipe] = {
    **{name: PRESETS[name]() for name in ("w8a8", "w4a8", "binary", "dorefa")},
    "learned": Recipe(
        QuantSpec(bits=3, per=PerChannel(0), scale_mode=Learned()),
        QuantSpec(bits=3, symmetric=False, scale_mode=Learned("lsq+")),
    ),
    "groups of 4": Recipe(QuantSpec(bits=3, per=PerGroup(4), scale_mode=EMA()), QuantSpec(bits=7, scale_mode=EMA())),
    "16 bits": Recipe(QuantSpec(bits=16, symmetric=False, per=PerChannel(0)), QuantSpec(bits=16, scale_mode=EMA())),
}
MORE_SPECS: dict[str, Recipe] = {
    **{name: PRESETS[name]() for name in ("w2a2", "ternary", "w8a8_dynamic")},
    "affine": Recipe(
        QuantSpec(bits=6, per=PerChannel(0), symmetric=False), QuantSpec(bits=5, symmetric=False, scale_mode=EMA())
    ),
    "unsigned": Recipe(
        QuantSpec(bits=8, symmetric=False, signed=False), QuantSpec(bits=8, signed=False, scale_mode=EMA())
    ),
    "9 bits": Recipe(QuantSpec(bits=9, per=PerChannel(0)), QuantSpec(bits=12, symmetric=False, scale_mode=EMA())),
    "rows": Recipe(QuantSpec(bits=7, per=PerToken()), QuantSpec(bits=8, per=PerToken(), symmetric=False)),
}
MORE_LAYERS = ("linear", "conv2d", "conv transpose2d", "embedding", "avg pool2d", "attention", "lstm", "gru cell")
LIFE = ["resnet", "gpt2", "lstm", "parametrized", "functional", "encoder", "unet", "reader"]


@functools.cache
def case_of(name: str) -> networks.Case:
    case = networks.ALL[name]()
    if name == "minilm":  # half of its weights are words; as files, in tests/export, it has them all
        case.model.resize_token_embeddings(2000)
        case.batch["input_ids"] %= 2000
    return case
