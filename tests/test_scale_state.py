"""The state of a quantizer: how it survives saving, loading, copying and the modes of torch."""

from __future__ import annotations

import copy
import io
import math
import pickle

import pytest
import torch
import torch.utils.checkpoint

import inputs
from compare import assert_same_bits
from lowbit import EMA, FakeQuantize, Fixed, Learned, PerBatch, PerChannel, PerGroup, PerTensor
from lowbit.granularity import Granularity
from lowbit.observers import MinMax
from lowbit.scale import ScaleMode

PERS = (PerTensor(), PerChannel(0), PerChannel(1), PerGroup(4))
MODES = (Fixed(), PerBatch(), EMA(0.75), Learned(), Learned("lsq+"))


def data(device: torch.device, seed: int = 0) -> torch.Tensor:
    return inputs.random((6, 8), seed=seed).float().to(device)


def make(mode: ScaleMode, per: Granularity = PerTensor(), *, symmetric: bool = True, **options: object) -> FakeQuantize:
    return FakeQuantize(4, symmetric, per=per, scale_mode=mode, **options)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("per", PERS, ids=str)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_state_survives(mode: ScaleMode, per: Granularity, symmetric: bool, device: torch.device) -> None:
    x, later = data(device), data(device, 1)

    def fresh() -> FakeQuantize:
        return make(mode, per, symmetric=symmetric, observer=MinMax(per)).to(device)

    quantizer = fresh()
    quantizer(x)
    quantizer.observing = False
    file = io.BytesIO()
    torch.save(quantizer.state_dict(), file)
    file.seek(0)
    loaded = fresh()
    loaded.load_state_dict(torch.load(file, weights_only=True))
    assert not loaded.observing
    copies = [loaded, copy.deepcopy(quantizer), pickle.loads(pickle.dumps(quantizer)), copy.deepcopy(quantizer).half()]
    for other in (quantizer, *copies):
        other.observing = True
        other(later)
    for other in copies:
        for name, tensor in quantizer.state_dict().items():
            assert_same_bits(other.state_dict()[name], tensor)
        assert_same_bits(other.eval()(x), quantizer.eval()(x))
    if quantizer.scale is not None:
        assert copies[-1].scale.dtype == torch.float32
        assert copy.deepcopy(quantizer).bfloat16().scale.dtype == torch.float32
        assert copy.deepcopy(quantizer).double().scale.dtype == torch.float64


@pytest.mark.parametrize("mode", [Fixed(), EMA(), Learned()], ids=str)
def test_loading_a_state_of_another_shape(mode: ScaleMode) -> None:
    saved = make(mode, PerChannel(0))
    saved.update_params(torch.full((6,), 0.5))
    other = make(mode, PerChannel(0))
    other.update_params(torch.full((8,), 0.25))
    with pytest.raises(RuntimeError, match=r"the checkpoint holds shape \(6,\), but this quantizer .* holds \(8,\)"):
        other.load_state_dict(saved.state_dict())
    assert other.scale.tolist() == [0.25] * 8


@pytest.mark.parametrize("name", ["scale", "zero_point"])
def test_loading_bad_values_is_refused_and_changes_nothing(name: str) -> None:
    for bad in (-1.0, 0.0, math.nan, math.inf) if name == "scale" else (-1, 16):
        quantizer = FakeQuantize(4, False, 0.5, 3)
        state = quantizer.state_dict()
        state[name] = torch.tensor(bad, dtype=state[name].dtype)
        with pytest.raises(RuntimeError, match=f"{name} holds"):
            quantizer.load_state_dict(state)
        assert quantizer.scale == 0.5
        assert quantizer.zero_point == 3


def test_a_learned_scale_below_its_floor_can_be_loaded() -> None:
    quantizer = FakeQuantize(4, scale=0.5, scale_mode=Learned())
    with torch.no_grad():
        quantizer.scale.fill_(-1.0)
    other = FakeQuantize(4, scale_mode=Learned())
    other.load_state_dict(quantizer.state_dict())
    assert_same_bits(other.eval()(torch.ones(3)), quantizer.eval()(torch.ones(3)))


def test_ema_affine_leaves_zero_groups_alone(device: torch.device) -> None:
    quantizer = make(EMA(0.5), PerChannel(0), symmetric=False).to(device)
    quantizer(torch.tensor([[-1.0, 2.0], [0.0, 0.0]], device=device))
    assert quantizer.initialized.tolist() == [True, False]
    assert quantizer.low.tolist() == [-1, 0]
    assert (quantizer.scale[1].item(), quantizer.zero_point[1].item()) == (1, 0)
    quantizer(torch.tensor([[0.0, 0.0], [1.0, 3.0]], device=device))
    assert quantizer.low.tolist() == [-1, 1]
    assert quantizer.high.tolist() == [2, 3]


def test_a_scale_given_to_an_ema_is_its_first_state(device: torch.device) -> None:
    quantizer = FakeQuantize(4, scale=2.0, scale_mode=EMA(0.5)).to(device)
    quantizer.eval()(data(device))
    quantizer.train()(torch.full((3,), 7.0, device=device))
    assert quantizer.scale.item() == 1.5


def test_activation_checkpointing_takes_a_batch_in_once(device: torch.device) -> None:
    x = data(device)
    plain, checkpointed = make(EMA(0.5)).to(device), make(EMA(0.5)).to(device)
    for quantizer in (plain, checkpointed):
        quantizer(x * 3)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    plain(leaves[0]).square().sum().backward()
    again = torch.utils.checkpoint.checkpoint(checkpointed, leaves[1], use_reentrant=False)
    again.square().sum().backward()
    assert_same_bits(checkpointed.scale, plain.scale)
    assert_same_bits(leaves[1].grad, leaves[0].grad)


def test_a_first_batch_in_inference_mode(device: torch.device) -> None:
    quantizer = make(EMA(0.5), PerChannel(0), observer=MinMax(PerChannel(0))).to(device)
    with torch.inference_mode():
        quantizer(data(device))
    quantizer(data(device, 1))
    assert quantizer.observer.count.sum() == 96


def test_an_average_of_models_made_before_training() -> None:
    model = torch.nn.Sequential(make(EMA(0.5)))
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    model(data(torch.device("cpu")))
    average.update_parameters(model)
    average.eval()(data(torch.device("cpu")))


def test_on_the_meta_device() -> None:
    with torch.device("meta"):
        quantizer = FakeQuantize(4, False, 0.5, 3)
    assert quantizer(torch.ones(3, device="meta")).shape == (3,)


@pytest.mark.parametrize("mode", [Fixed(), EMA(), Learned()], ids=str)
def test_loading_by_assignment_keeps_scales_in_float32(mode: ScaleMode) -> None:
    quantizer = make(mode)
    quantizer(data(torch.device("cpu")))
    state = {name: t.half() if t.is_floating_point() else t.clone() for name, t in quantizer.state_dict().items()}
    state["zero_point"] = state["zero_point"].long()
    quantizer.load_state_dict(state, assign=True)
    assert quantizer.scale.dtype == torch.float32
    assert quantizer.zero_point.dtype == torch.int32
    quantizer.eval()(data(torch.device("cpu")))


def test_loading_refuses_what_construction_refuses() -> None:
    state = FakeQuantize(4).state_dict()
    with pytest.raises(RuntimeError, match="zero_point: the checkpoint's is not 0"):
        FakeQuantize(4).load_state_dict(state | {"zero_point": torch.tensor(3, dtype=torch.int32)})
    grouped = make(EMA(), PerGroup(4))
    grouped(data(torch.device("cpu")))
    with pytest.raises(
        RuntimeError, match=r"the checkpoint holds shape \(6, 2\), which PerChannel\(axis=0\) cannot have"
    ):
        make(EMA(), PerChannel(0)).load_state_dict(grouped.state_dict())
    affine = make(EMA(), symmetric=False)
    affine(data(torch.device("cpu")))
    with pytest.raises(RuntimeError, match="low: the checkpoint holds a value that is not finite"):
        make(EMA(), symmetric=False).load_state_dict(affine.state_dict() | {"low": torch.tensor(math.nan)})
    with pytest.raises(RuntimeError, match=r"zero_point: the checkpoint holds torch.float32"):
        FakeQuantize(4).load_state_dict(state | {"zero_point": torch.tensor(0.0)})
    with pytest.raises(RuntimeError, match="have different shapes"):
        make(Fixed(), PerChannel(0)).load_state_dict(state | {"scale": torch.ones(3)})
    learned = FakeQuantize(4, scale=0.5, scale_mode=Learned())
    with pytest.raises(RuntimeError, match=r"scale holds -1\.0"):
        learned.load_state_dict(learned.state_dict() | {"initial_scale": torch.tensor(-1.0)})


@pytest.mark.parametrize("mode", [EMA(), Learned(), Fixed()], ids=str)
def test_data_on_another_device_is_refused(mode: ScaleMode) -> None:
    quantizer = FakeQuantize(scale_mode=mode)
    with pytest.raises(ValueError, match="x is on meta, but this quantizer is on cpu"):
        quantizer(torch.ones(3, device="meta"))
