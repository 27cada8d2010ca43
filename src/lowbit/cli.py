"""lowbit: the command line. ``main`` is its door; the commands are in ``lowbit.app.commands``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

_EXTRA = "the command line needs {name}, which is not installed; install it: pip install 'lowbit[app]'\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, 1 where the run or the verification is wrong, 2 for wrong usage, 130 after Ctrl-C."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        from lowbit.app.commands import run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.stderr.write(_EXTRA.format(name=error.name))
        return 1
    except KeyboardInterrupt:
        return 130
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
