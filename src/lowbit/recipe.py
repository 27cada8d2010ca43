"""Recipe, Rule, QuantSpec: which layers get which quantizers, as records that read and write TOML."""

from __future__ import annotations

import errno
import inspect
import re
import tomllib
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Self

import tomli_w
from torch import nn

from lowbit.fake_quantize import FakeQuantize
from lowbit.granularity import Granularity, PerChannel, PerTensor
from lowbit.nn.quantizers import Binarize, DoReFaActivation, DoReFaWeight
from lowbit.observers import Histogram, MinMax, MovingAverage, Observer
from lowbit.record import Record, TaggedRecord, check_choice, check_flag, check_integer
from lowbit.scale import EMA, PerBatch, ScaleMode
from lowbit.ste import SteKind

OBSERVERS: dict[str, type[Observer]] = {"min_max": MinMax, "moving_average": MovingAverage, "histogram": Histogram}

# The methods besides "uniform", and the keys of a QuantSpec that each has a use for.
_METHOD_KEYS = {"binary": ("bits", "per", "ste"), "dorefa_weight": ("bits",), "dorefa_activation": ("bits",)}
METHODS = ("uniform", *_METHOD_KEYS)

_FORMAT = 1
_TYPE = "type:"


@dataclass(frozen=True)
class QuantSpec(Record):
    """One quantizer, as ``build`` makes it: the arguments of FakeQuantize, and two keys more

    - ``method``    "uniform" is a FakeQuantize; "binary" (bits=1), "dorefa_weight" and "dorefa_activation" are the
      quantizers of ``lowbit.nn.quantizers``, which take ``bits`` and, where binary, ``per`` and ``ste``
    - ``observer``  None, or the name of an observer and its options: {"observer": "histogram", "method": "mse"};
      the names are "min_max", "moving_average" and "histogram"

    >>> QuantSpec(bits=4, scale_mode=EMA(0.9)).build()
    FakeQuantize(4 bits [-8, 7], symmetric, PerTensor(), CLIPPED_IDENTITY, EMA(decay=0.9))
    """

    bits: int = 8
    per: Granularity = PerTensor()
    symmetric: bool = True
    ste: SteKind = SteKind.CLIPPED_IDENTITY
    scale_mode: ScaleMode = PerBatch()
    narrow: bool = False
    signed: bool | None = None
    observer: dict[str, Any] | None = field(default=None, hash=False)  # a dict has no hash; it still counts in ==
    method: str = "uniform"

    def __post_init__(self) -> None:
        if isinstance(self.observer, Mapping):
            object.__setattr__(self, "observer", dict(self.observer))  # not the caller's to change
        self._make()  # the quantizer checks its own arguments

    def build(self, *, per: Granularity | None = None, signed: bool | None = None) -> nn.Module:
        """A new quantizer; ``per`` and ``signed``, where given, stand in for the spec's own

        ``signed=False`` gives up ``narrow`` too, as an unsigned grid has no lowest code to spare. A method that is not
        "uniform" has no sign to choose, and leaves ``signed`` alone.
        """
        changes: dict[str, Any] = {} if per is None else {"per": per}
        if signed is not None and self.method == "uniform":
            changes |= {"signed": signed, "narrow": self.narrow and signed is not False}
        return (replace(self, **changes) if changes else self)._make()

    def to_dict(self) -> dict[str, Any]:
        """The keys as plain values, records and enums too; a key that is None is left out."""
        data = super().to_dict() | {"per": self.per.to_dict(), "ste": self.ste.value}
        data["scale_mode"] = self.scale_mode.to_dict()
        return data if self.observer is None else data | {"observer": dict(self.observer)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The spec that ``to_dict`` wrote; a key left out has its default."""
        if isinstance(data, Mapping):
            families: dict[str, type[TaggedRecord]] = {"per": Granularity, "scale_mode": ScaleMode}
            records = {key: _member(key, family, data[key]) for key, family in families.items() if key in data}
            data = {**data, **records}
            if "ste" in data:
                data["ste"] = SteKind.from_dict({"ste": data["ste"]})
        return super().from_dict(data)

    def _make(self) -> nn.Module:
        check_choice("method", self.method, METHODS)
        if self.method == "uniform":
            return FakeQuantize(
                self.bits,
                self.symmetric,
                per=self.per,
                ste=self.ste,
                scale_mode=self.scale_mode,
                narrow=self.narrow,
                signed=self.signed,
                observer=self._make_observer(),
            )
        used = ("method", *_METHOD_KEYS[self.method])
        for key in fields(self):
            value = getattr(self, key.name)
            # The type too: "identity" == SteKind.IDENTITY and 1 == True.
            if key.name not in used and (value != key.default or type(value) is not type(key.default)):
                raise ValueError(f"{key.name} is {value!r}, but method {self.method!r} has no use for it; leave it out")
        if self.method == "dorefa_weight":
            return DoReFaWeight(self.bits)
        if self.method == "dorefa_activation":
            return DoReFaActivation(self.bits)
        check_integer("bits", self.bits, 1)
        if self.bits != 1:
            raise ValueError(f"bits is {self.bits}, but method 'binary' has 1; write bits=1")
        return Binarize(self.per, self.ste)

    def _make_observer(self) -> Observer | None:
        if self.observer is None:
            return None
        if not isinstance(self.observer, dict):
            raise TypeError(
                f"observer is {self.observer!r} ({type(self.observer).__name__}), but it must be a dict, such as "
                "{'observer': 'histogram', 'method': 'mse'}"
            )
        with _inside("observer"):
            name = self.observer.get("observer")
            check_choice("observer", name, tuple(OBSERVERS))
            observer = OBSERVERS[str(name)]
            options = {key: value for key, value in self.observer.items() if key != "observer"}
            known = [key for key in inspect.signature(observer).parameters if key != "per"]
            for key in options:
                if key not in known:
                    keys = ", ".join(["observer", *known])
                    raise ValueError(f"{observer.__name__} has no key {key!r}; its keys are {keys}")
            made = observer(self.per, **options) if isinstance(self.per, Granularity) else None
        if isinstance(self.scale_mode, PerBatch):
            raise ValueError(
                f"scale_mode is {self.scale_mode}, which takes its scale from each batch, but there is an observer to "
                "set one; use Fixed() or EMA(), or leave the observer out"
            )
        return made


SpecLike = QuantSpec | Mapping[str, Any] | int | None
Match = str | type | Callable[[str, nn.Module], bool]

# What a bare number of bits stands for.
_OF_BITS = {
    "weight": QuantSpec(per=PerChannel(0)),
    "activation": QuantSpec(symmetric=False, scale_mode=EMA()),
    "output": QuantSpec(symmetric=False, scale_mode=EMA()),
}


@dataclass(frozen=True, init=False)
class Rule(Record):
    """weight, activation, output, bias = what a layer gets whose path or type is a match; None leaves it in float

    ``match`` is one of

    - a glob on the layer's path, in which ``*`` crosses dots too: "blocks.*.mlp.*"
    - "type:" and the name of a class: the layer's own, or that of any class above it
    - a class: every layer that is an instance
    - a function of (path, module) that returns True or False; such a rule cannot be written to a file

    ``weight``, ``activation`` and ``output`` are each a QuantSpec, a dict of one, or a number of bits: a weight is then
    symmetric, PerChannel(0) and PerBatch(), the others affine, per tensor and EMA(). ``bias``: whether the bias is
    rounded to what an integer target holds. A rule with nothing but ``match`` leaves what it matches in float.

    >>> Rule("head.*").matches("head.fc", nn.Linear(2, 2))
    True
    """

    match: Match
    weight: QuantSpec | None = None
    activation: QuantSpec | None = None
    output: QuantSpec | None = None
    bias: bool = False

    def __init__(
        self,
        match: Match,
        weight: SpecLike = None,
        activation: SpecLike = None,
        output: SpecLike = None,
        bias: bool = False,
    ) -> None:
        if not (isinstance(match, str) or callable(match)):
            raise TypeError(
                f"match is {match!r} ({type(match).__name__}), but it must be a glob, 'type:' and a class's name, "
                "a class, or a function of (path, module)"
            )
        if match == _TYPE:
            raise ValueError("match is 'type:', but it must name a class, such as 'type:Conv2d'")
        object.__setattr__(self, "match", match)
        _set_choice(self, weight, activation, output, bias)

    @property
    def pattern(self) -> str:
        """``match`` as text: a class as "type:Name", a function as "<name>", which matches nothing."""
        if isinstance(self.match, str):
            return self.match
        if isinstance(self.match, type):
            return _TYPE + self.match.__name__
        name = getattr(self.match, "__name__", type(self.match).__name__)
        return name if name.startswith("<") else f"<{name}>"

    def matches(self, path: str, module: nn.Module) -> bool:
        """Whether this rule speaks of the layer at ``path``."""
        if isinstance(self.match, type):
            return isinstance(module, self.match)
        if isinstance(self.match, str):
            if self.match.startswith(_TYPE):
                return any(parent.__name__ == self.match.removeprefix(_TYPE) for parent in type(module).__mro__)
            return fnmatchcase(path, self.match)
        found = self.match(path, module)
        check_flag(f"what {self.pattern} returned for {path!r}", found)
        return found

    def to_dict(self) -> dict[str, Any]:
        """The keys as plain values; a class becomes "type:Name", a function is an error."""
        if not isinstance(self.match, str | type):
            raise ValueError(
                f"match is the function {self.pattern}, which cannot be written; use a glob or 'type:Name'"
            )
        return super().to_dict() | {"match": self.pattern} | _choice_dict(self)


@dataclass(frozen=True, init=False)
class Recipe(Record):
    """weight, activation, output, bias = those of the first rule that matches a layer, else the recipe's own

    The four are as in Rule. ``rules`` are Rules, or dicts of them, tried in order. ``allow_float`` are globs on the
    paths of layers that may stay in float, although the recipe would quantize them and cannot. ``fold``: whether a
    batch norm is part of the weight of the layer before it, as it will be on the target. ``integer_products``: whether
    large layers multiply codes in training where they can; else every product is torch's, of the quantized values.

    >>> recipe = Recipe(weight=4, activation=8, rules=[Rule("head*")])
    >>> recipe.choose("head", nn.Linear(2, 2)).weight is None
    True
    >>> Recipe.from_toml(recipe.to_toml()) == recipe
    True
    """

    weight: QuantSpec | None = None
    activation: QuantSpec | None = None
    output: QuantSpec | None = None
    bias: bool = False
    rules: tuple[Rule, ...] = ()
    allow_float: tuple[str, ...] = ()
    fold: bool = True
    integer_products: bool = True

    def __init__(
        self,
        weight: SpecLike = None,
        activation: SpecLike = None,
        output: SpecLike = None,
        bias: bool = False,
        rules: Sequence[Rule | Mapping[str, Any]] = (),
        allow_float: Sequence[str] = (),
        fold: bool = True,
        integer_products: bool = True,
    ) -> None:
        for name, flag in (("fold", fold), ("integer_products", integer_products)):
            check_flag(name, flag)
            object.__setattr__(self, name, flag)
        _set_choice(self, weight, activation, output, bias)
        _check_list("rules", rules, "Rules")
        object.__setattr__(self, "rules", tuple(_rule(f"rules[{i}]", rule) for i, rule in enumerate(rules)))
        _check_list("allow_float", allow_float, "globs")
        for i, glob in enumerate(allow_float):
            if not isinstance(glob, str):
                raise TypeError(f"allow_float[{i}] is {glob!r} ({type(glob).__name__}), but it must be a glob")
        object.__setattr__(self, "allow_float", tuple(allow_float))

    def choose(self, path: str, module: nn.Module, *other_paths: str) -> Rule | Recipe:
        """The first rule that matches the layer, by any of its paths, else the recipe itself."""
        paths = path, *other_paths
        return next((rule for rule in self.rules if any(rule.matches(name, module) for name in paths)), self)

    def allows_float(self, path: str) -> bool:
        """Whether the layer at ``path`` may stay in float where it cannot be quantized."""
        return any(fnmatchcase(path, glob) for glob in self.allow_float)

    def to_dict(self) -> dict[str, Any]:
        """The keys as plain values, and the format they are in."""
        data = {"format": _FORMAT, **super().to_dict(), **_choice_dict(self)}
        rules = []
        for i, rule in enumerate(self.rules):
            with _inside(f"rules[{i}]"):
                rules.append(rule.to_dict())
        lists = {"rules": rules, "allow_float": list(self.allow_float)}
        return {key: value for key, value in (data | lists).items() if value != []}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The recipe that ``to_dict`` wrote; a key left out has its default."""
        if isinstance(data, Mapping) and "format" in data:
            check_integer("format", data["format"], 1)
            if data["format"] > _FORMAT:
                raise ValueError(
                    f"format is {data['format']}, but this lowbit reads recipes up to format {_FORMAT}; update lowbit"
                )
            data = {key: value for key, value in data.items() if key != "format"}
        return super().from_dict(data)

    def to_toml(self) -> str:
        """The recipe as TOML text, which ``from_toml`` reads."""
        return tomli_w.dumps(self.to_dict())

    @classmethod
    def from_toml(cls, text: str) -> Self:
        """The recipe that this TOML text holds."""
        if not isinstance(text, str):
            raise TypeError(f"Recipe.from_toml got {text!r}, but it takes TOML text; use Recipe.load for a file")
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"this is no TOML text: {error}") from error
        return cls.from_dict(data)

    def save(self, path: str | Path) -> None:
        """Write the recipe to a TOML file, whole or not at all."""
        text, path = self.to_toml(), Path(path)
        draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            draft.write_text(text, encoding="utf-8")
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The recipe in a TOML file."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except FileNotFoundError as error:
            hint = "there is no such recipe; write one with Recipe.save, or take one of lowbit.recipes"
            raise FileNotFoundError(errno.ENOENT, hint, str(path)) from error
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: this is no TOML text: {error}") from error
        with _inside(f"{path}:"):
            return cls.from_toml(text)

    def __str__(self) -> str:
        """The TOML text; a rule's function shows by its name."""
        return replace(self, rules=tuple(replace(rule, match=rule.pattern) for rule in self.rules)).to_toml()


def _set_choice(owner: Rule | Recipe, weight: SpecLike, activation: SpecLike, output: SpecLike, bias: bool) -> None:
    """What Rule and Recipe have in common, set on a frozen record."""
    for key, value in (("weight", weight), ("activation", activation), ("output", output)):
        object.__setattr__(owner, key, _spec(key, value))
    check_flag("bias", bias)
    object.__setattr__(owner, "bias", bias)


def _choice_dict(owner: Rule | Recipe) -> dict[str, Any]:
    specs = {key: getattr(owner, key) for key in _OF_BITS}
    return {key: spec.to_dict() for key, spec in specs.items() if spec is not None}


def _spec(key: str, value: SpecLike) -> QuantSpec | None:
    if value is None or isinstance(value, QuantSpec):
        return value
    with _inside(key):
        if isinstance(value, Mapping):
            return QuantSpec.from_dict(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return replace(_OF_BITS[key], bits=value)
    raise TypeError(
        f"{key} is {value!r} ({type(value).__name__}), but it must be a QuantSpec, a dict of one, a number of bits, "
        "or None for float"
    )


def _rule(place: str, value: object) -> Rule:
    if isinstance(value, Rule):
        return value
    if not isinstance(value, Mapping):
        raise TypeError(f"{place} is {value!r} ({type(value).__name__}), but it must be a Rule or a dict of one")
    with _inside(place):
        return Rule.from_dict(value)


def _member(key: str, family: type[TaggedRecord], value: object) -> TaggedRecord:
    if isinstance(value, family):
        return value
    if not isinstance(value, Mapping):
        example = {family.tag: next(iter(family.members))}
        raise TypeError(f"{key} is {value!r} ({type(value).__name__}), but it must be a dict, such as {example}")
    with _inside(key):
        return family.from_dict(value)


def _check_list(key: str, value: object, what: str) -> None:
    if not isinstance(value, list | tuple):
        raise TypeError(f"{key} is {value!r} ({type(value).__name__}), but it must be a list of {what}")


@contextmanager
def _inside(place: str) -> Iterator[None]:
    """Errors that say where in the recipe they are: a record speaks of its own keys, "bits is 17", and not of its place

    "bits is 17" becomes "weight.bits is 17", and that "rules[1].weight.bits is 17"; "QuantSpec has no key" becomes
    "weight has no key"; what starts with no key, and what is in a file ("w4.toml:"), follows a colon.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(_placed(place, str(error))) from error


def _placed(place: str, message: str) -> str:
    if place.endswith(":"):
        return f"{place} {message}"
    if re.match(r"[A-Z]\w* (has no|needs the) key ", message):
        return f"{place} {message.split(' ', 1)[1]}"
    if re.match(r"[a-z_]\w*([.\[][\w.\[\]]*)? (is|has no key|needs the key) ", message):
        return f"{place}.{message}"
    return f"{place}: {message}"
