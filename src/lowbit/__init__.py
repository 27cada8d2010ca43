"""lowbit: quantization-aware training in PyTorch, right to the bit."""

from lowbit import functional, observers, recipes
from lowbit.fake_quantize import FakeQuantize
from lowbit.granularity import PerBlock, PerChannel, PerGroup, PerTensor, PerToken
from lowbit.grid import Grid
from lowbit.kernels.plan import Plan
from lowbit.model import calibrate, estimate_batch_norm, freeze, prepare, restore, scale_parameters
from lowbit.noise import noise
from lowbit.oscillation import Oscillation
from lowbit.ranks import replicate
from lowbit.recipe import QuantSpec, Recipe, Rule
from lowbit.scale import EMA, Fixed, Learned, PerBatch, ScaleMode
from lowbit.schedule import Schedule
from lowbit.ste import SteKind
from lowbit.summary import summary

__version__ = "0.1.0"

__all__ = [
    "EMA",
    "FakeQuantize",
    "Fixed",
    "Grid",
    "Learned",
    "Oscillation",
    "PerBatch",
    "PerBlock",
    "PerChannel",
    "PerGroup",
    "PerTensor",
    "PerToken",
    "Plan",
    "QuantSpec",
    "Recipe",
    "Rule",
    "ScaleMode",
    "Schedule",
    "SteKind",
    "calibrate",
    "estimate_batch_norm",
    "freeze",
    "functional",
    "noise",
    "observers",
    "prepare",
    "recipes",
    "replicate",
    "restore",
    "scale_parameters",
    "summary",
]
