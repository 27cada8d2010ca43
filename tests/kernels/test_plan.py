from __future__ import annotations

import re

import pytest
import torch

import inputs
import lowbit.functional as F
from compare import assert_same_bits
from lowbit import Grid, PerChannel, PerGroup, PerTensor, Plan, SteKind
from lowbit.kernels import native
from lowbit.kernels import plan as plan_module
from lowbit.kernels.ops import OPS

GRID, PER = Grid(4), PerChannel(0)


def arguments(device: torch.device) -> dict[str, torch.Tensor]:
    x = inputs.random((6, 8)).float().to(device)
    scale, zero_point = inputs.params(x, PER, GRID, affine=True)
    q = F.quantize(x, scale, zero_point, grid=GRID, per=PER)
    return {"grad_output": torch.randn_like(x), "x": x, "q": q, "scale": scale, "zero_point": zero_point}


CALLS = {
    "fake_quantize": ("x", "scale", "zero_point"),
    "fake_quantize_backward": ("grad_output", "x", "scale", "zero_point"),
    "learned_fake_quantize": ("x", "scale", "zero_point"),
    "quantize": ("x", "scale", "zero_point"),
    "quantize_backward": ("grad_output", "x", "scale", "zero_point"),
    "dequantize_backward": ("grad_output", "scale"),
}


@pytest.mark.parametrize("op", CALLS)
def test_run_is_what_functional_computes(op: str, device: torch.device) -> None:
    tensors = arguments(device)
    args = [tensors[name] for name in CALLS[op]]
    plan = Plan.select(op, like=tensors["x"], grid=GRID, per=PER, ste=SteKind.HARD_TANH)
    options: dict[str, object] = {"per": PER}
    if "grid" in OPS[op].records:
        options["grid"] = GRID
    if op in ("fake_quantize_backward", "learned_fake_quantize"):
        options["ste"] = SteKind.HARD_TANH
    assert plan.can_implement(*args) == (True, "")
    assert_same_bits(plan.run(*args), getattr(F, op)(*args, **options))


def test_a_gradient_in_one_line(device: torch.device) -> None:
    x, scale = inputs.random((5,)).float().to(device), torch.tensor(0.5, device=device)
    gradient = Plan.select("quantize_backward", like=x).run(torch.ones_like(x), x, scale)
    assert_same_bits(gradient, F.quantize_backward(torch.ones_like(x), x, scale))


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_a_plan_and_a_reference_kernel(op: str) -> None:
    plan = Plan.select(op, torch.zeros(6, 8), grid=GRID, per=PER, ste=SteKind.TANH, prefer="reference")
    assert plan.backend == "reference"
    guarantee = plan.precision_guarantee
    assert guarantee.math_dtype == torch.float32
    assert guarantee.deterministic
    assert guarantee.accumulator == (torch.float32 if OPS[op].sums else None)
    assert guarantee.bit_stable == (
        op not in ("fake_quantize_backward", "learned_fake_quantize_backward", "mean_abs", "mean_std")
    )


def test_math_dtype_follows_the_input() -> None:
    for dtype in inputs.FLOATS:
        wide = Plan.select("fake_quantize", torch.zeros(3, dtype=dtype)).precision_guarantee.math_dtype
        assert wide == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_functional_goes_through_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    run = Plan.run
    monkeypatch.setattr(Plan, "run", lambda self, *args, **options: seen.append(self.op) or run(self, *args, **options))
    x = torch.randn(4, requires_grad=True)
    scale = torch.tensor(0.5, requires_grad=True)
    F.fake_quantize(x, scale.detach()).sum().backward()
    F.learned_fake_quantize(x, scale).sum().backward()
    F.dequantize(F.quantize(x, 0.5), 0.5).sum().backward()
    assert seen == [
        "fake_quantize",
        "fake_quantize_backward",
        "learned_fake_quantize",
        "learned_fake_quantize_backward",
        "quantize",
        "dequantize",
        "dequantize_backward",
        "quantize_backward",
    ]


def test_plans_are_cached() -> None:
    x = torch.zeros(3)
    assert Plan.select("quantize", x) is Plan.select("quantize", torch.ones(3))


@pytest.mark.parametrize(
    ("backend", "op", "x", "reason"),
    [
        ("native", "round", torch.zeros(3), "native kernels leave round to torch"),
        ("native", "quantize", torch.zeros(3, device="meta"), "native kernels run on the CPU, not on meta"),
        ("native", "quantize", torch.zeros(0), "an empty tensor needs no kernel"),
        ("native", "mean_abs", torch.zeros(3), "native kernels leave mean_abs to torch"),
    ],
)
def test_a_backend_asked_for_by_name_that_cannot_run_raises(
    backend: str, op: str, x: torch.Tensor, reason: str
) -> None:
    with pytest.raises(ValueError, match=f"backend '{backend}' cannot run {op}: {reason}"):
        Plan.select(op, x, prefer=backend)


def test_auto_takes_the_fastest_that_can() -> None:
    assert Plan.select("quantize", torch.zeros(3)).backend == "native"
    assert Plan.select("round", torch.zeros(3)).backend == "reference"
    assert Plan.select("quantize", torch.zeros(3, device="meta")).backend == "reference"


def test_a_plan_says_when_it_copies() -> None:
    x = torch.zeros(2, 4, 3, 8).contiguous(memory_format=torch.channels_last)
    assert not Plan.select("abs_max", x, per=PerChannel(1)).copies
    plan = Plan.select("abs_max", x, per=PerGroup(4))
    assert plan.copies
    assert plan.workspace_size >= x.nbytes


def test_a_preferred_backend_runs_while_the_context_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    backends: list[str] = []
    run = Plan.run
    monkeypatch.setattr(Plan, "run", lambda self, *args: backends.append(self.backend) or run(self, *args))
    x, scale = torch.zeros(3), torch.tensor(0.5)
    with plan_module.prefer("reference"):
        F.fake_quantize(x, scale)
    F.fake_quantize(x, scale)
    with plan_module.prefer("native"):
        F.fake_quantize(x, scale)
        F.round(x)  # what it refuses runs on the reference
    assert backends == ["reference", "native", "native", "reference"]
    with pytest.raises(ValueError, match="prefer is 'cuda', but it must be one of auto, triton, native, reference"):
        plan_module.prefer("cuda").__enter__()


def test_prefer_reference() -> None:
    assert Plan.select("quantize", torch.zeros(3), prefer="reference").backend == "reference"


def test_verdicts_say_why() -> None:
    x, scale = torch.zeros(6, 8), torch.ones(6)
    plan = Plan.select("fake_quantize", x, per=PER)
    assert plan.can_implement(x, scale).ok
    assert plan.can_implement(x, scale, None).ok
    for args, reason in [
        ((x,), "takes .x, scale, zero_point., but got 1 argument"),
        ((x, torch.ones(8)), r"scale has shape \(8,\), but the plan was made for \(6,\)"),
        ((torch.zeros(8, 6), scale), r"x has shape \(8, 6\)"),
        ((x.double(), scale), "x is torch.float64, but the plan was made for torch.float32"),
        ((x, scale.int()), "scale is torch.int32, but it must be a float tensor"),
        ((x, scale, scale), "zero_point is torch.float32, but it must be an integer tensor"),
        ((x, 0.5), "scale is float, but it must be a Tensor"),
        ((x.to("meta"), scale), "x is on meta, but the plan was made for cpu"),
        ((x.t().contiguous().t(), scale), r"x has strides \(1, 6\), but the plan was made for \(8, 1\)"),
    ]:
        verdict = plan.can_implement(*args)
        assert not verdict.ok
        assert re.search(reason, verdict.reason), verdict.reason


def test_verdicts_know_numbers() -> None:
    x = torch.zeros(3)
    plan = Plan.select("clamp", x)
    assert plan.can_implement(x, -1.0, 1.0).ok
    assert not plan.can_implement(x).ok
    assert plan.can_implement(x, -1.0, "1").reason == "max_value is str, but it must be a number"
    codes = torch.ones(3, dtype=torch.int8)
    assert Plan.select("dequantize", codes).run(codes, torch.tensor(0.5)).tolist() == [0.5, 0.5, 0.5]


def test_run_gives_no_gradient() -> None:
    x = torch.zeros(3, requires_grad=True)
    assert not Plan.select("fake_quantize", x).run(x, torch.tensor(0.5)).requires_grad


MEASURED = [
    (backend, op)
    for backend, served in (("reference", OPS.keys()), ("native", native.SERVED))
    for op in sorted(served)
    if not op.startswith("ema_")  # on scale groups alone
]


@pytest.mark.parametrize(("backend", "op"), MEASURED, ids="-".join)
@pytest.mark.parametrize("per", [PerTensor(), PerChannel(0), PerChannel(1), PerGroup(8)], ids=str)
def test_workspace_holds_the_peak(backend: str, op: str, per: object) -> None:
    """The most memory that is live at once during the call, besides the inputs and the results."""
    x = inputs.random((64, 512)).float()
    scale, zero_point = inputs.params(x, per, GRID, affine=True)
    tensors = {"grad_output": torch.randn_like(x), "x": x, "q": x.round(), "scale": scale, "zero_point": zero_point}
    spec = OPS[op]
    args = [tensors[name] for name in spec.tensors]
    extra = {"clamp": (-1.0, 1.0), "clamp_backward": (-1.0, 1.0), "step_quantize": (0.5,), "k_bit_quantize": (3,)}
    options = {"dequantize": {"dtype": torch.float32}}
    for ste in SteKind if op.endswith("quantize_backward") else (SteKind.CLIPPED_IDENTITY,):
        plan = Plan.select(op, x, grid=GRID, per=per, ste=ste, prefer=backend)
        peak = peak_bytes(lambda plan=plan: plan.run(*args, *extra.get(op, ()), **options.get(op, {})))
        assert peak <= plan.workspace_size + x.nbytes + 4096, (ste, peak / x.nbytes)


def peak_bytes(call: object) -> int:
    call()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        result = call()
    del result
    live = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak
