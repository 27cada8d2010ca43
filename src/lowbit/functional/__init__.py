"""Differentiable ops: each validates once, chooses a plan and defines its backward."""

from lowbit.functional.binary import binarize
from lowbit.functional.codes import dequantize, dequantize_backward, quantize, quantize_backward
from lowbit.functional.fake_quantize import fake_quantize, fake_quantize_backward
from lowbit.functional.learned import learned_fake_quantize
from lowbit.functional.straight_through import (
    affine_k_bit_quantize,
    ceil,
    ceil_atgf,
    clamp,
    clamp_atgf,
    clamp_backward,
    clamp_by_linear,
    floor,
    floor_atgf,
    k_bit_quantize,
    k_bit_quantize_atgf,
    k_bit_quantize_forward,
    round,
    round_atgf,
    step_quantize,
    step_quantize_atgf,
    step_quantize_forward,
)

__all__ = [
    "affine_k_bit_quantize",
    "binarize",
    "ceil",
    "ceil_atgf",
    "clamp",
    "clamp_atgf",
    "clamp_backward",
    "clamp_by_linear",
    "dequantize",
    "dequantize_backward",
    "fake_quantize",
    "fake_quantize_backward",
    "floor",
    "floor_atgf",
    "k_bit_quantize",
    "k_bit_quantize_atgf",
    "k_bit_quantize_forward",
    "learned_fake_quantize",
    "quantize",
    "quantize_backward",
    "round",
    "round_atgf",
    "step_quantize",
    "step_quantize_atgf",
    "step_quantize_forward",
]
