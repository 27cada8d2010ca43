"""A line of code knows its room: what may appear only in some files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import lowbit

SOURCE = Path(lowbit.__file__).parent

ROOMS = {
    r"\bctx\b|autograd\.Function": r"functional/",
    r"nn\.Parameter\(|register_buffer": r"scale_state\.py|observers\.py|nn/|bench/networks\.py",
    r"\.round\(|\.round_\(|torch\.round": r"kernels/|scale\.py|bench/contenders\.py",
    r"\btl\.": r"kernels/triton(_formulas|_linear|_products|_rows)?\.py",
    r"\n *import triton|from triton": r"kernels/triton|kernels/tiling",
    r"\bimport onnx": r"export/",
    r"\bprint\(|os\.environ|sys\.argv": r"cli\.py|app/|bench/__main__\.py",
    r"group_axes|split_shape": r"granularity\.py",
}


def code_of(path: Path) -> str:
    """The file without docstrings and comments."""
    text = re.sub(r'"""(?s:.*?)"""', "", path.read_text())
    return re.sub(r"#.*", "", text)


@pytest.mark.parametrize("pattern", ROOMS)
def test_lines_are_in_their_room(pattern: str) -> None:
    room = re.compile(ROOMS[pattern])
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if not room.match(name):
            found = re.search(pattern, code_of(path))
            assert found is None, f"{name} holds {found.group()!r}, which belongs in {room.pattern}"


def test_files_are_short() -> None:
    long = {p.name: n for p in SOURCE.rglob("*.py") if (n := len(p.read_text().splitlines())) > 500}
    assert not long
