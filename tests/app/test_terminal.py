"""Terminal: whatever goes wrong is one message, also where something else caught it first."""

from __future__ import annotations

import os
import signal
import threading
import warnings

import pytest

from lowbit.app.terminal import INTERRUPTED, OK, USAGE, WRONG, Terminal, UsageError, command_line, remember


class Interrupted:
    """Gets Ctrl-C where Python can't raise."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_that_was_caught_is_not_lost(capsys: pytest.CaptureFixture[str]) -> None:
    terminal, before = Terminal(), signal.getsignal(signal.SIGINT)
    with terminal.guarded(resume="lowbit train"):
        Interrupted()
        terminal.heed()
        pytest.fail("it goes on")
    assert terminal.code == INTERRUPTED
    assert capsys.readouterr().err == "stopped; what is finished is kept. To go on: lowbit train\n"
    assert signal.getsignal(signal.SIGINT) is before
    with terminal.guarded():
        Interrupted()
    assert terminal.code == INTERRUPTED


def test_what_goes_wrong_in_a_thread_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device", "events")

    terminal, before = Terminal(), threading.excepthook
    with terminal.guarded():
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
    assert terminal.code == WRONG
    assert capsys.readouterr().err == "error: events: No space left on device\n"
    assert threading.excepthook is before


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (None, OK, ""),
        (UsageError("what?"), USAGE, "error: what?\n"),
        (ValueError("no"), WRONG, "error: no\n"),
        (LookupError("no"), WRONG, "error: no (not foreseen: --debug shows where)\n"),
    ],
)
def test_codes(error: Exception | None, code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal()
    with terminal.guarded():
        warnings.warn("nobody needs to know", stacklevel=1)
        if error is not None:
            raise error
    assert terminal.code == code
    assert capsys.readouterr().err == message


def test_other_processes_are_silent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    terminal = Terminal(as_json=True)
    with terminal.guarded():
        terminal.say("hello")
        terminal.table("all", ["a"], [[1]])
        terminal.answer({"ok": True})
        raise UsageError("what?")
    assert terminal.code == USAGE
    assert capsys.readouterr() == ("", "")
    with terminal.guarded(resume="lowbit train"):
        raise KeyboardInterrupt
    assert terminal.code == INTERRUPTED
    assert capsys.readouterr() == ("", "")
    remember(["train", "-o", "a b"])
    assert command_line() == "torchrun --nproc-per-node 2 -m lowbit.cli train -o 'a b'"
    with terminal.guarded():
        raise MemoryError("mine alone")
    assert capsys.readouterr().err.startswith("error: process 1: mine alone")
