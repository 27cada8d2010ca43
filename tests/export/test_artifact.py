"""save and load: the same bits again, and the same tensors shared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit
from compare import assert_same_bits
from lowbit.blueprint import conversion_of
from lowbit.export.artifact import load, save
from lowbit.flow import call
from models.small import all_state, assert_same_states
from preparing import ARITHMETICS, PRESETS
from saving import NETS, Net, a_file, assert_refused, converted, make, prepared, pruned, read


def plain(model: nn.Module) -> Any:
    """What a converted model knows of itself, as JSON has it."""
    conversion = conversion_of(model)
    return json.loads(json.dumps([conversion.blueprint.to_dict(), conversion.products]))


class TestRoundTrip:
    @pytest.mark.parametrize("arithmetic", ARITHMETICS)
    @pytest.mark.parametrize("recipe", PRESETS)
    @pytest.mark.parametrize("name", NETS)
    def test_same_bits(self, name: str, recipe: str, arithmetic: str, tmp_path: Path) -> None:
        net, other = make(name, 0), make(name, 1)
        model = converted(net, PRESETS[recipe](), arithmetic)
        save(model, tmp_path / "model")
        before, output = all_state(other.model), call(other.model, net.batch)
        loaded = load(tmp_path / "model", other.model)
        assert_same_bits(call(loaded, net.batch), call(model, net.batch))
        assert_same_states(all_state(loaded), all_state(model))
        assert plain(loaded) == plain(model)
        assert not loaded.training
        assert not any(parameter.requires_grad for parameter in loaded.parameters())
        assert_same_states(all_state(other.model), before)
        assert_same_bits(call(other.model, net.batch), output)
        assert all(parameter.requires_grad for parameter in other.model.parameters())

    @pytest.mark.parametrize("name", [name for name in NETS if name != "attention"])
    def test_into_a_model_on_the_meta_device(self, name: str, tmp_path: Path) -> None:
        net = make(name, 0)
        model = converted(net, lowbit.recipes.w4())
        save(model, tmp_path / "model")
        loaded = load(tmp_path / "model", make(name, 1).model.to("meta"))
        assert {tensor.device.type for tensor in loaded.state_dict().values()} == {"cpu"}
        assert_same_bits(call(loaded, net.batch), call(model, net.batch))

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    @pytest.mark.parametrize("name", ["residual", "lstm", "tied", "functional"])
    def test_from_a_gpu_and_onto_it(self, name: str, tmp_path: Path) -> None:
        net = make(name, 0)
        batch = net.batch.cuda()
        model = converted(Net(net.model.cuda(), batch), lowbit.recipes.w8a8())
        save(model, tmp_path / "model")
        loaded = load(tmp_path / "model", make(name, 1).model.cuda())
        assert {tensor.device.type for tensor in loaded.state_dict().values()} == {"cuda"}
        assert_same_bits(call(loaded, batch), call(model, batch))
        on_cpu = load(tmp_path / "model", make(name, 1).model)
        assert_same_states(all_state(on_cpu), {key: value.cpu() for key, value in model.state_dict().items()})

    def test_a_prepared_model_is_converted_to_float_arithmetic(self, tmp_path: Path) -> None:
        net = make("residual", 0)
        model = prepared(net, lowbit.recipes.w8a8())
        before = all_state(model)
        save(model, tmp_path / "model")
        assert_same_states(all_state(model), before)
        loaded = load(tmp_path / "model", make("residual", 1).model)
        assert conversion_of(loaded).blueprint.arithmetic == "float"
        assert_same_bits(loaded(net.batch), model(net.batch))

    def test_a_wrapper_is_looked_through(self, tmp_path: Path) -> None:
        net = make("mlp", 0)
        model = converted(net, lowbit.recipes.w4())
        save(nn.DataParallel(model), tmp_path / "model")
        assert_same_bits(load(tmp_path / "model", make("mlp", 1).model)(net.batch), model(net.batch))

    def test_what_was_loaded_can_be_saved(self, tmp_path: Path) -> None:
        path = a_file(tmp_path)
        save(load(path, make("mlp", 1).model), tmp_path / "again")
        (tensors, metadata), (tensors_again, metadata_again) = read(path), read(tmp_path / "again")
        assert_same_states(tensors_again, tensors)
        assert metadata_again == metadata

    def test_what_was_loaded_does_not_lie_in_the_file(self, tmp_path: Path) -> None:
        path = a_file(tmp_path)
        loaded = load(path, make("mlp", 1).model)
        before = all_state(loaded)
        with path.open("r+b") as file:
            file.write(bytes(path.stat().st_size))
        assert_same_states(all_state(loaded), before)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
    @pytest.mark.parametrize("when", ["before", "after"])
    @pytest.mark.parametrize("recipe", ["w8a8", "w2a2", "w4a8"])
    def test_other_dtypes(self, recipe: str, when: str, dtype: torch.dtype, tmp_path: Path) -> None:
        def given(seed: int, dtype: torch.dtype) -> Net:
            net = make("residual", seed)
            return Net(net.model.to(dtype), net.batch.to(dtype))

        model = converted(given(0, dtype if when == "before" else torch.float32), PRESETS[recipe]()).to(dtype)
        save(model, tmp_path / "model")
        loaded = load(tmp_path / "model", given(1, dtype).model)
        batch = given(0, dtype).batch
        assert_same_states(all_state(loaded), all_state(model))
        assert loaded(batch).dtype == dtype
        assert_same_bits(loaded(batch), model(batch))

    def test_channels_last(self, tmp_path: Path) -> None:
        net = make("residual", 0)
        image = net.batch.to(memory_format=torch.channels_last)
        model = converted(Net(net.model.to(memory_format=torch.channels_last), image), lowbit.recipes.w8a8())
        save(model, tmp_path / "model")
        loaded = load(tmp_path / "model", make("residual", 1).model)
        strides = {key: tensor.stride() for key, tensor in model.state_dict().items()}
        assert strides["conv1.weight_quantizer.codes"] == (27, 1, 9, 3)
        assert {key: tensor.stride() for key, tensor in loaded.state_dict().items()} == strides
        assert_same_bits(loaded(image), model(image))

    def test_a_view_is_saved_by_its_values(self, tmp_path: Path) -> None:
        class Views(nn.Sequential):
            def __init__(self) -> None:
                super().__init__(nn.Linear(64, 5))
                whole = torch.randn(6, 4)
                for name, view in {"columns": whole[:, 1:3], "flat": whole.view(-1), "whole": whole}.items():
                    self.register_buffer(name, view)

        model = converted(Net(Views(), torch.randn(2, 64)), lowbit.recipes.w4())
        save(model, tmp_path / "model")
        loaded = load(tmp_path / "model", Views())
        assert_same_states(all_state(loaded), all_state(model))
        assert loaded.columns.is_contiguous()

    def test_buffers_that_no_state_dict_holds_are_the_given_models(self, tmp_path: Path) -> None:
        net, other = make("attention", 0), make("attention", 1)
        save(converted(net, lowbit.recipes.w4()), tmp_path / "model")
        other.model.positions.fill_(3.0)
        loaded = load(tmp_path / "model", other.model)
        assert loaded.positions is not other.model.positions
        assert_same_bits(loaded.positions, torch.full((32,), 3.0))
        with pytest.raises(ValueError, match=r"model: no state_dict holds positions, and the given model has it on"):
            load(tmp_path / "model", other.model.to("meta"))

    def test_a_model_that_was_pruned_just_now_can_be_given(self, tmp_path: Path) -> None:
        net, given = make("pruned", 0), pruned()
        assert given[0].weight.grad_fn is not None
        model = converted(net, lowbit.recipes.w4())
        save(model, tmp_path / "model")
        for other in (given, make("mlp", 1).model):
            assert_same_bits(load(tmp_path / "model", other)(net.batch), model(net.batch))
        assert given[0].weight.grad_fn is not None

    def test_a_layer_that_stays_pruned(self, tmp_path: Path) -> None:
        net = make("pruned", 0)
        model = converted(net, lowbit.Recipe(weight=4, rules=[lowbit.Rule("0")]))
        save(model, tmp_path / "model")
        loaded = load(tmp_path / "model", pruned())
        assert int((loaded[0].weight_mask == 0).sum()) == 32 * 32
        assert_same_bits(loaded(net.batch), model(net.batch))


class Shared(nn.Module):
    """A table that looks up and judges, and a layer between; the table may stay in float."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 32)
        self.between = nn.Linear(32, 32)
        self.head = nn.Linear(32, 10, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.between(self.embedding(words)))


IN_FLOAT = [lowbit.Rule("embedding"), lowbit.Rule("head")]


class TestTies:
    words = torch.arange(10).view(2, 5)

    def saved(self, folder: Path, *, tied: bool = True) -> tuple[nn.Module, Path]:
        model = converted(Net(Shared(tied=tied), self.words), lowbit.Recipe(weight=4, rules=IN_FLOAT))
        save(model, folder / "model")
        return model, folder / "model"

    def test_a_shared_tensor_is_saved_once_and_shared_again(self, tmp_path: Path) -> None:
        model, path = self.saved(tmp_path)
        tensors, metadata = read(path)
        assert "head.weight" not in tensors
        assert json.loads(metadata["aliases"]) == {"head.weight": "embedding.weight"}
        loaded = load(path, Shared())
        assert loaded.head.weight is loaded.embedding.weight
        assert isinstance(loaded.head.weight, nn.Parameter)
        assert_same_bits(loaded(self.words), model(self.words))

    def test_a_model_that_does_not_share_gets_two(self, tmp_path: Path) -> None:
        model, path = self.saved(tmp_path)
        loaded = load(path, Shared(tied=False))
        assert_same_bits(loaded(self.words), model(self.words))
        loaded.head.weight.zero_()
        assert loaded.embedding.weight.count_nonzero() > 0

    def test_two_tensors_do_not_fit_a_model_that_shares(self, tmp_path: Path) -> None:
        _, path = self.saved(tmp_path, tied=False)
        with pytest.raises(ValueError, match=r"one tensor as embedding.weight and head.weight, but the file has sev"):
            load(path, Shared())

    def test_codes_are_shared_too(self, tmp_path: Path) -> None:
        model = converted(Net(Shared(), self.words), lowbit.recipes.w4())
        save(model, tmp_path / "model")
        assert [key for key in read(tmp_path / "model")[0] if key.endswith("codes")] == [
            "between.weight_quantizer.codes",
            "embedding.weight_quantizer.codes",
        ]
        loaded = load(tmp_path / "model", Shared())
        assert loaded.head.weight_quantizer is loaded.embedding.weight_quantizer
        other = Shared(tied=False)
        other.head = nn.Linear(32, 11, bias=False)
        assert_refused(tmp_path / "model", other, r"head.weight is float32 of shape \(10, 32\) in the file")

    def test_a_module_in_two_places(self, tmp_path: Path) -> None:
        def build() -> nn.Sequential:
            norm = nn.LayerNorm(32)
            return nn.Sequential(nn.Linear(32, 32), norm, nn.Linear(32, 32), norm)

        x = torch.randn(3, 32)
        model = converted(Net(build(), x), lowbit.recipes.w4())
        save(model, tmp_path / "model")
        assert json.loads(read(tmp_path / "model")[1]["aliases"]) == {"3.weight": "1.weight", "3.bias": "1.bias"}
        loaded = load(tmp_path / "model", build())
        assert loaded[1] is loaded[3]
        assert_same_bits(loaded(x), model(x))
