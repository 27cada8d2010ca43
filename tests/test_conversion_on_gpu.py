"""convert on a GPU: the prepared model's bits in float, and in integers those of the CPU."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map

import lowbit
from compare import assert_same_bits
from converting import assert_same_outputs, prepared, products, run, watch
from models import networks
from nn.layers import LAYERS, batch_of, in_dtype
from preparing import MORE_LAYERS, MORE_SPECS, PRESETS, SPECS

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning"),
]


def moved(tree: Any, device: str) -> Any:
    def move(leaf: Any) -> Any:
        return leaf.to(device) if isinstance(leaf, Tensor | PackedSequence) else leaf

    return tree_map(move, tree, is_leaf=lambda leaf: isinstance(leaf, PackedSequence))


def assert_products_of_the_cpu(model: nn.Module, batch: Any) -> int:
    """Every product of integers has the bits that the same model's has on the CPU; how many there are."""
    integer = lowbit.convert(model).cuda()
    on_cpu = copy.deepcopy(integer).cpu()
    assert products(on_cpu) == products(integer)
    calls = watch(integer)
    run(integer, batch)
    for path, made in calls.items():
        holder: Any = on_cpu.get_submodule(path)
        for *call, result in made:
            with torch.no_grad():
                assert_same_bits(result.cpu(), holder.product(holder, *moved(call, "cpu")))
    return len(calls)


CASES = [(name, spec) for name in LAYERS for spec in SPECS] + [(n, spec) for n in MORE_LAYERS for spec in MORE_SPECS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "spec"), CASES, ids=map("-".join, CASES))
def test_layers(name: str, spec: str, dtype: torch.dtype) -> None:
    if name == "transformers conv1d":
        pytest.importorskip("transformers")
    if name.startswith("bag"):
        pytest.skip("the test's layer makes its offsets on the CPU")
    if dtype == torch.bfloat16:  # which torch does not keep in one piece
        warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
    layer, batch = in_dtype((LAYERS[name](), batch_of(name)), dtype)
    batch = moved(batch, "cuda")
    model = prepared(layer.cuda(), (SPECS | MORE_SPECS)[spec], batch)
    # To the GPU again: what has neither parameters nor state does not tell where it is.
    assert_same_outputs(lowbit.convert(model, "float").cuda(), model, batch)
    assert_products_of_the_cpu(model, batch)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", networks.ALL)
def test_networks(name: str, preset: str) -> None:
    try:
        case = networks.ALL[name]()
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    batch = moved(case.batch, "cuda")
    model = prepared(case.model.cuda(), PRESETS[preset](), batch)
    assert_same_outputs(lowbit.convert(model, "float"), model, batch)
    assert (assert_products_of_the_cpu(model, batch) > 0) == (preset != "w4")


@pytest.mark.parametrize("rows", [1, 7, 16, 17, 40])
@pytest.mark.parametrize("inputs", [1, 5, 8, 33])
@pytest.mark.parametrize("outputs", [1, 6, 8, 65])
def test_shapes_that_the_products_kernel_does_not_take(rows: int, inputs: int, outputs: int) -> None:
    batch = torch.randn(rows, inputs, device="cuda")
    model = prepared(nn.Linear(inputs, outputs).cuda(), lowbit.recipes.w8a8(), batch)
    assert assert_products_of_the_cpu(model, batch) == 1
