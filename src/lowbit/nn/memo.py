"""Memo: an answer, and the facts that it was found from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Memo:
    """The last answer to a question that is asked on every call; a copy of it knows nothing yet."""

    __slots__ = ("answer", "facts")

    def __init__(self) -> None:
        self.facts: tuple[Any, ...] | None = None
        self.answer: Any = None

    def recall(self, facts: tuple[Any, ...], find: Callable[..., Any], *args: Any) -> Any:
        """find(*args), asked again only where a fact is not what it was"""
        if self.facts != facts:
            self.answer, self.facts = find(*args), facts
        return self.answer

    def __reduce__(self) -> tuple[Any, ...]:
        return Memo, ()
