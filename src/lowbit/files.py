"""Files that are written whole or not at all."""

from __future__ import annotations

import io
import json
import os
import uuid
from pathlib import Path
from typing import Any

import torch


def write_whole(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, also where the process is killed or the disk is full."""
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with draft.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        draft.unlink(missing_ok=True)
    _sync_directory(path.parent)


def write_json(path: Path, value: Any) -> None:
    """A value as JSON"""
    write_whole(path, json.dumps(value, indent=2, allow_nan=False).encode())


def write_tensors(path: Path, value: Any) -> None:
    """A value as torch.save has it"""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    write_whole(path, buffer.getvalue())


def _sync_directory(directory: Path) -> None:
    """Bring the file's new name to the disk as well; where directories can't be opened, as on Windows, it is there."""
    if os.name == "posix":
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
