"""lowbit: quantization-aware training in PyTorch, right to the bit."""

from lowbit import functional, observers
from lowbit.fake_quantize import FakeQuantize
from lowbit.granularity import PerBlock, PerChannel, PerGroup, PerTensor, PerToken
from lowbit.grid import Grid
from lowbit.kernels.plan import Plan
from lowbit.scale import EMA, Fixed, Learned, PerBatch, ScaleMode
from lowbit.ste import SteKind

__version__ = "0.1.0"

__all__ = [
    "EMA",
    "FakeQuantize",
    "Fixed",
    "Grid",
    "Learned",
    "PerBatch",
    "PerBlock",
    "PerChannel",
    "PerGroup",
    "PerTensor",
    "PerToken",
    "Plan",
    "ScaleMode",
    "SteKind",
    "functional",
    "observers",
]
