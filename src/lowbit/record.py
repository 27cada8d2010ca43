"""Frozen records: what a user chooses, checked once, and carried as plain JSON dicts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, ClassVar, Self


def check_integer(name: str, value: object, minimum: int, maximum: int | None = None) -> None:
    """Refuse what is not an int in ``[minimum, maximum]``, naming the field."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}), but it must be an int")
    if value < minimum or (maximum is not None and value > maximum):
        wanted = f"at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        raise ValueError(f"{name} is {value}, but it must be {wanted}")


def check_number(name: str, value: object) -> float:
    """Refuse what is not a real number, naming the field; infinities are numbers, NaN is not."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}), but it must be a number")
    if isinstance(value, float) and math.isnan(value):
        raise ValueError(f"{name} is NaN, but it must be a number")
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError(f"{name} is an int too large for a float") from error


def check_finite(name: str, value: object) -> float:
    """Refuse what is not a finite real number, naming the field."""
    number = check_number(name, value)
    if math.isinf(number):
        raise ValueError(f"{name} is {number}, but it must be finite")
    return number


def check_flag(name: str, value: object) -> None:
    """Refuse what is not a bool, naming the field."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}), but it must be True or False")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuse what is not one of ``choices``, naming the field."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, but it must be one of {', '.join(map(repr, choices))}")


class Record:
    """cls.from_dict(record.to_dict()) == record, for every frozen dataclass below this one."""

    def to_dict(self) -> dict[str, Any]:
        """The fields as a dict of plain values, without those that are None (TOML has none)."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The record that ``to_dict`` wrote; unknown and missing keys are errors that name the key."""
        if not isinstance(data, Mapping):
            raise TypeError(f"{cls.__name__}.from_dict got {data!r}, but it takes a dict")
        known = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
        for key in data:
            if key not in known:
                raise ValueError(f"{cls.__name__} has no key {key!r}; its keys are {', '.join(known) or 'none'}")
        for name, field in known.items():
            if name not in data and field.default is MISSING:
                raise ValueError(f"{cls.__name__} needs the key {name!r}")
        return cls(**data)


class TaggedRecord(Record):
    """One family of records; a tag in the dict says which member it is, as in {"mode": "ema", "decay": 0.99}."""

    tag: ClassVar[str]
    kind: ClassVar[str]
    members: ClassVar[dict[str, type[TaggedRecord]]]

    def __init_subclass__(cls, *, tag: str | None = None, kind: str | None = None) -> None:
        super().__init_subclass__()
        if tag is not None:
            cls.tag, cls.members = tag, {}
        if kind is not None:
            cls.kind = kind
            cls.members[kind] = cls

    def __init__(self) -> None:
        kinds = ", ".join(member.__name__ for member in self.members.values())
        raise TypeError(f"{type(self).__name__} names a family; choose one of {kinds}")

    def to_dict(self) -> dict[str, Any]:
        """The tag and the fields as a dict of plain values."""
        return {self.tag: self.kind, **super().to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The member of this family that ``to_dict`` wrote."""
        if not isinstance(data, Mapping):
            raise TypeError(f"{cls.__name__}.from_dict got {data!r}, but it takes a dict")
        kind = data.get(cls.tag)
        member = cls.members.get(kind) if isinstance(kind, str) else None
        if member is None or not issubclass(member, cls):
            known = [name for name, other in cls.members.items() if issubclass(other, cls)]
            raise ValueError(f"{cls.tag} is {kind!r}, but it must be one of {', '.join(map(repr, known))}")
        fields_only = {key: value for key, value in data.items() if key != cls.tag}
        return super(TaggedRecord, member).from_dict(fields_only)
