"""Terminal: progress bars where someone watches, plain lines where not, one JSON object where a machine reads."""

from __future__ import annotations

import json
import shlex
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lowbit.app.processes import FirstFailedError, processes

OK, WRONG, USAGE, INTERRUPTED = 0, 1, 2, 130


class UsageError(Exception):
    """What the user asked for makes no sense, whatever the run does."""


class Terminal:
    """Where a command's words go: to stdout; with ``as_json`` to stderr, and one JSON object to stdout

    Of several processes, the first one speaks; the others say no more than what went wrong with them alone.
    """

    def __init__(self, *, as_json: bool = False, debug: bool = False) -> None:
        self.as_json, self.debug, self.here = as_json, debug, processes()
        self.console = Console(stderr=as_json, highlight=False, quiet=not self.here.is_first)
        self.code = OK
        self._interrupted = False

    def say(self, text: str = "") -> None:
        """A line, as it is."""
        self.console.print(text, markup=False, soft_wrap=True)

    def answer(self, value: dict[str, Any]) -> None:
        """The JSON object, where that is wanted."""
        if self.as_json and self.here.is_first:
            sys.stdout.write(json.dumps(value, allow_nan=False) + "\n")
            sys.stdout.flush()

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Rows under their columns; on a pipe, with spaces between."""
        if not self.console.is_terminal:
            lines = [list(columns), *([str(cell) for cell in row] for row in rows)]
            widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
            self.say(f"{title}:")
            for line in lines:
                self.say("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
            return
        table = Table(title=title, title_justify="left")
        for i, column in enumerate(columns):
            is_number = all(isinstance(row[i], int | float) for row in rows)
            table.add_column(column, justify="right" if is_number else "left", overflow="fold")
        for row in rows:
            table.add_row(*(str(cell) for cell in row))
        self.console.print(table)

    @contextmanager
    def bar(self) -> Iterator[Callable[[str, int, int, str], None]]:
        """A function of (name, done, total, text) that moves a bar; on a pipe it does nothing."""
        if not self.console.is_terminal or not self.here.is_first:
            yield _stand_still
            return
        columns = (
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=30),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[text]}"),
        )
        with Progress(*columns, console=self.console, transient=True) as progress:
            tasks: dict[str, Any] = {}

            def move(name: str, done: int, total: int, text: str) -> None:
                for other in [other for other in tasks if other != name]:
                    progress.remove_task(tasks.pop(other))
                if name not in tasks:
                    tasks[name] = progress.add_task(name, text=text)
                progress.update(tasks[name], completed=done, total=total or None, text=text)

            yield move

    @contextmanager
    def guarded(self, resume: str = "") -> Iterator[None]:
        """Whatever goes wrong inside is one message on stderr, and ``code``; ``resume`` is the command to go on with"""
        try:
            with warnings.catch_warnings(), self._interruptible(), _threads_heard():
                if not self.debug:
                    warnings.simplefilter("ignore")
                yield
        except KeyboardInterrupt:
            kept = f"; what is finished is kept. To go on: {resume}" if resume else ""
            self.code = INTERRUPTED
            if self.here.is_first:
                self._fail(INTERRUPTED, f"stopped{kept}")
        except FirstFailedError:
            self.code = WRONG
        except UsageError as error:
            if self.here.is_first:
                self._fail(USAGE, str(error))
            self.code = USAGE
        except Exception as error:  # the last door: whatever it is, the user gets one message
            self._fail(WRONG, _message(error), known=isinstance(error, _KNOWN))

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Ctrl-C raises, and is remembered: what runs at that moment may catch it, as Python does of a __del__."""

        def interrupt(number: int, frame: FrameType | None) -> None:
            self._interrupted = True
            raise KeyboardInterrupt

        try:
            before = signal.signal(signal.SIGINT, interrupt)
        except ValueError:  # not the main thread, which alone gets signals
            yield
            return
        hook = sys.unraisablehook

        def tell(unraisable: sys.UnraisableHookArgs) -> None:
            if unraisable.exc_type is not KeyboardInterrupt:
                hook(unraisable)

        sys.unraisablehook = tell
        try:
            yield
            self.heed()
        finally:
            sys.unraisablehook = hook
            signal.signal(signal.SIGINT, before)

    def heed(self) -> None:
        """Stop here, where Ctrl-C was pressed and something caught it"""
        if self._interrupted:
            raise KeyboardInterrupt

    def _fail(self, code: int, message: str, *, known: bool = True) -> None:
        self.code = code
        if not self.here.is_first:
            message = f"process {self.here.rank}: {message}"
        if self.debug:
            traceback.print_exc()
        elif not known:
            message += " (not foreseen: --debug shows where)"
        sys.stderr.write(f"{'' if code == INTERRUPTED else 'error: '}{message}\n")
        self.answer({"ok": False, "error": message, "exit_code": code})


@contextmanager
def _threads_heard() -> Iterator[None]:
    """What goes wrong in a thread, as in that of TensorBoard's files, is raised at the end, where nothing else was."""
    before, found = threading.excepthook, []

    def keep(failed: threading.ExceptHookArgs) -> None:
        if failed.exc_value is not None:
            found.append(failed.exc_value)

    threading.excepthook = keep
    try:
        yield
        if found:
            raise found[0]
    finally:
        threading.excepthook = before


def _stand_still(name: str, done: int, total: int, text: str) -> None:
    pass


_KNOWN = (ValueError, TypeError, RuntimeError, OSError, ImportError)


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{error.strerror}"
    return str(error) or type(error).__name__


_arguments: list[str] = []  # of this process


def remember(arguments: Sequence[str]) -> None:
    """Keep the arguments, for ``command_line``."""
    _arguments[:] = arguments


def command_line() -> str:
    """The command that was given, to copy and paste."""
    size, nodes = processes().size, processes().nodes
    program = ["lowbit"] if size == 1 else ["torchrun", "--nproc-per-node", str(size // nodes), "-m", "lowbit.cli"]
    return shlex.join([*program, *_arguments])
