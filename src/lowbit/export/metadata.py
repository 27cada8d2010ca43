"""What a file of ours says of itself, by its keys."""

from __future__ import annotations

# Of a file: its style, "qdq" or "integer", and the lowbit that wrote it.
STYLE = "lowbit.style"
VERSION = "lowbit.version"
# Of a node that gives the codes of an activation: the name of its quantizer.
QUANTIZER = "lowbit.quantizer"
# Of every node: the path of the module it belongs to.
LAYER = "lowbit.layer"
