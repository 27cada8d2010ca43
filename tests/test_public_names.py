"""The public names, frozen: adding or removing one is a decision, made here."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import lowbit
import lowbit.functional
import lowbit.observers

NAMES = {
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
    "Oscillation",
    "Plan",
    "QuantSpec",
    "Recipe",
    "Rule",
    "ScaleMode",
    "Schedule",
    "SteKind",
    *("convert", "export_onnx", "load", "save", "verify"),
    *("calibrate", "estimate_batch_norm", "freeze", "noise", "prepare", "replicate", "restore"),
    *("scale_parameters", "weights_once", "summary"),
    *("functional", "observers", "recipes"),
}

FUNCTIONAL = {
    *("round", "ceil", "floor", "clamp", "clamp_backward"),
    *("step_quantize", "step_quantize_forward", "k_bit_quantize", "k_bit_quantize_forward"),
    *("affine_k_bit_quantize", "clamp_by_linear"),
    *("round_atgf", "ceil_atgf", "floor_atgf", "clamp_atgf", "step_quantize_atgf", "k_bit_quantize_atgf"),
    *("fake_quantize", "fake_quantize_backward", "learned_fake_quantize", "binarize"),
    *("quantize", "quantize_backward", "dequantize", "dequantize_backward"),
}


def test_lowbit() -> None:
    assert set(lowbit.__all__) == NAMES
    assert all(hasattr(lowbit, name) for name in NAMES)


def test_functional() -> None:
    assert set(lowbit.functional.__all__) == FUNCTIONAL
    assert all(hasattr(lowbit.functional, name) for name in FUNCTIONAL)


@pytest.mark.parametrize(
    ("function", "signature"),
    [
        (lowbit.functional.fake_quantize, "x scale zero_point grid per ste"),
        (lowbit.functional.fake_quantize_backward, "grad_output x scale zero_point grid per ste"),
        (lowbit.functional.learned_fake_quantize, "x scale zero_point grid per ste grad_scale method batch_axis"),
        (lowbit.functional.quantize, "x scale zero_point grid per dtype"),
        (lowbit.functional.quantize_backward, "grad_output x scale zero_point grid per"),
        (lowbit.functional.dequantize, "q scale zero_point per dtype"),
        (lowbit.functional.dequantize_backward, "grad_output scale per"),
        (lowbit.functional.binarize, "x per ste"),
        (lowbit.functional.clamp_backward, "grad_output x min_value max_value"),
        (lowbit.functional.clamp_by_linear, "x eps"),
        (
            lowbit.FakeQuantize,
            "bits symmetric scale zero_point per ste scale_mode narrow signed observer",
        ),
        (lowbit.Plan.select, "op like grid per ste prefer"),
        (lowbit.Recipe, "weight activation output bias rules allow_float fold integer_products"),
        (lowbit.Rule, "match weight activation output bias"),
        (lowbit.prepare, "model recipe example_inputs inplace"),
        (lowbit.calibrate, "model batches"),
        (lowbit.noise, "model batch"),
    ],
)
def test_signatures(function: object, signature: str) -> None:
    assert " ".join(inspect.signature(function).parameters) == signature


def test_import_needs_only_torch_and_numpy() -> None:
    """In a fresh process, no optional package is imported."""
    optional = [
        "torch._dynamo",
        "onnx",
        "onnxruntime",
        "sklearn",
        "matplotlib",
        "lightning",
        "transformers",
        "triton",
        "scipy",
    ]
    code = f"import lowbit, sys; print([name for name in {optional!r} if name in sys.modules])"
    loaded_by_torch = "import torch, sys; " + code.split("; ", 1)[1]
    found = [
        subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout
        for text in (code, loaded_by_torch)
    ]
    assert found[0] == found[1]
