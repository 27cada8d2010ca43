from __future__ import annotations

import copy
import math

import pytest
import torch

import inputs
import oracle
from compare import assert_same_bits
from lowbit import EMA, FakeQuantize, Fixed, Grid, Learned, PerBatch, PerChannel, PerGroup, PerTensor, PerToken, SteKind
from lowbit.functional import fake_quantize, fake_quantize_backward, learned_fake_quantize
from lowbit.functional.statistics import params_from_data
from lowbit.granularity import Granularity
from lowbit.observers import Histogram, MinMax
from lowbit.scale import NotCalibratedError, ScaleMode

PERS = (PerTensor(), PerChannel(0), PerChannel(1), PerGroup(4))
MODES = (Fixed(), PerBatch(), EMA(0.75), Learned(), Learned("lsq+"))


def data(device: torch.device, seed: int = 0) -> torch.Tensor:
    return inputs.random((6, 8), seed=seed).float().to(device)


def make(mode: ScaleMode, per: Granularity = PerTensor(), *, symmetric: bool = True, **options: object) -> FakeQuantize:
    return FakeQuantize(4, symmetric, per=per, scale_mode=mode, **options)


def test_defaults() -> None:
    quantizer = FakeQuantize()
    assert (quantizer.bits, quantizer.symmetric, quantizer.enabled, quantizer.observing) == (8, True, True, True)
    assert quantizer.scale == 1
    assert quantizer.scale.dtype == torch.float32
    assert quantizer.zero_point == 0
    assert quantizer.zero_point.dtype == torch.int32
    assert quantizer.quant_range() == (-128, 127)
    assert FakeQuantize.with_defaults(4, False).quant_range() == (0, 15)
    assert FakeQuantize(4, False, signed=True).quant_range() == (-8, 7)
    assert FakeQuantize(4, narrow=True).quant_range() == (-7, 7)
    assert FakeQuantize(4, signed=False).quant_range() == (0, 15)


def test_float_range() -> None:
    quantizer = FakeQuantize(8, False, 0.1, 28)
    low, high = quantizer.float_range()
    assert low.item() == pytest.approx(-2.8)
    assert high.item() == pytest.approx(22.7)
    low, high = FakeQuantize(4, scale=torch.tensor([1.0, 2.0]), per=PerChannel(0)).float_range()
    assert low.tolist() == [-8, -16]
    assert high.tolist() == [7, 14]


@pytest.mark.parametrize("ste", SteKind)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("per", PERS, ids=str)
def test_fixed_is_the_functional_op(per: Granularity, symmetric: bool, ste: SteKind, device: torch.device) -> None:
    x, grid = data(device), Grid(4, symmetric)
    scale, zero_point = inputs.params(x, per, grid, affine=not symmetric)
    quantizer = FakeQuantize(4, symmetric, scale, 0 if symmetric else zero_point, per=per, ste=ste).to(device)
    leaf, g = x.clone().requires_grad_(), data(device, 1)
    y = quantizer(leaf)
    y.backward(g)
    assert_same_bits(y, fake_quantize(x, scale, zero_point, grid=grid, per=per))
    expected = fake_quantize_backward(g, x, scale, zero_point, grid=grid, per=per, ste=ste)
    assert_same_bits(leaf.grad, expected)
    assert_same_bits(quantizer.backward(g, x), expected)
    error = ((y.detach() - x) ** 2).mean()
    torch.testing.assert_close(quantizer.quantization_noise(x), error)


def test_a_number_serves_every_scale_group(device: torch.device) -> None:
    quantizer = FakeQuantize(4, scale=0.5, per=PerChannel(1)).to(device)
    for x in (data(device), data(device)[:, :3]):
        assert_same_bits(quantizer(x), fake_quantize(x, 0.5, grid=Grid(4)))


@pytest.mark.parametrize("ste", SteKind)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("per", [*PERS, PerToken()], ids=str)
def test_per_batch(per: Granularity, symmetric: bool, ste: SteKind, device: torch.device) -> None:
    quantizer = make(PerBatch(), per, symmetric=symmetric, ste=ste).to(device)
    assert quantizer.scale is None
    for seed in (0, 1):
        x, g = data(device, seed) * (seed + 1), data(device, 2)
        scale, zero_point = params_from_data(x, grid=quantizer.grid, per=per, symmetric=symmetric)
        leaf = x.clone().requires_grad_()
        y = quantizer(leaf)
        y.backward(g)
        assert_same_bits(y, fake_quantize(x, scale, zero_point, grid=quantizer.grid, per=per))
        own = SteKind.IDENTITY if ste in (SteKind.CLIPPED_IDENTITY, SteKind.IN_RANGE) else ste
        expected = fake_quantize_backward(g, x, scale, zero_point, grid=quantizer.grid, per=per, ste=own)
        assert_same_bits(leaf.grad, expected)
        assert_same_bits(quantizer.backward(g, x), expected)
    assert list(quantizer.state_dict()) == ["_extra_state"]


@pytest.mark.parametrize("mode", [PerBatch("mean_abs"), PerBatch()])
def test_a_range_narrower_than_the_data_masks(mode: PerBatch, device: torch.device) -> None:
    """mean_abs clips; so does an unsigned symmetric grid, below 0: there the rule stays what it is."""
    signed = mode.statistic == "mean_abs"
    x = data(device)
    quantizer = make(mode, signed=signed).to(device)
    scale, _ = params_from_data(x, grid=quantizer.grid, per=PerTensor(), symmetric=True, statistic=mode.statistic)
    expected = fake_quantize_backward(torch.ones_like(x), x, scale, grid=quantizer.grid)
    assert (expected == 0).any()
    assert_same_bits(quantizer.backward(torch.ones_like(x), x), expected)


def test_per_batch_with_clipping_saves_nothing(device: torch.device) -> None:
    saved: list[torch.Tensor] = []
    x = data(device).requires_grad_()
    for ste in (SteKind.IDENTITY, SteKind.CLIPPED_IDENTITY, SteKind.IN_RANGE):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            make(PerBatch(), ste=ste)(x)
    assert not saved


def test_ema_symmetric_by_hand(device: torch.device) -> None:
    quantizer = make(EMA(0.75), PerChannel(0)).to(device)
    batch = torch.tensor([[7.0, -3.0], [0.0, 0.0]], device=device)
    y = quantizer(batch)
    assert quantizer.initialized.tolist() == [True, False]
    assert quantizer.scale.tolist() == [1, 1]  # 7 / 7 copied in; the all-zero row left alone
    assert y.tolist() == [[7, -3], [0, 0]]
    quantizer(torch.tensor([[1.4, 14.0], [-3.5, 0.0]], device=device))
    assert quantizer.scale.tolist() == [0.75 * 1 + 0.25 * 2, 0.5]  # row 1 has its first data here
    quantizer(torch.zeros(2, 2, device=device))
    assert quantizer.scale.tolist() == [1.25, 0.5]


def test_ema_affine_blends_the_range(device: torch.device) -> None:
    quantizer = make(EMA(0.5), symmetric=False).to(device)
    quantizer(torch.tensor([-1.0, 2.0], device=device))
    quantizer(torch.tensor([-3.0, 6.0], device=device))
    assert (quantizer.low.item(), quantizer.high.item()) == (-2, 4)
    scale, zero_point, _ = oracle.affine_params(torch.tensor([-2.0, 4.0]), quantizer.grid, PerTensor())
    assert quantizer.scale.item() == pytest.approx(scale.item(), rel=1e-6)
    assert quantizer.zero_point == zero_point


@pytest.mark.parametrize("symmetric", [True, False])
def test_an_ema_whose_state_lies_otherwise_in_memory(symmetric: bool, device: torch.device) -> None:
    plain = make(EMA(0.5), PerGroup(4), symmetric=symmetric).to(device)
    plain(torch.randn(2, 3, 4, 8, device=device))
    turned = copy.deepcopy(plain).to(memory_format=torch.channels_last)
    assert not turned.scale.is_contiguous()
    batch = torch.randn(2, 3, 4, 8, device=device)
    for quantizer in (plain, turned):
        quantizer(batch)
    for wanted, found in zip(plain.buffers(), turned.buffers(), strict=True):
        assert_same_bits(found.contiguous(), wanted)


def test_the_first_batch_is_used_as_it_is(device: torch.device) -> None:
    for symmetric in (True, False):
        x = data(device)
        first = make(EMA(0.99), symmetric=symmetric).to(device)
        assert_same_bits(first(x), make(PerBatch(), symmetric=symmetric).to(device)(x))


@pytest.mark.parametrize("mode", [EMA(0.75), Learned()], ids=str)
def test_state_changes_only_in_training_while_observing(mode: ScaleMode, device: torch.device) -> None:
    quantizer = make(mode, observer=MinMax()).to(device)
    quantizer(data(device))
    state = {name: tensor.clone() for name, tensor in quantizer.state_dict().items()}
    quantizer.eval()(data(device, 1) * 9)
    quantizer.quantization_noise(data(device, 1) * 9)
    quantizer.train()
    quantizer.observing = False
    quantizer(data(device, 1) * 9)
    quantizer.observing = True
    for name, tensor in quantizer.state_dict().items():
        assert_same_bits(tensor, state[name])
    quantizer.enabled = False  # off is the identity, and still observes
    assert quantizer(x := data(device, 1) * 9) is x
    assert quantizer.observer.count == 96


@pytest.mark.parametrize("mode", [EMA(), Learned(), Learned("lsq+")], ids=str)
def test_use_before_any_data_raises(mode: ScaleMode, device: torch.device) -> None:
    quantizer = make(mode, PerChannel(0)).to(device).eval()
    for call in (quantizer, quantizer.quantization_noise, lambda x: quantizer.backward(x, x)):
        with pytest.raises(NotCalibratedError, match="has seen no data"):
            call(data(device))
    quantizer.train()(torch.zeros(6, 8, device=device))  # data, but all zero: still nothing known
    if device.type == "cpu":
        with pytest.raises(NotCalibratedError):
            quantizer.eval()(data(device))
    quantizer.train()(data(device))
    quantizer.eval()(data(device))


def test_the_backward_uses_the_forwards_scale(device: torch.device) -> None:
    quantizer = make(EMA(0.5)).to(device)
    x, later = data(device).requires_grad_(), data(device, 1) * 100
    y = quantizer(x)
    scale = quantizer.scale.clone()
    quantizer(later)
    assert quantizer.scale != scale
    y.sum().backward()
    assert_same_bits(x.grad, fake_quantize_backward(torch.ones_like(x), x.detach(), scale, grid=Grid(4)))


@pytest.mark.parametrize("per", [PerTensor(), PerChannel(0), PerGroup(4)], ids=str)
def test_learned_starts_as_the_papers_do(per: Granularity, device: torch.device) -> None:
    x = data(device)
    values = oracle._groups(x, per)
    quantizer = make(Learned(), per).to(device)
    quantizer(x)
    lsq = [2 * sum(map(abs, group)) / len(group) / math.sqrt(7) for group in values]
    assert quantizer.scale.flatten().tolist() == pytest.approx(lsq, rel=1e-5)
    quantizer = make(Learned("lsq+"), per).to(device)
    quantizer(x)
    means = [sum(group) / len(group) for group in values]
    stds = [math.sqrt(sum((v - m) ** 2 for v in g) / len(g)) for g, m in zip(values, means, strict=True)]
    plus = [max(abs(m - 3 * s), abs(m + 3 * s)) / 8 for m, s in zip(means, stds, strict=True)]
    assert quantizer.scale.flatten().tolist() == pytest.approx(plus, rel=1e-4)
    assert FakeQuantize(4, signed=False, scale_mode=Learned("pact")).scale.item() == pytest.approx(10 / 15)


def test_lsq_plus_affine_learns_its_zero_point(device: torch.device) -> None:
    x = data(device) + 1
    quantizer = make(Learned("lsq+"), symmetric=False).to(device)
    quantizer(x).square().sum().backward()
    assert {name for name, _ in quantizer.named_parameters()} == {"scale", "zero_point"}
    assert quantizer.zero_point.grad is not None
    watcher = Histogram(method="mse").to(device)
    watcher.observe(x)
    scale, zero_point = watcher.quant_params(Grid(4, False), False)
    assert quantizer.scale.item() == pytest.approx(scale.item())
    assert quantizer.zero_point.item() == zero_point.item()


def test_a_learned_activation_starts_where_its_error_is_least(device: torch.device) -> None:
    x = torch.randn(64, 50, generator=torch.Generator().manual_seed(0)).sub(1.5).relu().to(device)  # mostly 0
    quantizer = FakeQuantize(2, signed=False, scale_mode=Learned("lsq+", batch_axis=0)).to(device)
    quantizer(x)
    scales = x.max().item() / 3 * torch.arange(1, 51) / 50
    errors = [(fake_quantize(x, s.to(device), grid=Grid(2, signed=False)) - x).square().mean().item() for s in scales]
    assert quantizer.scale.item() == pytest.approx(scales[min(range(50), key=errors.__getitem__)].item(), rel=1e-5)
    formula = FakeQuantize(2, signed=False, scale_mode=Learned("lsq", batch_axis=0)).to(device)
    formula(x)
    assert quantizer.quantization_noise(x) < 0.5 * formula.quantization_noise(x)


def test_float_range_of_a_learned_zero_point_is_the_forwards(device: torch.device) -> None:
    quantizer = FakeQuantize(4, False, 0.5, 7, scale_mode=Learned("lsq+")).to(device)
    with torch.no_grad():
        quantizer.zero_point.fill_(7.4)
    ends = quantizer(torch.tensor([-math.inf, math.inf], device=device))
    assert [end.item() for end in quantizer.float_range()] == ends.tolist() == [-3.5, 4.0]


def test_a_learned_group_without_data_starts_at_the_mean_of_the_others(device: torch.device) -> None:
    x = data(device)
    x[2] = 0
    quantizer = make(Learned(), PerChannel(0)).to(device)
    quantizer(x)
    live = [c for c in range(6) if c != 2]
    torch.testing.assert_close(quantizer.scale[2], quantizer.scale[live].mean())
    assert_same_bits(quantizer.initial_scale, quantizer.scale.detach())


@pytest.mark.parametrize("mode", [Learned(), Learned(grad_scale=False), Learned(batch_axis=0)], ids=str)
def test_learned_is_the_functional_op(mode: Learned, device: torch.device) -> None:
    x = data(device)
    quantizer = FakeQuantize(4, scale=0.3, scale_mode=mode).to(device)
    assert isinstance(quantizer.scale, torch.nn.Parameter)
    quantizer(x).square().sum().backward()
    scale = torch.tensor(0.3, device=device, requires_grad=True)
    y = learned_fake_quantize(x, scale, grid=Grid(4), grad_scale=mode.grad_scale, batch_axis=mode.batch_axis)
    y.square().sum().backward()
    assert_same_bits(quantizer.scale.grad, scale.grad)


@pytest.mark.parametrize("mode", [Learned(), Learned("lsq+"), Learned("pact")], ids=str)
def test_a_learned_scale_stays_positive_under_a_rate_of_1_and_comes_back(mode: Learned, device: torch.device) -> None:
    first = 0.05
    quantizer = FakeQuantize(4, scale=first, signed=mode.method != "pact", scale_mode=mode).to(device)
    x = data(device)
    optimizer = torch.optim.SGD(quantizer.parameters(), lr=1.0)
    for _ in range(20):
        optimizer.zero_grad()
        quantizer(x).abs().sum().mul(100).backward()  # pushes the scale down, hard
        optimizer.step()
        assert (quantizer.float_range()[1] > 0).all()
    assert quantizer.scale < 0
    assert quantizer.float_range()[1].item() == pytest.approx(first * 1e-3 * quantizer.grid.quant_max, rel=1e-5)
    for _ in range(2000):
        optimizer.zero_grad()
        (quantizer(x) - x).square().sum().mul(10).backward()
        optimizer.step()
        if quantizer.scale > first:
            return
    pytest.fail(f"the scale is still {quantizer.scale.item()}")


def test_update_params(device: torch.device) -> None:
    x = data(device)
    for mode in (Fixed(), EMA(0.5), Learned(), Learned("lsq+")):
        quantizer = make(mode, PerChannel(0), symmetric=False).to(device)
        scale, zero_point = inputs.params(x, PerChannel(0), quantizer.grid, affine=True)
        quantizer.update_params(scale, zero_point)
        expected = fake_quantize(x, scale, zero_point, grid=quantizer.grid, per=PerChannel(0))
        assert_same_bits(quantizer.eval()(x), expected)
        quantizer.update_params(0.5, 3)
        assert quantizer.scale.tolist() == [0.5] * 6
        assert quantizer.zero_point.tolist() == [3] * 6


def test_an_observer_sets_the_scale(device: torch.device) -> None:
    quantizer = FakeQuantize(8, False, per=PerChannel(0), observer=MinMax(PerChannel(0))).to(device)
    for seed in range(3):
        quantizer(data(device, seed))
    quantizer.update_params_from_observer()
    scale, zero_point = quantizer.observer.quant_params(quantizer.grid, False)
    assert_same_bits(quantizer.scale, scale)
    assert_same_bits(quantizer.zero_point, zero_point)


def test_noise_of_nothing_is_0(device: torch.device) -> None:
    assert FakeQuantize().to(device).quantization_noise(torch.empty(0, 3, device=device)) == 0


def test_disabled_is_the_identity_after_the_shape_checks(device: torch.device) -> None:
    quantizer = FakeQuantize(4, scale=torch.ones(6), per=PerChannel(0)).to(device)
    quantizer.enabled = False
    x = data(device).requires_grad_()
    assert quantizer(x) is x
    assert quantizer.backward(g := torch.randn_like(x), x) is g
    assert quantizer.quantization_noise(x) == 0
    with pytest.raises(ValueError, match=r"needs scales of shape \(8,\), but this quantizer holds \(6,\)"):
        quantizer(x.t())


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("symmetric", [True, False])
def test_compiled_training_keeps_the_same_state(mode: ScaleMode, symmetric: bool, device: torch.device) -> None:
    torch.compiler.reset()
    plain, traced = (make(mode, PerChannel(0), symmetric=symmetric).to(device) for _ in range(2))
    for quantizer in (plain, traced):
        quantizer(data(device))  # the first batch gives the state its shape
    compiled = torch.compile(traced, fullgraph=True)
    # On a GPU, Triton contracts the moving average's products and sum into one rounding.
    contracted = device.type == "cuda" and isinstance(mode, EMA)
    compare = torch.testing.assert_close if contracted else assert_same_bits
    for seed in (1, 2):
        x, y = data(device, seed).requires_grad_(), data(device, seed).requires_grad_()
        expected, actual = plain(x), compiled(y)
        compare(actual, expected)
        expected.sum().backward()
        actual.sum().backward()
        compare(y.grad, x.grad)
    for name, tensor in plain.state_dict().items():
        compare(traced.state_dict()[name], tensor)


@pytest.mark.parametrize("per", [PerTensor(), PerChannel(0)], ids=str)
@pytest.mark.parametrize("mode", [EMA(0.75), Learned("lsq+")], ids=str)
def test_compiled_from_the_first_batch(mode: ScaleMode, per: Granularity) -> None:
    torch.compiler.reset()
    plain, traced = make(mode, per), make(mode, per)
    compiled, x = torch.compile(traced, fullgraph=True), data(torch.device("cpu"))
    if isinstance(mode, Learned) and per != PerTensor():
        with pytest.raises(torch._dynamo.exc.Unsupported, match="run one batch before, or give it a scale"):
            compiled(x)
        return
    for scale in (1, 3):
        assert_same_bits(compiled(x * scale), plain(x * scale))


@pytest.mark.parametrize("dtype", inputs.FLOATS, ids=str)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_every_dtype_in_and_out(mode: ScaleMode, dtype: torch.dtype, device: torch.device) -> None:
    quantizer = make(mode).to(device)
    x = data(device).to(dtype).requires_grad_()
    y = quantizer(x)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == dtype
    if quantizer.scale is not None:
        assert quantizer.scale.dtype == torch.float32
