"""Convolutions of codes: sums in int32, which are exact, and then scales and bias in one order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from lowbit.kernels import native_products, plan
from lowbit.kernels.precision import math_dtype

# Bytes of values that lie otherwise than wanted, at a time.
_PART = 2**22


class Steps(NamedTuple):
    """How a window moves over images: stride, padding on both sides, and dilation, along each axis"""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    def positions(self, sizes: Sequence[int], kernel: Sequence[int]) -> list[int]:
        """How many positions a window of this size has along each axis."""
        axes = zip(sizes, kernel, *self, strict=True)
        return [max((size + 2 * pad - step * (taps - 1) - 1) // move + 1, 0) for size, taps, move, pad, step in axes]


def refusal(device: str) -> str:
    """Why a device has no convolution of codes that is faster than one of floats; "" where it has"""
    if device != "cpu":
        return f"there is no convolution of codes on {device}"
    fast = torch.backends.mkldnn.enabled and _is_exact()
    return (
        "" if fast else "oneDNN's convolution of int8 is not exact on this CPU, switched off, or another in this torch"
    )


@cache
def _is_exact() -> bool:
    """Whether oneDNN's convolution of int8 is there, and exact: without VNNI it adds two products in 16 bits"""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.onednn, "qconv2d_pointwise")):
        return False
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):  # elsewhere it is exact, and slow
        return False
    ends = torch.tensor([-128, 127], dtype=torch.int8, device="cpu")
    x, w = (
        ends[torch.arange(512, device="cpu") // 3 % 2].view(1, 32, 4, 4),
        ends[torch.arange(9216, device="cpu") // 5 % 2].view(32, 32, 3, 3),
    )
    one, steps = torch.ones((), device="cpu"), Steps((1, 1), (1, 1), (1, 1))
    try:
        y = _convolve(x, w, one.expand(32), -128, None, steps, torch.float32)
    except (TypeError, RuntimeError):  # the op is one of torch's own, and may take other arguments elsewhere
        return False
    return torch.equal(y.double(), functional.conv2d(x.double() + 128, w.double(), padding=1))


def scaled_convolution(
    q_x: Tensor,
    q_w: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    zero_point: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    steps: Steps,
    dtype: torch.dtype,
) -> Tensor:
    """y[n, o] = float(sum (q_x[n] - z) * q_w[o]) * (s_x[n] * s_w[o]) + b[o], over the window of each position

    int8 codes; scales are one number, or one for each image and each output. Each float step is rounded once, as in
    ``scaled_product``. y lies in memory as torch's own convolution of such tensors would.
    """
    wide, still = math_dtype(dtype), [1] * len(steps.stride)
    x_scale, w_scale = x_scale.to(wide), w_scale.to(wide).expand(q_w.shape[0])
    bias = None if bias is None else bias.to(wide).contiguous()
    point = 0 if zero_point is None else int(zero_point)
    if dtype == torch.float64 or q_x.numel() == 0 or refusal(q_x.device.type):
        x, pads = q_x.double() - point, [0] * len(still)
        y = torch.convolution(x, q_w.double(), None, *steps, False, pads, 1).to(wide)
    elif x_scale.dim() == 0:
        fused = dtype if dtype == torch.bfloat16 else torch.float32
        return _convolve(q_x, q_w, x_scale * w_scale, point, bias, steps, fused).to(dtype)
    else:
        y = _convolve(q_x, q_w, torch.ones_like(w_scale), point, None, steps, torch.float32)
    y = y.mul_((x_scale.view(-1, 1) * w_scale).view(-1, len(w_scale), *still))
    return (y if bias is None else y.add_(bias.view(-1, *still))).to(dtype)


def _convolve(
    q_x: Tensor, q_w: Tensor, scale: Tensor, zero_point: int, bias: Tensor | None, steps: Steps, dtype: torch.dtype
) -> Tensor:
    """y[n, o] = float(sum (q_x[n] - z) * q_w[o]) * s[o] + b[o], in float32 or bfloat16

    oneDNN takes codes without a sign, and both ways channels that lie last: where they do not, some images at a time,
    which the cache holds between the two.
    """
    onednn, rest = torch.ops.onednn, (list(steps.stride), list(steps.padding), list(steps.dilation), 1)
    packed = onednn.qconv_prepack(
        q_w.contiguous(), torch.ones(1, device="cpu"), 1.0, zero_point + 128, *rest, list(q_x.shape)
    )
    convolve = getattr(onednn, f"qconv{q_x.dim() - 2}d_pointwise")
    scale, nothing = scale.contiguous(), torch.zeros(scale.shape, dtype=torch.int32, device="cpu")

    def run(unsigned: Tensor) -> Tensor:
        own = unsigned.movedim(-1, 1), 1.0, zero_point + 128, packed, scale, nothing, bias
        y: Tensor = convolve(*own, *rest, 1.0, 0, dtype, "none", [], "")
        return y

    lies_last = [not q.is_contiguous() and q.movedim(1, -1).is_contiguous() for q in (q_x, q_w)]
    if any(lies_last) or not plan.runs("native", q_x):
        y = run(q_x.movedim(1, -1).contiguous().view(torch.uint8) ^ 128)
        return y if any(lies_last) else y.contiguous()
    y = torch.empty((len(q_x), len(q_w), *steps.positions(q_x.shape[2:], q_w.shape[2:])), dtype=dtype, device="cpu")
    count = max(_PART // max(y[0].nbytes, 1), 1)
    for part, codes in zip(y.split(count), q_x.split(count), strict=True):
        native_products.put_channels_first(run(native_products.put_channels_last(codes)).movedim(1, -1), part)
    return y
