"""The presets: recipes that are known to work, by name."""

from __future__ import annotations

from collections.abc import Callable

from lowbit.granularity import PerChannel, PerGroup, PerToken
from lowbit.recipe import QuantSpec, Recipe
from lowbit.scale import EMA, Learned, PerBatch
from lowbit.ste import SteKind

_PER_TOKEN = QuantSpec(bits=8, per=PerToken(), scale_mode=PerBatch())
_GROUPS = QuantSpec(bits=4, per=PerGroup(32), scale_mode=PerBatch())


def w8a8() -> Recipe:
    """s_w = max(abs(w)) / 127 per output channel;  s_x = (hi - lo) / 255 per tensor, lo and hi averaged over batches

    8-bit weights without the code -128, 8-bit affine activations: what integer hardware runs at full speed.
    """
    return Recipe(
        weight=QuantSpec(bits=8, per=PerChannel(0), scale_mode=PerBatch(), narrow=True),
        activation=QuantSpec(bits=8, symmetric=False, scale_mode=EMA(0.99)),
    )


def w8a8_dynamic() -> Recipe:
    """s_w = max(abs(w)) / 127 per output channel;  s_x = max(abs(x)) / 127 per token, from each batch

    Weights as w8a8; activations that need no calibration, as language models run them.
    """
    return Recipe(weight=w8a8().weight, activation=_PER_TOKEN)


def w4a8() -> Recipe:
    """s_w = max(abs(w)) / 7 per 32 weights of a row;  s_x = max(abs(x)) / 127 per token, from each batch"""
    return Recipe(weight=_GROUPS, activation=_PER_TOKEN)


def w4() -> Recipe:
    """s_w = max(abs(w)) / 7 per 32 weights of a row;  activations stay in float"""
    return Recipe(weight=_GROUPS)


def w2a2() -> Recipe:
    """s_w, s_x = learned, one per tensor, by LSQ's gradient

    2-bit weights and activations; an activation that cannot be negative has codes 0 to 3, any other -2 to 1. Its scale
    starts where the squared error is least: of the few values that a ReLU may leave, a mean says little.
    """
    return Recipe(
        weight=QuantSpec(bits=2, scale_mode=Learned("lsq")),
        activation=QuantSpec(bits=2, scale_mode=Learned("lsq+", batch_axis=0)),
    )


def ternary() -> Recipe:
    """w_q = s_w * clamp(round(w / s_w), -1, 1),  s_w = mean(abs(w));  s_x = max(abs(x)) / 127 per token

    dw = g for every w, as in BitNet b1.58: the clipped rule would stop each weight beyond the mean.
    """
    return Recipe(
        weight=QuantSpec(bits=2, narrow=True, scale_mode=PerBatch("mean_abs"), ste=SteKind.IDENTITY),
        activation=_PER_TOKEN,
    )


def binary() -> Recipe:
    """w_q = a * sign(w),  sign(0) = +1,  a = mean(abs(w)) per output channel;  s_x = max(abs(x)) / 127 per token"""
    return Recipe(
        weight=QuantSpec(bits=1, per=PerChannel(0), ste=SteKind.IDENTITY, method="binary"), activation=_PER_TOKEN
    )


def dorefa(weight_bits: int = 2, activation_bits: int = 2) -> Recipe:
    """w_q = 2 * q_k(tanh(w) / (2 * max(abs(tanh(w)))) + 1/2) - 1,  x_q = q_k(min(max(x, 0), 1))

    q_k(x) = round((2^k - 1) * x) / (2^k - 1), with k the bits of each.
    """
    return Recipe(
        weight=QuantSpec(bits=weight_bits, method="dorefa_weight"),
        activation=QuantSpec(bits=activation_bits, method="dorefa_activation"),
    )


def presets() -> dict[str, Callable[..., Recipe]]:
    """{name: function} of every preset; none needs an argument."""
    functions = (w8a8, w8a8_dynamic, w4a8, w4, w2a2, ternary, binary, dorefa)
    return {function.__name__: function for function in functions}
