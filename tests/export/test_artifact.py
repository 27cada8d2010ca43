"""save and load: the same bits in another process, a clear error for every other file, and no file in between."""

from __future__ import annotations

import copy
import errno
import hashlib
import io
import itertools
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import safetensors
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

import lowbit
from compare import assert_same_bits
from lowbit.blueprint import conversion_of
from lowbit.export import artifact
from lowbit.export.artifact import load, save
from lowbit.fake_quantize import FakeQuantize
from lowbit.flow import call
from lowbit.packing import unpack
from models import networks
from models.small import Tied, all_state, assert_same_states, images, mlp

TESTS = Path(__file__).parents[1]
PRESETS = lowbit.recipes.presets()
ARITHMETICS = ("float", "integer")


class Net(NamedTuple):
    """A float model, and a batch for it."""

    model: nn.Module
    batch: Any


class Residual(nn.Module):
    """y = head(relu(x + bn2(conv2(relu(bn1(conv1(x)))))))"""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3)
        self.conv2, self.bn2 = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.head = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return self.head(F.relu(x + y).mean((2, 3)))


class Attention(nn.Module):
    """Words that attend to each other, with positions that no state_dict holds."""

    positions: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 32)
        self.register_buffer("positions", torch.linspace(-1, 1, 32), persistent=False)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 5)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words) * self.positions
        return self.head(self.norm(x + self.attention(x, x, x)[0]))


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


def pruned() -> nn.Sequential:
    model = mlp(64, 32, 5)
    prune.l1_unstructured(model[0], "weight", 0.5)
    return model


def pruned_in_eval() -> Net:
    """torch copies a pruned layer only where its weight has no gradient."""
    with torch.no_grad():
        return Net(pruned(), torch.randn(4, 64))


NETS: dict[str, Callable[[], Net]] = {
    "residual": lambda: Net(Residual(), images()),
    "mlp": lambda: Net(mlp(64, 32, 5), torch.randn(4, 64)),
    "attention": lambda: Net(Attention(), torch.randint(0, 20, (2, 6))),
    "lstm": lambda: Net(networks.Tagger(), torch.randint(0, 50, (3, 7))),
    "tied": lambda: Net(Tied(), torch.randint(0, 10, (2, 3))),
    "pruned": pruned_in_eval,
    "parametrized": lambda: Net(*networks.parametrized()[:2]),
    "functional": lambda: Net(*networks.functional()[:2]),
}


def make(name: str, seed: int) -> Net:
    torch.manual_seed(seed)
    net = NETS[name]()
    return Net(net.model.eval(), net.batch)


def prepared(net: Net, recipe: lowbit.Recipe) -> nn.Module:
    model = lowbit.prepare(net.model, recipe, net.batch)
    lowbit.calibrate(model, [net.batch])
    return model.eval()


def converted(net: Net, recipe: lowbit.Recipe, arithmetic: str = "float") -> nn.Module:
    return lowbit.convert(prepared(net, recipe), arithmetic)


def plain(model: nn.Module) -> Any:
    """What a converted model knows of itself, as JSON has it."""
    conversion = conversion_of(model)
    return json.loads(json.dumps([conversion.blueprint.to_dict(), conversion.products]))


def a_file(folder: Path, *, seed: int = 0) -> Path:
    """A small model as a file, for the model of ``make("mlp", …)``."""
    path = folder / "model.safetensors"
    save(converted(make("mlp", seed), lowbit.recipes.w8a8()), path)
    return path


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safetensors.safe_open(path, framework="pt") as file:
        return {key: file.get_tensor(key).clone() for key in file.keys()}, file.metadata()  # noqa: SIM118


def rewrite(path: Path, tensors: Mapping[str, Any] = {}, metadata: Mapping[str, str] = {}) -> None:
    """Change some of a file, as one would who knows the format; a tensor that is None is left out."""
    old_tensors, old_metadata = read(path)
    new = {key: value for key, value in {**old_tensors, **tensors}.items() if value is not None}
    safetensors.torch.save_file(new, path, {**old_metadata, **metadata})


def run(code: str, *arguments: object) -> str:
    """What Python code prints that runs in a process of its own, with this file at hand."""
    paths = [str(Path(__file__).parent), str(TESTS)]
    script = f"import sys; sys.path[:0] = {paths!r}\n{code}"
    done = subprocess.run([sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


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


def load_all(folder: str) -> None:
    """Runs in a process of its own: write a digest of each model's output, where no quantizer can be made."""

    def refuse(*arguments: Any) -> None:
        raise AssertionError("a quantizer of training was made")

    FakeQuantize.__init__ = refuse  # type: ignore[assignment]
    lowbit.prepare = lowbit.convert = pickle.loads = torch.load = refuse
    digests = {}
    for path in Path(folder).iterdir():
        net = make(path.name.split("-")[0], 0)  # the batch; the weights are those of the file
        output = call(load(path, net.model.apply(forget)), net.batch)
        digests[path.name] = hashlib.sha256(output.numpy().tobytes()).hexdigest()
    sys.stdout.write(json.dumps(digests))


def forget(module: nn.Module) -> None:
    for tensor in module.state_dict().values():
        tensor.zero_()


class TestElsewhere:
    def test_a_process_that_knows_only_the_float_model(self, tmp_path: Path) -> None:
        wanted = {}
        for name, arithmetic in itertools.product(("residual", "attention", "tied", "functional"), ARITHMETICS):
            net = make(name, 0)
            model = converted(net, lowbit.recipes.w8a8(), arithmetic)
            save(model, tmp_path / f"{name}-{arithmetic}")
            output = call(model, net.batch).numpy().tobytes()
            wanted[f"{name}-{arithmetic}"] = hashlib.sha256(output).hexdigest()
        got = json.loads(run("from test_artifact import load_all; load_all(sys.argv[1])", tmp_path))
        assert got == wanted

    def test_the_file_by_hand(self, tmp_path: Path) -> None:
        """A length, JSON and numbers: all that a reader without lowbit needs."""
        net = make("mlp", 0)
        model = converted(net, lowbit.recipes.w4())
        save(model, tmp_path / "model")
        data = (tmp_path / "model").read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        form = json.loads(header["__metadata__"]["blueprint"])["weights"]["0.weight_quantizer"]

        def tensor(name: str, dtype: torch.dtype) -> Tensor:
            start, end = header[name]["data_offsets"]
            return torch.frombuffer(bytearray(data[8 + size + start : 8 + size + end]), dtype=dtype)

        packed, scale = tensor("0.weight_quantizer.codes", torch.uint8), tensor("0.weight_quantizer.scale", torch.float)
        codes = unpack(packed, form["bits"], torch.int8, form["shape"])
        weight = (codes.view(-1, 32) * scale.view(-1, 1)).view(form["shape"])
        assert_same_bits(weight, model[0].weight)

    def test_the_recipe_is_kept(self, tmp_path: Path) -> None:
        def is_head(path: str, module: nn.Module) -> bool:
            return path == "2"

        rules = [lowbit.Rule(is_head, weight=8), lowbit.Rule(nn.Linear, weight=4, activation=8)]
        save(converted(make("mlp", 0), lowbit.Recipe(weight=2, rules=rules)), tmp_path / "model")
        recipe = conversion_of(load(tmp_path / "model", make("mlp", 1).model)).blueprint.recipe
        assert recipe == json.loads(read(tmp_path / "model")[1]["blueprint"])["recipe"]
        named = [lowbit.Rule("<is_head>", weight=8), lowbit.Rule("type:Linear", weight=4, activation=8)]
        assert lowbit.Recipe.from_dict(recipe) == lowbit.Recipe(weight=2, rules=named)

    def test_versions_are_told(self, tmp_path: Path) -> None:
        _, metadata = read(a_file(tmp_path))
        versions = {key: metadata[key] for key in ("lowbit_format", "lowbit_version", "torch_version")}
        assert versions == {
            "lowbit_format": "1",
            "lowbit_version": lowbit.__version__,
            "torch_version": torch.__version__,
        }


class TestSize:
    def test_four_bits_in_groups_of_32(self, tmp_path: Path) -> None:
        """4 bits and a 32nd of a float32: 5/32 = 0.15625 of 32 bits"""
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))
        save(converted(Net(model, torch.randn(1, 1024)), lowbit.recipes.w4()), tmp_path / "model")
        floats = sum(parameter.nbytes for parameter in model.parameters())
        assert 0.15625 <= (tmp_path / "model").stat().st_size / floats <= 0.157


def assert_refused(path: Path, model: nn.Module, match: str | None = None) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        load(path, model)
    assert str(caught.value).startswith(f"{path}: ")


class TestDamage:
    def test_truncated(self, tmp_path: Path) -> None:
        path, model = a_file(tmp_path), make("mlp", 1).model
        data = path.read_bytes()
        for length in {*range(64), *range(64, len(data), 61), len(data) - 1}:
            path.write_bytes(data[:length])
            assert_refused(path, model, "this is no safetensors file, or only a part of one")
        path.write_bytes(data + b"\0")
        assert_refused(path, model, "this is no safetensors file, or only a part of one")

    def test_a_changed_byte_of_the_header(self, tmp_path: Path) -> None:
        path, model = a_file(tmp_path), make("mlp", 1).model
        data = bytearray(path.read_bytes())
        for place in range(8 + int.from_bytes(data[:8], "little")):
            data[place] ^= 1 << place % 8
            path.write_bytes(data)
            assert_refused(path, model)
            data[place] ^= 1 << place % 8
        path.write_bytes(data)
        load(path, model)

    def test_a_changed_byte_of_a_tensor(self, tmp_path: Path) -> None:
        path, model = a_file(tmp_path), make("mlp", 1).model
        data = bytearray(path.read_bytes())
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        spans = [span["data_offsets"] for key, span in header.items() if key != "__metadata__"]
        for place in {start + place for first, end in spans for place in (first, (first + end) // 2, end - 1)}:
            data[place] ^= 0x10
            path.write_bytes(data)
            assert_refused(path, model, "the tensors are damaged: their checksum differs")
            data[place] ^= 0x10

    @pytest.mark.parametrize("key", ["0.weight_quantizer.codes", "0.weight_quantizer.scale", "0.bias"])
    def test_another_shape(self, key: str, tmp_path: Path) -> None:
        path = a_file(tmp_path)
        tensor = read(path)[0][key]
        for other in (tensor.unsqueeze(0), tensor[:-1], tensor.flatten()[:6].view(2, 3)):
            rewrite(path, {key: other.clone()})
            dtype, shape, wanted = str(tensor.dtype)[6:], tuple(other.shape), tuple(tensor.shape)
            message = f"{key} is {dtype} of shape {shape} in the file, but the model needs {dtype} of shape {wanted}: "
            assert_refused(path, make("mlp", 1).model, message.translate({ord(c): f"[{c}]" for c in "()."}))

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.float64, torch.float16, torch.bool], ids=str)
    @pytest.mark.parametrize("key", ["0.weight_quantizer.codes", "0.weight_quantizer.scale", "0.bias"])
    def test_another_dtype(self, key: str, dtype: torch.dtype, tmp_path: Path) -> None:
        path = a_file(tmp_path)
        tensor = read(path)[0][key]
        rewrite(path, {key: tensor.to(dtype)})
        assert_refused(
            path, make("mlp", 1).model, f"{key} is {str(dtype)[6:]} of shape .*needs {str(tensor.dtype)[6:]}"
        )

    def test_the_same_bytes_of_another_dtype(self, tmp_path: Path) -> None:
        path = a_file(tmp_path)
        rewrite(path, {"0.bias": read(path)[0]["0.bias"].view(torch.int32)})
        assert_refused(path, make("mlp", 1).model, r"0.bias is int32 of shape \(32,\) in the file, .* needs float32")

    def test_values_under_the_old_checksum(self, tmp_path: Path) -> None:
        path = a_file(tmp_path)
        rewrite(path, {"0.bias": torch.zeros(32)})
        assert_refused(path, make("mlp", 1).model, "the tensors are damaged")

    def test_tensors_that_changed_places(self, tmp_path: Path) -> None:
        path = a_file(tmp_path)
        tensors, _ = read(path)
        names = ["0.input_quantizer.scale", "2.input_quantizer.scale"]
        rewrite(path, dict(zip(names, [tensors[name] for name in reversed(names)], strict=True)))
        assert_refused(path, make("mlp", 1).model, "the tensors are damaged")

    def test_a_tensor_less_and_one_more(self, tmp_path: Path) -> None:
        path = a_file(tmp_path)
        rewrite(path, {"more": torch.zeros(1)})
        assert_refused(path, make("mlp", 1).model, "the model has no more, which the file has")
        rewrite(path, {"more": None, "0.bias": None})
        assert_refused(path, make("mlp", 1).model, "the file has no 0.bias, which the model has")

    @pytest.mark.parametrize("key", ["blueprint", "aliases", "strides", "wide", "torch_version", "tensors_sha256"])
    def test_another_header(self, key: str, tmp_path: Path) -> None:
        path = a_file(tmp_path)
        rewrite(path, metadata={key: read(path)[1][key] + " "})
        assert_refused(path, make("mlp", 1).model, "the header is damaged: its checksum differs")

    def test_a_newer_format(self, tmp_path: Path) -> None:
        path = a_file(tmp_path)
        rewrite(path, metadata={"lowbit_format": "2", "lowbit_version": "3.1"})
        message = r"written by a newer lowbit \(3.1\), in format 2, and this one reads formats up to 1; update lowbit"
        assert_refused(path, make("mlp", 1).model, message)

    def test_files_of_others(self, tmp_path: Path) -> None:
        path, model = tmp_path / "other", make("mlp", 1).model
        for metadata in (None, {"format": "pt"}):
            safetensors.torch.save_file(model.state_dict(), path, metadata)
            assert_refused(path, model, "this safetensors file is not one that lowbit.save wrote")
        torch.save(model.state_dict(), path)
        assert_refused(path, model, "this is no safetensors file")
        for text in ("", "weights", "a" * 1000):
            path.write_text(text)
            assert_refused(path, model, "this is no safetensors file")

    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"no such file; write it with lowbit.save: '.*none.safetensors'"):
            load(tmp_path / "none.safetensors", make("mlp", 1).model)
        assert_refused(tmp_path, make("mlp", 1).model, "this is a directory; name a file that lowbit.save wrote")


class TestGivenModel:
    @pytest.mark.parametrize(
        ("model", "match"),
        [
            (mlp(63, 32, 5), r"0.weight is float32 of shape \(32, 64\) in the file, but the model needs .*\(32, 63\)"),
            (mlp(64, 32, 6), r"2.weight is float32 of shape \(5, 32\) in the file, but the model needs .*\(6, 32\)"),
            (mlp(64, 32), r"the model has no 2.weight, for which the file has codes; pass the model that was saved"),
            (mlp(64, 32, 5, 5), r"the file has no 4.weight, 4.bias, which the model has; pass the model that was save"),
            (
                mlp(64, 32, 5).half(),
                r"0.weight is float32 of shape \(32, 64\) in the file, but the model needs float16",
            ),
            (nn.Sequential(nn.Linear(64, 32, bias=False), nn.ReLU(), nn.Linear(32, 5)), r"the model has no 0.bias, wh"),
            (nn.Sequential(nn.Conv1d(64, 32, 1), nn.ReLU(), nn.Linear(32, 5)), r"needs float32 of shape \(32, 64, 1\)"),
            (nn.Identity(), r"the model has no 0.weight"),
        ],
    )
    def test_another_model(self, model: nn.Module, match: str, tmp_path: Path) -> None:
        before = copy.deepcopy(model)
        assert_refused(a_file(tmp_path), model, match)
        assert_same_states(all_state(model), all_state(before))
        assert str(model) == str(before)

    def test_another_model_with_ops(self, tmp_path: Path) -> None:
        net = make("functional", 0)
        save(converted(net, lowbit.recipes.w8a8()), tmp_path / "model")
        other = make("functional", 1).model
        other.kernel = nn.Parameter(torch.zeros(8, 3, 5, 5))
        assert_refused(tmp_path / "model", other, r"kernel is float32 of shape \(8, 3, 3, 3\) in the file")
        del other.kernel
        assert_refused(tmp_path / "model", other, "the model has no kernel")

    def test_a_model_that_is_not_float(self, tmp_path: Path) -> None:
        path, net = a_file(tmp_path), make("mlp", 1)
        for what, model in {
            "prepared": prepared(net, lowbit.recipes.w8a8()),
            "converted": converted(net, lowbit.recipes.w8a8()),
        }.items():
            for given in (model, nn.Sequential(model)):
                with pytest.raises(ValueError, match=f"the model is {what}, but load takes the float model; pass the"):
                    load(path, given)
        with pytest.raises(TypeError, match=r"model is PosixPath, but it must be an nn.Module"):
            load("model", path)  # type: ignore[type-var]

    def test_a_model_that_cannot_be_saved(self, tmp_path: Path) -> None:
        class Noted(nn.Linear):
            def get_extra_state(self) -> Any:
                return self.note

            def set_extra_state(self, state: Any) -> None:
                self.note = state

        model = Noted(64, 5)
        model.note = torch.tensor([1, 2])
        save(converted(Net(model, torch.randn(2, 64)), lowbit.recipes.w4()), tmp_path / "noted")
        other = Noted(64, 5)
        other.note = torch.tensor(0)
        assert load(tmp_path / "noted", other).note.tolist() == [1, 2]
        model.note = "text"
        with pytest.raises(TypeError, match="_extra_state is a str, but the file holds only tensors"):
            save(converted(Net(model, torch.randn(2, 64)), lowbit.recipes.w4()), tmp_path / "model")
        with pytest.raises(ValueError, match=r"the model is not prepared; call lowbit.prepare"):
            save(make("mlp", 0).model, tmp_path / "model")
        net = make("mlp", 0)
        with pytest.raises(ValueError, match=r"0.bias lies on the meta device, and has no values to save"):
            save(converted(net, lowbit.recipes.w4()).to("meta"), tmp_path / "model")
        with pytest.raises(lowbit.scale.NotCalibratedError, match=r"no scale yet: 0.input_quantizer"):
            save(lowbit.prepare(net.model, lowbit.recipes.w8a8(), net.batch), tmp_path / "model")
        assert [path.name for path in tmp_path.iterdir()] == ["noted"]

    def test_without_safetensors(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = a_file(tmp_path)
        monkeypatch.setitem(sys.modules, "safetensors.torch", None)
        with pytest.raises(ImportError, match=r"pip install 'lowbit\[export\]'"):
            load(path, make("mlp", 1).model)
        with pytest.raises(ImportError, match=r"pip install 'lowbit\[export\]'"):
            save(converted(make("mlp", 1), lowbit.recipes.w4()), path)


VERSIONS = 2


def kill_writers(folder: str, writer: str, kills: str) -> None:
    """Runs in a process of its own: kill writers in the midst of their work, and look at what each leaves

    Writes how often each version was found, how often neither (-1), and how many unfinished files are left.
    """
    path, write, chance = Path(folder) / "model", {"save": save, "in place": write_in_place}[writer], random.Random(0)
    models = [converted(make("mlp", seed), lowbit.recipes.w4()) for seed in range(VERSIONS)]
    given = make("mlp", VERSIONS).model
    save(models[0], path)
    found: dict[int, int] = dict.fromkeys([-1, *range(VERSIONS)], 0)
    for _ in range(int(kills)):
        child = os.fork()
        if not child:
            write_for_ever(write, models, path)
        time.sleep(chance.uniform(0.001, 0.03))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "the writer failed by itself"
        found[version(path, given, models)] += 1
    unfinished = len(list(Path(folder).glob(".model.*.partial")))
    save(models[0], path)
    assert version(path, given, models) == 0
    sys.stdout.write(json.dumps([list(found.values()), unfinished, len(list(Path(folder).iterdir()))]))


def write_for_ever(write: Callable[[nn.Module, Path], None], models: list[nn.Module], path: Path) -> None:
    try:
        for model in itertools.cycle(models):
            write(model, path)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def version(path: Path, given: nn.Module, models: list[nn.Module]) -> int:
    """Which of the models the file holds; -1 where it does not load."""
    try:
        weight = load(path, given)[0].weight
    except ValueError:
        return -1
    (same,) = (number for number, model in enumerate(models) if torch.equal(weight, model[0].weight))
    return same


def write_in_place(model: nn.Module, path: Path) -> None:
    """What save must not do."""
    tensors, header = artifact._describe(model)
    path.write_bytes(safetensors.torch.save(tensors, header.to_metadata()))


class TestWriting:
    kill = "from test_artifact import kill_writers; kill_writers(*sys.argv[1:])"

    def test_a_writer_that_is_killed_leaves_a_file_that_loads(self, tmp_path: Path) -> None:
        (neither, *versions), unfinished, files = json.loads(run(self.kill, tmp_path, "save", 150))
        assert neither == 0
        assert sum(versions) == 150
        assert min(versions) > 0, "the writers never came to write"
        assert unfinished > 0, "no writer was killed in the midst of its work"
        assert files == unfinished + 1

    def test_which_a_writer_in_place_does_not(self, tmp_path: Path) -> None:
        (neither, *_), unfinished, _ = json.loads(run(self.kill, tmp_path, "in place", 60))
        assert neither > 0
        assert unfinished == 0

    @pytest.mark.parametrize("step", ["fsync", "replace"])
    def test_an_error_leaves_the_old_file_and_no_other(
        self, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = a_file(tmp_path)
        data, model = path.read_bytes(), converted(make("mlp", 1), lowbit.recipes.w8a8())

        def fail(*arguments: Any) -> None:
            raise OSError(errno.ENOSPC, "the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(*((os, step) if step == "fsync" else (Path, step)), fail)
            with pytest.raises(OSError, match=r"the disk is full: .*model"):
                save(model, path)
        assert path.read_bytes() == data
        assert list(tmp_path.iterdir()) == [path]
        save(model, path)
        assert path.read_bytes() != data

    def test_the_order_of_what_reaches_the_disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The data, then the name, then the directory that holds the name; also where all of it fits a buffer."""
        model, steps = converted(Net(nn.Linear(2, 2), torch.randn(1, 2)), lowbit.Recipe(weight=8)), []
        fsync, replace = os.fsync, Path.replace

        def note_fsync(descriptor: int) -> None:
            place = Path(f"/proc/self/fd/{descriptor}").readlink()
            steps.append(("fsync", place.name if place != tmp_path else "directory", place.stat().st_size))
            fsync(descriptor)

        def note_replace(self: Path, target: Path) -> Path:
            steps.append(("replace", self.name, self.stat().st_size))
            return replace(self, target)

        monkeypatch.setattr(os, "fsync", note_fsync)
        monkeypatch.setattr(Path, "replace", note_replace)
        save(model, tmp_path / "model")
        size = (tmp_path / "model").stat().st_size
        assert size < io.DEFAULT_BUFFER_SIZE
        (_, draft, _), *_ = steps
        assert draft.startswith(".model.")
        assert draft.endswith(".partial")
        assert steps[:2] == [("fsync", draft, size), ("replace", draft, size)]
        assert [step[:2] for step in steps[2:]] == [("fsync", "directory")]

    def test_the_file_is_as_readable_as_any_other(self, tmp_path: Path) -> None:
        (tmp_path / "other").touch()
        assert a_file(tmp_path).stat().st_mode == (tmp_path / "other").stat().st_mode

    def test_paths(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        net = make("mlp", 0)
        model = converted(net, lowbit.recipes.w4())
        save(model, "model")
        assert_same_bits(load("model", make("mlp", 1).model)(net.batch), model(net.batch))
        (tmp_path / "folder").mkdir()
        with pytest.raises(
            ValueError, match="folder is a directory, but save writes a file; name one, such as folder/"
        ):
            save(model, "folder")
        with pytest.raises(FileNotFoundError, match="no directory to hold this file; make it first: 'none/model'"):
            save(model, "none/model")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "model"]
