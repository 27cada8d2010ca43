"""load: a clear error for every damaged file, every other file and every other model."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn

import lowbit
from lowbit.export.artifact import load, save
from models.small import all_state, assert_same_states, mlp
from saving import Net, a_file, assert_refused, converted, make, prepared, read


def rewrite(path: Path, tensors: Mapping[str, Any] = {}, metadata: Mapping[str, str] = {}) -> None:
    """Change some of a file, as one would who knows the format; a tensor that is None is left out."""
    old_tensors, old_metadata = read(path)
    new = {key: value for key, value in {**old_tensors, **tensors}.items() if value is not None}
    safetensors.torch.save_file(new, path, {**old_metadata, **metadata})


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
