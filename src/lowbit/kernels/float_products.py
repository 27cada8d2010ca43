"""Products of floats, by the faster of the two libraries that torch has for the CPU.

torch takes MKL for float32, which uses half of each vector on a CPU with AVX-512 that is not Intel's; oneDNN uses all.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from lowbit.kernels import native, native_products, plan
from lowbit.tracing import at_trace_time, opaque


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of two matrices"""
    return _run(a, b.t(), None) if wants_rows(a, b) else a @ b


def linear(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """x @ w^T + b of two matrices, whatever autocast says"""
    if wants_rows(x, w) and (bias is None or bias.shape == w.shape[:1]):
        return _run(x, w, bias)
    with torch.autocast(x.device.type, enabled=False):
        return functional.linear(x, w, bias)


def transpose(x: Tensor) -> Tensor:
    """x^T of a matrix, row by row"""
    if torch.compiler.is_compiling() or not plan.runs("native", x) or not x.is_contiguous():
        return x.t().contiguous()
    return native_products.transpose(x)


@at_trace_time
def has_faster() -> bool:
    """Whether there is another library than the one that torch takes for float32, and it is the faster one"""
    return bool(torch.backends.mkldnn.enabled) and _has_faster()


@cache
def _has_faster() -> bool:
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or plan.absence("native") or native.loaded().is_intel:
        return False
    x, w = (torch.ones(rows, 3, dtype=torch.float32, device="cpu") for rows in (2, 4))
    try:
        return torch.equal(_onednn(x, w, None), x @ w.t())
    except (AttributeError, TypeError, RuntimeError):  # the op is one of torch's own, and may be another elsewhere
        return False


def wants_rows(*matrices: Tensor) -> bool:
    """Whether oneDNN multiplies these, of which the first then has to lie row by row

    Its product has no derivative, and tracers want torch's own.
    """
    for matrix in matrices:
        if matrix.device.type != "cpu" or matrix.dtype != torch.float32 or not matrix.numel():
            return False
    if torch.compiler.is_compiling():
        return all(map(plan.is_plain, matrices)) and plan.can_be_opaque("native") and has_faster()
    if torch.is_grad_enabled() or plan.is_traced(*matrices):
        return False
    return plan.runs("native", matrices[0]) and has_faster()


def _run(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = (torch.ops.lowbit.float_linear if torch.compiler.is_compiling() else _onednn)(x, w, bias)
    return y


def _onednn(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """x @ w^T + b; of w the op takes rows or columns that lie one behind another, of b it does not ask how it lies"""
    x = transpose(x.t()) if x.t().is_contiguous() else x
    (outputs, inputs), (step, other) = w.shape, w.stride()
    w = w if (other == 1 and step >= inputs) or (step == 1 and other >= outputs) else w.contiguous()
    bias = None if bias is None else bias.contiguous()
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, w, bias, "none", [], "")  # noqa: SLF001
    return y


def _fake(x: Tensor, w: Tensor, _bias: Tensor | None) -> Tensor:
    return x.new_empty((x.shape[0], w.shape[0]))


opaque("float_linear", _onednn, _fake)
