"""Memo: an answer, and the facts that it was found from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Memo:
    """The last answer to a question that is asked on every call; a copy of it knows nothing yet."""

    __slots__ = ("known",)

    def __init__(self) -> None:
        self.known: tuple[tuple[Any, ...], Any] | None = None  # the facts and the answer: threads see both or neither

    def recall(self, facts: tuple[Any, ...], find: Callable[..., Any], *args: Any) -> Any:
        """find(*args), asked again only where a fact is not what it was"""
        known = self.known
        if known is None or known[0] != facts:
            self.known = known = facts, find(*args)
        return known[1]

    def __reduce__(self) -> tuple[Any, ...]:
        return Memo, ()
