"""The file that save writes: what is in it, how large it is, and what another process makes of it."""

from __future__ import annotations

import hashlib
import itertools
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lowbit
from compare import assert_same_bits
from lowbit.blueprint import conversion_of
from lowbit.export.artifact import load, save
from lowbit.fake_quantize import FakeQuantize
from lowbit.flow import call
from lowbit.packing import unpack
from preparing import ARITHMETICS
from saving import Net, a_file, converted, make, read, run


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
        got = json.loads(run("from test_artifact_files import load_all; load_all(sys.argv[1])", tmp_path))
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
