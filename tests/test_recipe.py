from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from lowbit import (
    EMA,
    FakeQuantize,
    Fixed,
    Learned,
    PerBatch,
    PerBlock,
    PerChannel,
    PerGroup,
    PerTensor,
    PerToken,
    SteKind,
)
from lowbit.nn.quantizers import Binarize, DoReFaActivation, DoReFaWeight
from lowbit.observers import Histogram, MinMax, MovingAverage
from lowbit.recipe import QuantSpec, Recipe, Rule

SPECS = (
    QuantSpec(),
    QuantSpec(4, PerGroup(32), ste=SteKind.TANH, scale_mode=EMA(0.5), narrow=True),
    QuantSpec(2, PerBlock(2, 3), scale_mode=PerBatch("mean_abs")),
    QuantSpec(8, PerChannel(1), symmetric=False, signed=True, scale_mode=Fixed(), observer={"observer": "min_max"}),
    QuantSpec(scale_mode=Fixed(), observer={"observer": "histogram", "method": "mse", "bins": 128}),
    QuantSpec(2, signed=False, scale_mode=Learned("pact", grad_scale=False, batch_axis=0)),
    QuantSpec(1, PerChannel(0), ste=SteKind.IDENTITY, method="binary"),
    QuantSpec(3, method="dorefa_weight"),
    QuantSpec(1, method="dorefa_activation"),
)
SPEC_IDS = [f"{i}-{spec.method}" for i, spec in enumerate(SPECS)]


def never(path: str, module: nn.Module) -> bool:
    return False


@pytest.mark.parametrize("spec", SPECS, ids=SPEC_IDS)
def test_a_spec_survives_json_and_toml(spec: QuantSpec) -> None:
    assert QuantSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    recipe = Recipe(weight=spec, rules=[Rule("a", output=spec)])
    assert Recipe.from_toml(recipe.to_toml()) == recipe


def test_dicts_carry_the_records_own_tags() -> None:
    assert QuantSpec(4, PerChannel(0), scale_mode=EMA(0.9)).to_dict() == {
        "bits": 4,
        "per": {"per": "channel", "axis": 0},
        "symmetric": True,
        "ste": "clipped_identity",
        "scale_mode": {"mode": "ema", "decay": 0.9},
        "narrow": False,
        "method": "uniform",
    }
    assert type(QuantSpec().to_dict()["ste"]) is str


def test_a_spec_of_records_or_dicts_is_the_same() -> None:
    mixed = {"per": PerToken(), "ste": SteKind.TANH, "scale_mode": PerBatch()}
    plain = {"per": {"per": "token"}, "ste": "tanh", "scale_mode": {"mode": "per_batch"}}
    assert QuantSpec.from_dict(mixed) == QuantSpec.from_dict(plain) == QuantSpec(per=PerToken(), ste=SteKind.TANH)


def test_uniform_builds_the_fake_quantizer_it_describes() -> None:
    spec = QuantSpec(4, PerChannel(1), ste=SteKind.TANH, scale_mode=EMA(0.5), narrow=True, signed=True)
    built = spec.build()
    assert type(built) is FakeQuantize
    assert (built.grid.bits, built.grid.narrow, built.grid.signed) == (4, True, True)
    assert (built.per, built.ste, built.scale_mode) == (PerChannel(1), SteKind.TANH, EMA(0.5))
    assert (built.symmetric, built.observer) == (True, None)
    assert QuantSpec(symmetric=False).build().quant_range() == (0, 255)
    assert spec.build() is not spec.build()


@pytest.mark.parametrize(
    ("options", "kind", "attributes"),
    [
        ({"observer": "min_max"}, MinMax, {}),
        ({"observer": "moving_average", "decay": 0.5}, MovingAverage, {"decay": 0.5}),
        ({"observer": "histogram", "method": "mse", "bins": 64}, Histogram, {"method": "mse", "bins": 64}),
    ],
)
def test_observers_are_built_by_name(options: dict, kind: type, attributes: dict) -> None:
    spec = QuantSpec(per=PerChannel(0), scale_mode=Fixed(), observer=options)
    observer = spec.build(per=PerChannel(1)).observer
    assert type(observer) is kind
    assert observer.per == PerChannel(1)
    assert {name: getattr(observer, name) for name in attributes} == attributes
    assert spec.build().observer is not spec.build().observer


def test_the_callers_dict_is_not_the_specs() -> None:
    options = {"observer": "min_max"}
    spec = QuantSpec(scale_mode=Fixed(), observer=options)
    options["observer"] = "nonsense"
    spec.to_dict()["observer"]["observer"] = "nonsense"
    assert spec.observer == {"observer": "min_max"}
    assert hash(spec) == hash(QuantSpec(scale_mode=Fixed(), observer={"observer": "min_max"}))


@pytest.mark.parametrize(
    ("spec", "kind", "bits"),
    [
        (QuantSpec(1, PerChannel(0), ste=SteKind.IDENTITY, method="binary"), Binarize, 1),
        (QuantSpec(3, method="dorefa_weight"), DoReFaWeight, 3),
        (QuantSpec(2, method="dorefa_activation"), DoReFaActivation, 2),
    ],
)
def test_methods_build_their_quantizers(spec: QuantSpec, kind: type, bits: int) -> None:
    built = spec.build(signed=False)  # no sign to choose
    assert type(built) is kind
    assert built.bits == bits


def test_binary_takes_per_and_ste() -> None:
    built = QuantSpec(1, PerChannel(0), ste=SteKind.IDENTITY, method="binary").build(per=PerChannel(1))
    assert (built.per, built.ste) == (PerChannel(1), SteKind.IDENTITY)
    assert QuantSpec(1, method="binary").build().ste is SteKind.CLIPPED_IDENTITY


def test_build_overrides() -> None:
    spec = QuantSpec(4, PerChannel(0), narrow=True)
    assert spec.build(per=PerChannel(1)).per == PerChannel(1)
    assert spec.build(signed=True).quant_range() == (-7, 7)
    assert spec.build(signed=False).quant_range() == (0, 15)
    assert spec.build().quant_range() == (-7, 7)
    with pytest.raises(ValueError, match="scale_mode must be PerBatch"):
        QuantSpec(scale_mode=EMA()).build(per=PerToken())
    with pytest.raises(TypeError, match="signed is 1"):
        spec.build(signed=1)
    with pytest.raises(ValueError, match=r"per is PerChannel\(axis=0\), but method 'dorefa_weight' has no use for it"):
        QuantSpec(2, method="dorefa_weight").build(per=PerChannel(0))


class Base(nn.Conv2d):
    pass


class Derived(Base):
    pass


@pytest.mark.parametrize(
    ("match", "path", "module", "found"),
    [
        ("head", "head", nn.Linear(1, 1), True),
        ("head", "head.fc", nn.Linear(1, 1), False),
        ("head.*", "head.a.b", nn.Linear(1, 1), True),
        ("Head", "head", nn.Linear(1, 1), False),
        ("block.[0-2].*", "block.1.conv", nn.Linear(1, 1), True),
        ("block.?.conv", "block.10.conv", nn.Linear(1, 1), False),
        ("", "", nn.Linear(1, 1), True),
        ("*", "", nn.Linear(1, 1), True),
        ("type:Linear", "x", nn.Linear(1, 1), True),
        ("type:Conv2d", "x", Derived(1, 1, 1), True),
        ("type:Derived", "x", Base(1, 1, 1), False),
        ("type:Conv*", "x", Derived(1, 1, 1), False),
        ("type:Linear", "type:Linear", nn.ReLU(), False),
        (nn.Conv2d, "x", Derived(1, 1, 1), True),
        (nn.Conv2d, "x", nn.Linear(1, 1), False),
        (lambda path, module: path == "x" and module.in_features == 3, "x", nn.Linear(3, 1), True),
        (lambda path, module: path == "x" and module.in_features == 3, "y", nn.Linear(3, 1), False),
    ],
)
def test_matches(match: object, path: str, module: nn.Module, found: bool) -> None:
    assert Rule(match).matches(path, module) is found


def test_a_rule_with_only_a_match_leaves_the_layer_in_float() -> None:
    rule = Rule("head")
    assert (rule.weight, rule.activation, rule.output, rule.bias) == (None, None, None, False)


@pytest.mark.parametrize("kind", [Recipe, lambda **keys: Rule("*", **keys)])
def test_bits_and_dicts_stand_for_specs(kind: Callable[..., Rule | Recipe]) -> None:
    made = kind(weight=4, activation=8, output={"bits": 6})
    assert made.weight == QuantSpec(4, PerChannel(0), symmetric=True, scale_mode=PerBatch())
    affine = QuantSpec(8, PerTensor(), symmetric=False, scale_mode=EMA())
    assert made.activation == affine
    assert made.output == QuantSpec(6)
    assert kind(output=8).output == affine


def test_the_first_rule_that_matches_decides() -> None:
    recipe = Recipe(
        weight=8,
        rules=[
            Rule("*.1.*", weight=2),
            {"match": "block.*", "weight": 3},
            Rule(nn.Linear, weight=4),
            Rule(never, weight=5),
        ],
    )
    assert isinstance(recipe.rules, tuple)
    linear, conv = nn.Linear(1, 1), nn.Conv2d(1, 1, 1)
    chosen = {path: recipe.choose(path, linear) for path in ("block.1.fc", "block.2.fc", "head")}
    assert [choice.weight.bits for choice in chosen.values()] == [2, 3, 4]
    assert chosen["block.2.fc"] is recipe.rules[1]
    assert recipe.choose("stem", conv) is recipe


def test_allow_float() -> None:
    recipe = Recipe(weight=8, allow_float=["odd.*", "tail"])
    assert recipe.allow_float == ("odd.*", "tail")
    assert [recipe.allows_float(path) for path in ("odd.a.b", "tail", "tail.a", "head")] == [True, True, False, False]


FULL = Recipe(
    weight=4,
    activation=QuantSpec(per=PerToken()),
    output=8,
    bias=True,
    rules=[Rule("head.*"), Rule("type:Conv2d", weight=2, bias=True), Rule("quote\"d.ü'\\*", activation=3)],
    allow_float=["a.*", "b"],
    fold=False,
    integer_products=False,
)


@pytest.mark.parametrize("recipe", [Recipe(), Recipe(weight=8), FULL], ids=["empty", "small", "full"])
def test_round_trips(recipe: Recipe, tmp_path: Path) -> None:
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    assert Recipe.from_toml(recipe.to_toml()) == recipe
    assert str(recipe) == recipe.to_toml()
    for path in (tmp_path / "recipe.toml", str(tmp_path / "text.toml")):
        recipe.save(path)
        assert Recipe.load(path) == recipe
    assert hash(Recipe.from_toml(recipe.to_toml())) == hash(recipe)


def test_recipes_differ_by_every_key() -> None:
    data = FULL.to_dict()
    for key in data.keys() - {"format"}:
        assert Recipe.from_dict({k: v for k, v in data.items() if k != key}) != FULL, key


def test_a_recipe_written_by_hand() -> None:
    text = """
        weight = 4
        activation = {bits = 8, per = {per = "token"}}
        [[rules]]
        match = "head"
        [[rules]]
        match = "type:Conv2d"
        weight = {bits = 2, scale_mode = {mode = "learned"}}
    """
    conv = Rule("type:Conv2d", weight=QuantSpec(2, scale_mode=Learned()))
    expected = Recipe(weight=4, activation=QuantSpec(per=PerToken()), rules=[Rule("head"), conv])
    assert Recipe.from_toml(text) == expected


def test_classes_are_written_by_name() -> None:
    recipe = Recipe(rules=[Rule(nn.Conv2d, weight=4)])
    again = Recipe.from_toml(recipe.to_toml())
    assert again.rules == (Rule("type:Conv2d", weight=4),)
    assert again.choose("x", Derived(1, 1, 1)).weight.bits == 4


def test_functions_cannot_be_written_but_can_be_shown(tmp_path: Path) -> None:
    recipe = Recipe(rules=[Rule("a"), Rule(never, weight=4)])
    match = r"rules\[1\]\.match is the function <never>, which cannot be written; use a glob"
    for write in (recipe.to_toml, recipe.to_dict, lambda: recipe.save(tmp_path / "r.toml")):
        with pytest.raises(ValueError, match=match):
            write()
    assert not list(tmp_path.iterdir())
    assert 'match = "<never>"' in str(recipe)
    assert 'match = "<lambda>"' in str(Recipe(rules=[Rule(lambda path, module: True)]))


def test_saving_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "recipe.toml"
    Recipe(weight=8).save(path)

    def fail(self: Path, target: Path) -> None:
        assert self.parent == path.parent
        assert Recipe.load(self) == Recipe(weight=4)
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        Recipe(weight=4).save(path)
    assert Recipe.load(path) == Recipe(weight=8)
    assert list(tmp_path.iterdir()) == [path]


def test_format() -> None:
    assert Recipe().to_dict() == {"format": 1, "bias": False, "fold": True, "integer_products": True}
    assert Recipe.from_toml("format = 1\nweight = 8") == Recipe.from_toml("weight = 8") == Recipe(weight=8)


def test_records_are_frozen() -> None:
    for record, key in ((QuantSpec(), "bits"), (Rule("a"), "match"), (Recipe(), "weight")):
        with pytest.raises(AttributeError, match="cannot assign"):
            setattr(record, key, 4)


def rules(*tail: object) -> Recipe:
    return Recipe(rules=[{"match": "a"}, *tail])


HISTOGRAM = {"observer": "histogram"}
FIXED = {"mode": "fixed"}


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: QuantSpec(17), ValueError, "^bits is 17, but it must be from 1 to 16"),
        (lambda: QuantSpec(1), ValueError, "^bits is 1, but a signed grid must have from 2 to 16"),
        (lambda: QuantSpec("8"), TypeError, "^bits is '8' .str., but it must be an int"),
        (lambda: QuantSpec(per="tensor"), TypeError, "^per is 'tensor'"),
        (lambda: QuantSpec(ste="tanh"), TypeError, "^ste is 'tanh'"),
        (lambda: QuantSpec(scale_mode="ema"), TypeError, "^scale_mode is 'ema'"),
        (lambda: QuantSpec(symmetric=1), TypeError, "^symmetric is 1"),
        (lambda: QuantSpec(narrow=None), TypeError, "^narrow is None"),
        (lambda: QuantSpec(signed="yes"), TypeError, "^signed is 'yes'"),
        (lambda: QuantSpec(per=PerToken(), scale_mode=EMA()), ValueError, "scale_mode must be PerBatch"),
        (lambda: QuantSpec(method="unifrom"), ValueError, "^method is 'unifrom', but it must be one of 'uniform'"),
        (lambda: QuantSpec(method="binary"), ValueError, "^bits is 8, but method 'binary' has 1; write bits=1"),
        (lambda: QuantSpec("1", method="binary"), TypeError, "^bits is '1'"),
        (lambda: QuantSpec(1, method="binary", ste=SteKind.TANH), ValueError, "^ste is tanh, but binarize"),
        (lambda: QuantSpec(1, method="binary", scale_mode=EMA()), ValueError, "^scale_mode is EMA.* has no use"),
        (lambda: QuantSpec(1, method="binary", symmetric=1), ValueError, "^symmetric is 1, but method 'binary'"),
        (lambda: QuantSpec(2, method="dorefa_weight", ste="clipped_identity"), ValueError, "^ste is 'clipped"),
        (lambda: QuantSpec(1, method="dorefa_weight"), ValueError, "^bits is 1, but .* use Binarize"),
        (lambda: QuantSpec(2, PerChannel(0), method="dorefa_activation"), ValueError, "^per is .* leave it out"),
        (lambda: QuantSpec(scale_mode=Fixed(), observer="histogram"), TypeError, "^observer is 'histogram' .str., but"),
        (lambda: QuantSpec(observer={"observer": "min_max"}), ValueError, "^scale_mode is PerBatch.* use Fixed"),
        (
            lambda: QuantSpec(scale_mode=Fixed(), observer={"observer": "minmax"}),
            ValueError,
            r"^observer\.observer is 'minmax', but it must be one of 'min_max', 'moving_average', 'histogram'",
        ),
        (lambda: QuantSpec(scale_mode=Fixed(), observer={}), ValueError, r"^observer\.observer is None"),
        (
            lambda: QuantSpec(scale_mode=Fixed(), observer={**HISTOGRAM, "bin": 4}),
            ValueError,
            "^observer has no key 'bin'; its keys are observer, method, bins, percentile, candidates",
        ),
        (
            lambda: QuantSpec(scale_mode=Fixed(), observer={**HISTOGRAM, "per": PerTensor()}),
            ValueError,
            "^observer has no key 'per'",
        ),
        (
            lambda: Recipe(weight={"scale_mode": FIXED, "observer": {**HISTOGRAM, "bins": 3}}),
            ValueError,
            r"^weight\.observer\.bins is 3, but it must be even",
        ),
        (lambda: QuantSpec.from_dict(8), TypeError, "takes a dict"),
        (lambda: Rule(3), TypeError, "^match is 3 .int., but it must be a glob"),
        (lambda: Rule(None), TypeError, "^match is None"),
        (lambda: Rule("type:"), ValueError, "^match is 'type:', but it must name a class"),
        (lambda: Rule("a", bias=1), TypeError, "^bias is 1"),
        (lambda: Rule("a", weight=0), ValueError, r"^weight\.bits is 0, but"),
        (lambda: Rule("a", weight=True), TypeError, "^weight is True .bool., but it must be a QuantSpec"),
        (lambda: Rule("a", output="8"), TypeError, "^output is '8' .str., but it must be a QuantSpec"),
        (
            lambda: Rule(lambda path, module: None).matches("fc", nn.ReLU()),
            TypeError,
            "what <lambda> returned for 'fc' is None .NoneType., but it must be True or False",
        ),
        (lambda: Recipe(weight={"bit": 8}), ValueError, "^weight has no key 'bit'; its keys are bits, per, symm"),
        (lambda: Recipe(activation={"bits": 17}), ValueError, r"^activation\.bits is 17, but"),
        (lambda: Recipe(activation={"bits": 8.0}), TypeError, r"^activation\.bits is 8.0 .float., but"),
        (lambda: Recipe(weight={"per": "token"}), TypeError, r"^weight\.per is 'token' .str., .* {'per': 'tensor'}"),
        (lambda: Recipe(weight={"per": {"per": "row"}}), ValueError, r"^weight\.per\.per is 'row', but"),
        (lambda: Recipe(weight={"per": {"per": "group"}}), ValueError, r"^weight\.per needs the key 'size'"),
        (lambda: Recipe(weight={"per": {"per": "group", "size": 0}}), ValueError, r"^weight\.per\.size is 0, but"),
        (lambda: Recipe(weight={"scale_mode": {"mode": "emma"}}), ValueError, r"^weight\.scale_mode\.mode is 'emma'"),
        (lambda: Recipe(weight={"scale_mode": {"mode": "ema", "rate": 1}}), ValueError, r"^weight\.scale_mode has no"),
        (lambda: Recipe(weight={"scale_mode": "ema"}), TypeError, r"^weight\.scale_mode is 'ema' .* {'mode': 'per_"),
        (lambda: Recipe(weight={"ste": "sigmoid"}), ValueError, r"^weight\.ste is 'sigmoid', but it must be one of"),
        (lambda: Recipe(weight={"ste": 3}), ValueError, r"^weight\.ste is 3"),
        (
            lambda: Recipe(output={"per": {"per": "token"}, "scale_mode": FIXED}),
            ValueError,
            r"^output: PerToken\(\) has as many scales .* scale_mode must be PerBatch",
        ),
        (lambda: rules({"match": "b", "weight": {"bits": 17}}), ValueError, r"^rules\[1\]\.weight\.bits is 17, but it"),
        (lambda: rules({"match": "b", "weight": 17}), ValueError, r"^rules\[1\]\.weight\.bits is 17, but it"),
        (lambda: rules({"match": "b", "weight": {"bit": 1}}), ValueError, r"^rules\[1\]\.weight has no key 'bit'"),
        (
            lambda: rules({"match": "b", "weight": {"per": {"per": "group"}}}),
            ValueError,
            r"^rules\[1\]\.weight\.per needs the key 'size'",
        ),
        (
            lambda: rules({"match": "b", "weight": {"scale_mode": {"mode": "ema", "decay": 2}}}),
            ValueError,
            r"^rules\[1\]\.weight\.scale_mode\.decay is 2, but",
        ),
        (lambda: rules({"match": "b", "weights": 8}), ValueError, r"^rules\[1\] has no key 'weights'; its keys are m"),
        (lambda: rules({"weight": 8}), ValueError, r"^rules\[1\] needs the key 'match'"),
        (lambda: rules({"match": 5}), TypeError, r"^rules\[1\]\.match is 5 .int., but"),
        (lambda: rules("head.*"), TypeError, r"^rules\[1\] is 'head\.\*' .str., but it must be a Rule or a dict"),
        (lambda: Recipe(rules=Rule("a")), TypeError, "^rules is Rule.*, but it must be a list of Rules"),
        (lambda: Recipe(allow_float="head"), TypeError, "^allow_float is 'head' .str., but it must be a list of globs"),
        (lambda: Recipe(allow_float=["a", 1]), TypeError, r"^allow_float\[1\] is 1 .int., but it must be a glob"),
        (lambda: Recipe(bias="no"), TypeError, "^bias is 'no'"),
        (lambda: Recipe.from_dict({"wieght": 8}), ValueError, "^Recipe has no key 'wieght'; its keys are weight"),
        (lambda: Recipe.from_dict([]), TypeError, "takes a dict"),
        (lambda: Recipe.from_dict({"format": 2}), ValueError, "^format is 2, but .* up to format 1; update lowbit"),
        (lambda: Recipe.from_dict({"format": 0}), ValueError, "^format is 0, but it must be at least 1"),
        (lambda: Recipe.from_dict({"format": "1"}), TypeError, "^format is '1'"),
        (lambda: Recipe.from_toml("weight = {bits = 4"), ValueError, "this is no TOML text: Unclosed inline table"),
        (lambda: Recipe.from_toml("bits = \nbias = true"), ValueError, "no TOML text: .*at line 1"),
        (lambda: Recipe.from_toml(b"weight = 8"), TypeError, "takes TOML text; use Recipe.load"),
    ],
)
def test_refused(call: Callable[[], object], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()


@pytest.mark.parametrize(
    ("content", "error", "match"),
    [
        (FULL.to_toml()[: FULL.to_toml().index('"channel"') + 3].encode(), ValueError, "no TOML text"),
        (b"weight = 17", ValueError, r"weight\.bits is 17"),
        (b"weight = '8'", TypeError, r"weight is '8'"),
        (b"format = 9", ValueError, "format is 9"),
        (b"\xff\xfe", ValueError, "no TOML text"),
        (b"wieght = 8", ValueError, "Recipe has no key 'wieght'"),
    ],
)
def test_a_bad_file_is_named(content: bytes, error: type[Exception], match: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(error, match=rf"bad\.toml: .*{match}"):
        Recipe.load(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no such recipe; write one with Recipe\.save.*none\.toml"):
        Recipe.load(tmp_path / "none.toml")
    with pytest.raises(IsADirectoryError, match=tmp_path.name):
        Recipe.load(tmp_path)


def test_the_rng_is_left_alone() -> None:
    state = torch.get_rng_state()
    Recipe(weight=QuantSpec(2, scale_mode=Learned())).weight.build()
    assert torch.equal(torch.get_rng_state(), state)
