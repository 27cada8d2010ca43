from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

import lowbit.functional as F
from compare import assert_same_bits
from lowbit import EMA, Learned, PerBatch, PerChannel, PerGroup, PerTensor, PerToken, SteKind, recipes
from lowbit.nn.quantizers import Binarize, DoReFaActivation, DoReFaWeight
from lowbit.recipe import QuantSpec, Recipe

PRESETS = recipes.presets()
X = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))


def test_the_names_are_those_promised() -> None:
    assert list(PRESETS) == ["w8a8", "w8a8_dynamic", "w4a8", "w4", "w2a2", "ternary", "binary", "dorefa"]
    public = {name for name, value in vars(recipes).items() if inspect.isfunction(value) and not name.startswith("_")}
    assert {name for name in public if inspect.getmodule(getattr(recipes, name)) is recipes} == {*PRESETS, "presets"}


@pytest.mark.parametrize("name", PRESETS)
def test_round_trips(name: str, tmp_path: Path) -> None:
    recipe = PRESETS[name]()
    assert isinstance(recipe, Recipe)
    assert Recipe.from_toml(recipe.to_toml()) == recipe
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    assert str(recipe) == recipe.to_toml()
    recipe.save(tmp_path / name)
    assert Recipe.load(tmp_path / name) == recipe
    assert PRESETS[name]() == recipe


@pytest.mark.parametrize("name", PRESETS)
def test_the_quantizers_run(name: str) -> None:
    recipe = PRESETS[name]()
    for spec in (recipe.weight, recipe.activation):
        if spec is not None:
            x = X.clone().requires_grad_()
            y = spec.build()(x)
            assert len(y[0].detach().unique()) <= 2**spec.bits * (1 if not isinstance(spec.per, PerGroup) else 2)
            y.sum().backward()
            assert x.grad is not None
            assert x.grad.isfinite().all()


def test_no_two_presets_are_alike() -> None:
    assert len({PRESETS[name]() for name in PRESETS}) == len(PRESETS)


PER_TOKEN = QuantSpec(8, PerToken(), symmetric=True, scale_mode=PerBatch())


@pytest.mark.parametrize(
    ("name", "weight", "activation"),
    [
        ("w8a8", QuantSpec(8, PerChannel(0), narrow=True), QuantSpec(8, symmetric=False, scale_mode=EMA(0.99))),
        ("w8a8_dynamic", QuantSpec(8, PerChannel(0), narrow=True), PER_TOKEN),
        ("w4a8", QuantSpec(4, PerGroup(32)), PER_TOKEN),
        ("w4", QuantSpec(4, PerGroup(32)), None),
        (
            "w2a2",
            QuantSpec(2, PerTensor(), scale_mode=Learned("lsq")),
            QuantSpec(2, PerTensor(), scale_mode=Learned("lsq+", batch_axis=0), signed=None),
        ),
        (
            "ternary",
            QuantSpec(2, narrow=True, scale_mode=PerBatch("mean_abs"), ste=SteKind.IDENTITY),
            PER_TOKEN,
        ),
        ("binary", QuantSpec(1, PerChannel(0), ste=SteKind.IDENTITY, method="binary"), PER_TOKEN),
        ("dorefa", QuantSpec(2, method="dorefa_weight"), QuantSpec(2, method="dorefa_activation")),
    ],
)
def test_what_each_preset_holds(name: str, weight: QuantSpec, activation: QuantSpec | None) -> None:
    assert PRESETS[name]() == Recipe(weight=weight, activation=activation)


def test_ternary_is_bitnets_formula() -> None:
    w = X.clone().requires_grad_()
    y = recipes.ternary().weight.build()(w)
    s = X.abs().mean()
    torch.testing.assert_close(y.detach(), (X / s).round().clamp(-1, 1) * s)
    assert len(y.detach().unique()) == 3
    y.sum().backward()
    assert (w.grad == 1).all()


def test_binary_is_sign_times_mean() -> None:
    built = recipes.binary().weight.build()
    assert isinstance(built, Binarize)
    assert_same_bits(built(X), F.binarize(X, per=PerChannel(0)))


def test_w2a2_activations_follow_the_data_flow() -> None:
    spec = recipes.w2a2().activation
    assert spec.build().quant_range() == (-2, 1)
    assert spec.build(signed=False).quant_range() == (0, 3)


def test_dorefa_takes_its_bits() -> None:
    recipe = recipes.dorefa(weight_bits=3, activation_bits=1)
    weight, activation = recipe.weight.build(), recipe.activation.build()
    assert (type(weight), weight.bits) == (DoReFaWeight, 3)
    assert (type(activation), activation.bits) == (DoReFaActivation, 1)
    with pytest.raises(ValueError, match=r"bits is 1, but .* as recipes\.binary"):
        recipes.dorefa(weight_bits=1)
    with pytest.raises(ValueError, match="bits is 0"):
        recipes.dorefa(activation_bits=0)
