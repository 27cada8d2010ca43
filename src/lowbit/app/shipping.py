"""What ``lowbit export`` and ``lowbit verify`` do with the model of a run."""

from __future__ import annotations

from pathlib import Path

from lowbit.app.run import ONNX, Run
from lowbit.app.sources import example_inputs
from lowbit.conversion import convert
from lowbit.export.artifact import save
from lowbit.export.onnx import STYLES, export_onnx
from lowbit.export.verification import Verification
from lowbit.export.verify import verify

_SHOWN = 256  # samples


def export_run(folder: Path, path: Path, style: str | None = None) -> int:
    """Write the run's model to an ONNX or safetensors file, by the end of its name. Gives the bytes."""
    if path.suffix not in (".onnx", ".safetensors"):
        raise ValueError(f"{path} must end in .onnx or .safetensors, which says what to write")
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is not a folder; make it first")
    run = Run.open(folder)
    model, data = run.model()
    chosen = style or run.config.style
    if path.suffix == ".onnx":
        export_onnx(model, example_inputs(data), path, chosen)
    else:
        save(convert(model, STYLES[chosen]), path)
    return path.stat().st_size


def verify_run(folder: Path, path: Path | None = None) -> Verification:
    """Compare a file, by default the run's own, with the run's model, on test data"""
    run = Run.open(folder)
    path = run.folder / ONNX if path is None else path
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file; name an ONNX file, such as {run.folder / ONNX}")
    model, data = run.model()
    return verify(model, path, example_inputs(data, "test", _SHOWN))
