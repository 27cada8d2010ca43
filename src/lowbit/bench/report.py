"""What a run says: a table to read, and JSON with everything that it depends on."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from lowbit.bench.runner import Row

_COLUMNS = ("time", "/floor", "/lowbit", "spread", "peak", "saved")
_PACKAGES = ("lowbit", "torch", "triton", "torchao", "brevitas")
LEGEND = (
    "time: median of one call. /floor: times the time to move the fewest possible bytes at the copy's rate. /lowbit: "
    "times ours.\nspread: interquartile range of /floor over its median. peak, saved: memory of one call, and what "
    "autograd holds, in units of x."
)


def describe(rows: Sequence[Row]) -> str:
    """One case as a block of text: its name and floor, then a line for each contender."""
    case = rows[0].case
    copies = case.floor_bytes / case.copy_bytes
    width = max(20, *(len(row.contender) for row in rows))
    head = f"  {'':{width}}" + "".join(f"{name:>10}" for name in _COLUMNS)
    lines = [f"{case.name}   floor: {copies:.3g} copies, {case.floor_bytes / 1e6:.4g} MB", head]
    for row in rows:
        if row.status == "ok":
            line = f"  {row.contender:{width}}" + "".join(f"{cell:>10}" for cell in _cells(row))
            lines.append(f"{line}  {row.note}".rstrip())
        else:
            lines.append(f"  {row.contender:{width}}{row.status:>10}  {row.note}")
    return "\n".join(lines)


def environment(device: torch.device) -> dict[str, Any]:
    """What the figures depend on: versions, device, processor, threads, how busy the machine is, date."""
    return {
        "versions": {name: _version(name) for name in _PACKAGES} | {"python": platform.python_version()},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cpu": _cpu_model(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,  # Windows has none
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def write_json(path: Path, rows: Iterable[Row], device: torch.device, command: str) -> None:
    """The rows, and all that they depend on."""
    report = environment(device) | {"command": command, "rows": [row.to_dict() for row in rows]}
    path.write_text(json.dumps(report, indent=1) + "\n")


def format_seconds(seconds: float) -> str:
    """Three digits and a unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def _cells(row: Row) -> list[str]:
    x = row.case.tensor_bytes
    return [
        "-" if row.seconds is None else format_seconds(row.seconds),
        _times(row.ratio_to_floor),
        _times(row.ratio_to_ours),
        "-" if row.spread is None else f"{row.spread:.0%}",
        _times(None if row.peak_bytes is None else row.peak_bytes / x),
        _times(None if row.saved_bytes is None else row.saved_bytes / x),
    ]


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
