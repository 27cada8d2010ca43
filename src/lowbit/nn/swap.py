"""Swapped: a module that changed its class, and can change back."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

from torch import nn

_CLASSES: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


class Swapped(nn.Module):
    """A mixin before a module's own class: isinstance, parameters, hooks and state_dict keys stay as they are."""

    mixin: ClassVar[type[nn.Module]]
    float_class: ClassVar[type[nn.Module]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if len(cls.__bases__) == 2 and issubclass(cls.__bases__[0], Swapped):
            cls.mixin, cls.float_class = cls.__bases__
            cls.forward = _with_signature(cls.mixin, cls.float_class)
            _CLASSES.setdefault((cls.mixin, cls.float_class), cls)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copied and pickled by its two classes: a class made at run time has no place to be imported from."""
        return _new, (self.mixin, self.float_class), self.__getstate__()


def _with_signature(mixin: type[nn.Module], float_class: type[nn.Module]) -> Any:
    """The mixin's forward, which says that it takes what the float class's takes: others look at that."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return mixin.forward(self, *args, **kwargs)

    forward.__signature__ = inspect.signature(float_class.forward)  # type: ignore[attr-defined]
    forward.__doc__ = float_class.forward.__doc__
    return forward


def swapped_class(mixin: type[nn.Module], float_class: type[nn.Module]) -> type[nn.Module]:
    """The class of both: the one that was written for them, or one made here, always the same."""
    if (mixin, float_class) not in _CLASSES:
        attributes = {"__module__": float_class.__module__, "__doc__": mixin.__doc__}
        type(f"Quant{float_class.__name__}", (mixin, float_class), attributes)
    return _CLASSES[mixin, float_class]


def swap(module: Any, mixin: type[nn.Module]) -> None:
    """Put the mixin before the module's class."""
    module.__class__ = swapped_class(mixin, type(module))


def swap_back(module: Any) -> None:
    """The module's own class again."""
    module.__class__ = type(module).float_class


def _new(mixin: type[nn.Module], float_class: type[nn.Module]) -> nn.Module:
    cls = swapped_class(mixin, float_class)
    return cls.__new__(cls)


def remove(module: nn.Module, *names: str) -> None:
    """Attributes of a module, those that are there."""
    for name in names:
        module.__dict__.pop(name, None)
