"""The ops that backends implement: what each takes, by name."""

from __future__ import annotations

from typing import NamedTuple


class Op(NamedTuple):
    """What an op takes: its tensors in order (a zero point may be left out), its numbers, its records."""

    tensors: tuple[str, ...]
    numbers: tuple[str, ...] = ()
    records: tuple[str, ...] = ()
    # Whether it adds up: then its bits are each backend's own.
    sums: bool = False


PARAMS = ("scale", "zero_point")
_X, _GRAD = ("x",), ("grad_output", "x")

OPS: dict[str, Op] = {
    "round": Op(_X),
    "ceil": Op(_X),
    "floor": Op(_X),
    "clamp": Op(_X, ("min_value", "max_value")),
    "clamp_backward": Op(_GRAD, ("min_value", "max_value")),
    "step_quantize": Op(_X, ("step",)),
    "k_bit_quantize": Op(_X, ("k",)),
    "fake_quantize": Op(_X + PARAMS, records=("grid", "per")),
    "fake_quantize_backward": Op(_GRAD + PARAMS, records=("grid", "per", "ste")),
    "fake_quantize_per_batch": Op(_X, records=("grid", "per")),
    "quantize_per_batch": Op(_X, records=("grid", "per")),
    "gradient_bits": Op(_X + PARAMS, records=("grid", "per", "ste")),
    "learned_fake_quantize": Op(_X + PARAMS, records=("grid", "per")),
    "learned_fake_quantize_backward": Op(_GRAD + PARAMS, records=("grid", "per", "ste"), sums=True),
    "quantize": Op(_X + PARAMS, records=("grid", "per")),
    "quantize_backward": Op(_GRAD + PARAMS, records=("grid", "per")),
    "dequantize": Op(("q", *PARAMS), records=("per",)),
    "dequantize_backward": Op(("grad_output", "scale"), records=("per",)),
    "abs_max": Op(_X, records=("per",)),
    "min_max": Op(_X, records=("per",)),
    "ema_scale": Op(("magnitude", "scale", "initialized"), ("decay",), ("grid",)),
    "ema_range": Op(
        ("low", "high", "state_low", "state_high", "scale", "zero_point", "initialized"), ("decay",), ("grid",)
    ),
    "mean_abs": Op(_X, records=("per",), sums=True),
    "mean_std": Op(_X, records=("per",), sums=True),
}
