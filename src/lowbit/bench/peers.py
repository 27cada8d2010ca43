"""torchao's and Brevitas' quantizers, where installed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from lowbit.bench.contenders import (
    Contender,
    Runnable,
    UnfitError,
    copy,
    hand_made,
    kernels,
    lowbit,
    lsq_factor,
    relu,
    require_clipping_rule,
    torch_op,
)
from lowbit.bench.data import Data
from lowbit.bench.registry import GRID, Case, Op
from lowbit.granularity import PerChannel, PerGroup, PerTensor, PerToken


def torchao(case: Case, data: Data) -> Runnable:
    """torchao.quantization.qat.IntxFakeQuantizer at a given, dynamic or learned scale"""
    qat = import_peer("torchao.quantization.qat")
    if case.op in (Op.QUANTIZE, Op.DEQUANTIZE):
        return _torchao_codes(case, data)
    require_clipping_rule(case, "torchao")
    if case.op is Op.EMA:
        raise UnfitError("torchao has no moving average")
    granularity = _torchao_granularity(case)
    quantizer = qat.IntxFakeQuantizer(
        qat.IntxFakeQuantizeConfig(
            torch.int8,
            **granularity,
            is_symmetric=not isinstance(case.per, PerToken),  # it has no symmetric tokens
            is_dynamic=case.op is Op.PER_BATCH,
            range_learning=case.op is Op.LEARNED,
        )
    )
    if case.op is Op.PER_BATCH:
        return Runnable(quantizer)
    scale = data.scale.detach().clone()
    scale = scale if isinstance(case.per, PerGroup) else scale.unsqueeze(-1)
    quantizer.zero_point = torch.zeros_like(scale, dtype=torch.int32)
    quantizer.scale = scale.requires_grad_(case.op is Op.LEARNED)
    return Runnable(quantizer, scale if case.op is Op.LEARNED else None, lsq_factor(case))


def _torchao_granularity(case: Case) -> dict[str, Any]:
    if isinstance(case.per, PerToken):
        return {"granularity": "per_token"}
    if len(case.shape) == 2 and case.per == PerChannel(0):
        return {"granularity": "per_channel"}
    if len(case.shape) == 2 and isinstance(case.per, PerGroup):
        return {"granularity": "per_group", "group_size": case.per.size}
    raise UnfitError("torchao quantizes tokens, and a matrix's rows and groups")


def _torchao_codes(case: Case, data: Data) -> Runnable:
    primitives = import_peer("torchao.quantization.quant_primitives")
    if case.has_backward:
        raise UnfitError("torchao's quantize_affine and dequantize_affine have no gradient")
    groups = data.scale.shape
    block = list(case.shape)
    if isinstance(case.per, PerChannel):
        block[case.per.axis] = 1
    elif not isinstance(case.per, PerTensor):
        block = [1] * (len(case.shape) - 1) + [case.per.group_size(case.shape)]
    scale, zero_point = data.scale, torch.zeros(groups, dtype=torch.int32, device=data.scale.device)
    limits = (GRID.quant_min, GRID.quant_max)
    if case.op is Op.QUANTIZE:
        op = primitives.quantize_affine
        return Runnable(lambda x: op(x.detach(), block, scale, zero_point, torch.int8, *limits))
    op = primitives.dequantize_affine
    return Runnable(lambda q: op(q, block, scale, zero_point, torch.int8, *limits, output_dtype=case.dtype))


def brevitas(case: Case, data: Data) -> Runnable:
    """brevitas.core.quant.IntQuant with RoundSte and TensorClamp, at a given or learned scale"""
    core, wrapper = import_peer("brevitas.core.quant"), import_peer("brevitas.core.function_wrapper")
    if case.op not in (Op.FAKE_QUANTIZE, Op.LEARNED):
        raise UnfitError("only Brevitas' IntQuant is measured, which takes a given scale")
    require_clipping_rule(case, "Brevitas")
    quantizer = core.IntQuant(
        narrow_range=False,
        signed=True,
        input_view_impl=wrapper.Identity(),
        float_to_int_impl=wrapper.RoundSte(),
        tensor_clamp_impl=wrapper.TensorClamp(),
    )
    learned = data.scale.detach().clone().requires_grad_() if case.op is Op.LEARNED else None
    scale = data.scale if learned is None else learned
    zero_point = torch.zeros((), device=scale.device)
    bits = torch.tensor(float(GRID.bits), device=scale.device)
    per = case.per

    def forward(x: Tensor) -> Tensor:
        split = per.split(x)
        y: Tensor = quantizer(per.spread(scale, split), zero_point, bits, split)
        return per.join(y, x.shape).to(x.dtype)

    return Runnable(forward, learned, lsq_factor(case))


def import_peer(module: str) -> Any:
    """A peer's module; where it is missing, its rows say so."""
    try:
        return import_module(module)
    except ImportError as error:
        missing = error.name or module
        own = missing.partition(".")[0] == module.partition(".")[0]
        raise UnfitError("not installed" if own else f"not importable: {missing} is missing") from error


CONTENDERS = (
    Contender("copy", copy, is_yardstick=True),
    Contender("lowbit", lowbit, is_ours=True),
    Contender("lowbit kernels", kernels, is_ours=True),
    Contender("lowbit compiled", lowbit, is_ours=True, compiled=True),
    Contender("torch", torch_op),
    Contender("hand-made", hand_made),
    Contender("hand-made compiled", hand_made, compiled=True),
    Contender("torchao", torchao),
    Contender("torchao compiled", torchao, compiled=True),
    Contender("brevitas", brevitas),
    Contender("relu", relu, is_yardstick=True),
)
