"""What a file of ours says of itself, by its keys, and what it is to say of codes."""

from __future__ import annotations

from typing import NamedTuple


class CodeKind(NamedTuple):
    """How many bits the codes of a weight take in a file, the sign among them where they have one."""

    bits: int
    signed: bool


# Of a file: its style, "qdq" or "integer", and the lowbit that wrote it.
STYLE = "lowbit.style"
VERSION = "lowbit.version"
# Of a node that gives the codes of an activation: the name of its quantizer.
QUANTIZER = "lowbit.quantizer"
# Of every node: the path of the module it belongs to.
LAYER = "lowbit.layer"
