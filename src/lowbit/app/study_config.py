"""StudyConfig: which rules, scales and bits a study compares, and the cases that this makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from lowbit.app.config import OPTIMIZERS, TrainConfig, read_config
from lowbit.granularity import PerChannel
from lowbit.recipe import QuantSpec, Recipe
from lowbit.record import Record, check_choice, check_finite, check_integer
from lowbit.scale import EMA, Learned, PerBatch, ScaleMode
from lowbit.ste import SteKind

ROLES = ("weight", "activation")
SCALES = ("learned", "ema", "per_batch")
RULES = tuple(rule.value for rule in SteKind)


@dataclass(frozen=True)
class Case(Record):
    """One way to quantize: bits, and for weights and activations each a gradient rule and a scale rule."""

    bits: int
    weight_rule: str
    weight_scale: str
    activation_rule: str
    activation_scale: str

    @property
    def name(self) -> str:
        """For files and tables."""
        return f"{self.bits}-w.{self.weight_rule}.{self.weight_scale}-a.{self.activation_rule}.{self.activation_scale}"

    def change(self, changes: Mapping[str, Any]) -> Case:
        """The same, but for these."""
        return replace(self, **changes)

    def recipe(self) -> Recipe:
        """Weights per channel, activations per tensor."""
        weight = QuantSpec(
            self.bits, per=PerChannel(0), ste=SteKind(self.weight_rule), scale_mode=_mode("weight", self.weight_scale)
        )
        mode = _mode("activation", self.activation_scale)
        return Recipe(
            weight=weight, activation=QuantSpec(self.bits, ste=SteKind(self.activation_rule), scale_mode=mode)
        )


def _mode(role: str, name: str) -> ScaleMode:
    if name == "learned":
        return Learned(batch_axis=0 if role == "activation" else None)
    return EMA() if name == "ema" else PerBatch()


@dataclass(frozen=True)
class StudyConfig(Record):
    """bits x (rules and scales of weights, rules and scales of activations) x rates x seeds

    One thing is varied at a time, for weights and activations apart; the other keeps the first of ``rules`` and of
    ``scales``. The rate of a case is chosen by its mean accuracy on held-out data, and the test data serves for the
    result alone. Every case of a seed starts from that seed's float network and sees the same batches.

    - ``data``, ``folder``, ``model``, ``batch_size``, ``optimizer``, ``held_out``, ``max_length``: see ``TrainConfig``
    - ``float_epochs`` at ``float_rate``, then ``epochs`` at each of ``rates``
    - ``jobs``: processes at a time; 0 is one for each core

    >>> len(StudyConfig(bits=[2], rules=["clipped_identity", "tanh"], roles=["weight"]).cases())
    2
    """

    data: str = "digits"
    folder: str | None = None
    model: str = "convnet"
    bits: tuple[int, ...] = (4, 2)
    rules: tuple[str, ...] = ("clipped_identity", "identity", "in_range", "tanh", "hard_tanh")
    scales: tuple[str, ...] = ("learned",)
    roles: tuple[str, ...] = ROLES
    rates: tuple[float, ...] = (0.03, 0.1)
    seeds: int = 5
    float_epochs: int = 12
    float_rate: float = 0.1
    epochs: int = 12
    batch_size: int = 64
    weight_decay: float = 5e-4
    optimizer: str = OPTIMIZERS[0]
    held_out: float = 0.2
    max_length: int = 128
    style: str = "integer"
    jobs: int = 0
    output: str | None = None

    def __post_init__(self) -> None:
        for key in ("bits", "rules", "scales", "roles", "rates"):
            value = getattr(self, key)
            if not isinstance(value, list | tuple) or not value:
                raise TypeError(f"{key} is {value!r}, but it must be a list of at least one")
            object.__setattr__(self, key, tuple(dict.fromkeys(value)))
        for bits in self.bits:
            check_integer("bits", bits, 2, 8)
        for key, choices in (("rules", RULES), ("scales", SCALES), ("roles", ROLES)):
            for value in getattr(self, key):
                check_choice(key, value, choices)
        for rate in self.rates:
            if check_finite("rates", rate) <= 0:
                raise ValueError(f"rates holds {rate:g}, but a rate must be above 0")
        check_integer("seeds", self.seeds, 2)
        check_integer("jobs", self.jobs, 0)
        check_integer("epochs", self.epochs, 1)
        self.train_config(0)  # checks the rest

    def train_config(self, seed: int) -> TrainConfig:
        """What builds the float network and the data of a seed."""
        return TrainConfig(
            self.data,
            self.folder,
            self.model,
            float_epochs=self.float_epochs,
            epochs=self.epochs,
            batch_size=self.batch_size,
            rate=self.float_rate,
            weight_decay=self.weight_decay,
            optimizer=self.optimizer,
            seed=seed,
            held_out=self.held_out,
            max_length=self.max_length,
            style=self.style,
        )

    def cases(self) -> list[Case]:
        """Every case once, the one that others are compared with first for each number of bits."""
        found: dict[Case, None] = {}
        for bits in self.bits:
            base = _without_identities(Case(bits, self.rules[0], self.scales[0], self.rules[0], self.scales[0]))
            found[base] = None
            for role in self.roles:
                for rule in self.rules:
                    found[_without_identities(base.change({f"{role}_rule": rule}))] = None
                for scale in self.scales:
                    found[_without_identities(base.change({f"{role}_scale": scale}))] = None
        return list(found)

    @classmethod
    def read(cls, path: Path, changes: Mapping[str, Any]) -> Self:
        """The config in a TOML file, with some keys changed"""
        return read_config(cls, path, changes)

    def differences(self, other: StudyConfig) -> list[str]:
        """The keys that differ, with both values; where it is kept and how many run at a time are none of them."""
        keys = [key.name for key in fields(self) if key.name not in ("output", "jobs")]
        pairs = [(key, getattr(self, key), getattr(other, key)) for key in keys]
        return [f"{key} is {ours!r}, there {theirs!r}" for key, ours, theirs in pairs if ours != theirs]


def _without_identities(case: Case) -> Case:
    """The range of PerBatch is the data's own: there, what only clips is the identity, and would be one case twice."""
    changes: dict[str, str] = {}
    for role in ROLES:
        if getattr(case, f"{role}_scale") == "per_batch" and SteKind(getattr(case, f"{role}_rule")).only_clips:
            changes[f"{role}_rule"] = SteKind.IDENTITY.value
    return case.change(changes)
