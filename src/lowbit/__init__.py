"""lowbit: quantization-aware training in PyTorch, right to the bit."""

from lowbit import functional, observers, recipes
from lowbit.conversion import convert
from lowbit.export.artifact import load, save
from lowbit.export.onnx import export_onnx
from lowbit.export.verify import verify
from lowbit.fake_quantize import FakeQuantize
from lowbit.granularity import PerBlock, PerChannel, PerGroup, PerTensor, PerToken
from lowbit.grid import Grid
from lowbit.kernels.plan import Plan
from lowbit.model import calibrate, estimate_batch_norm, freeze, prepare, restore, scale_parameters, weights_once
from lowbit.noise import noise
from lowbit.oscillation import Oscillation
from lowbit.ranks import replicate
from lowbit.recipe import QuantSpec, Recipe, Rule
from lowbit.scale import EMA, Fixed, Learned, PerBatch, ScaleMode
from lowbit.schedule import Schedule
from lowbit.ste import SteKind
from lowbit.summary import summary
from lowbit.version import __version__ as __version__

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
    "convert",
    "estimate_batch_norm",
    "export_onnx",
    "freeze",
    "functional",
    "load",
    "noise",
    "observers",
    "prepare",
    "recipes",
    "replicate",
    "restore",
    "save",
    "scale_parameters",
    "summary",
    "verify",
    "weights_once",
]
