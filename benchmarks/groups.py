"""A linear layer whose weight has scales for groups of a row, by codes and by values, over float's.

    python benchmarks/groups.py [--device cuda] [--seconds 3]

Forward and backward, in turn, in one process, and what is kept between them; codes also where lowbit would take values.
"""

from __future__ import annotations

import argparse
from itertools import product

import torch
from torch import nn

from lowbit import EMA, PerBatch, PerGroup, PerToken, QuantSpec, Recipe, prepare
from lowbit.bench.linear import SHAPES, Layer, run_linear
from lowbit.bench.models import FLOAT, describe_models
from lowbit.nn import linear

INPUTS = {
    "tokens": QuantSpec(bits=8, per=PerToken(), scale_mode=PerBatch()),
    "affine tokens": QuantSpec(bits=8, symmetric=False, signed=True, per=PerToken(), scale_mode=PerBatch()),
    "EMA": QuantSpec(bits=8, symmetric=False, scale_mode=EMA()),
}


def _layer(name: str, group: int, by_codes: bool, compiled: bool) -> Layer:
    weight = QuantSpec(bits=4, per=PerGroup(group), narrow=True)
    recipe = Recipe(weight=weight, activation=INPUTS[name], integer_products=by_codes)

    def quantize(model: nn.Module) -> nn.Module:
        return prepare(model, recipe, inplace=True)

    how = f"{'codes' if by_codes else 'values'}{', compiled' if compiled else ''}"
    return Layer(f"{name}, groups of {group}, {how}", quantize, is_ours=True, compiled=compiled)


def main() -> None:
    """A table for the second of the linear benchmark's shapes on a GPU, for the first on the CPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each way")
    options = parser.parse_args()
    device = torch.device(options.device)
    linear._LEAST = {"cpu": 0, "cuda": 0}
    layers = [Layer(FLOAT, lambda model: model)]
    layers += [_layer(*way, compiled=False) for way in product(INPUTS, (32, 256, 512), (True, False))]
    layers += [_layer("tokens", *way, compiled=True) for way in product((32, 256), (True, False))]
    shape = SHAPES[device.type][device.type == "cuda"]
    for rows in run_linear([shape], layers, device, options.seconds * len(layers)):
        print(describe_models(rows))


if __name__ == "__main__":
    main()
