"""Options that several commands take, and what their values lead to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from lowbit.app.terminal import UsageError

ConfigFile = Annotated[Path | None, typer.Option("--config", "-c", help="A TOML file of these options.")]
DataName = Annotated[str | None, typer.Option(help="digits, mnist, fashion-mnist, cifar10, or text.")]
DataFolder = Annotated[str | None, typer.Option(help="Where the data's files are; digits needs none.")]
ModelName = Annotated[
    str | None, typer.Option(help="convnet, package.module:function, or a transformers model's folder.")
]
FloatEpochs = Annotated[int | None, typer.Option(help="Epochs in float, before quantizing.")]
Epochs = Annotated[int | None, typer.Option(help="Epochs with quantizers.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout; everything else on stderr.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@contextmanager
def wrong_usage() -> Iterator[None]:
    """What is wrong with a config is wrong usage."""
    try:
        yield
    except FileNotFoundError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from error
    except (TypeError, ValueError, OSError) as error:
        raise UsageError(str(error)) from error
