"""save, load: a converted model as one safetensors file; the float model's own classes are all it needs beside."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lowbit.blueprint import Blueprint, Tensors, build, conversion_of
from lowbit.conversion import convert
from lowbit.copies import copied
from lowbit.export.extra import require
from lowbit.files import write_whole
from lowbit.model import preparation_of
from lowbit.version import __version__

Model = TypeVar("Model", bound=nn.Module)

# Of the header and of the blueprint in it: a lowbit reads its own and those below.
FORMAT = 1

_SAME = "pass the model that was saved, as it was before prepare"


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """file = the state_dict of the converted model; in its header the blueprint, the recipe and two checksums

    ``model`` is a converted model, or a prepared one, which is first converted with arithmetic="float".

    The file is written whole or not at all: a writer that is killed leaves the file that was there before. What it
    may leave beside, named ``.{name}.{uuid}.partial``, is its unfinished file; nothing reads it, and once no save runs
    it can be deleted.

    >>> import tempfile, lowbit
    >>> prepared = lowbit.prepare(nn.Linear(64, 8), lowbit.recipes.w4(), torch.randn(2, 64))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(prepared, f"{folder}/model.safetensors")
    ...     loaded = load(f"{folder}/model.safetensors", nn.Linear(64, 8))
    >>> x = torch.randn(2, 64)
    >>> torch.equal(loaded(x), prepared.eval()(x))
    True
    """
    safetensors, path = _safetensors(), Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a directory, but save writes a file; name one, such as {path / 'w4.safetensors'}")
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no directory to hold this file; make it first", str(path))
    tensors, header = _describe(_converted(model))
    data = safetensors.torch.save(tensors, header.to_metadata())
    write_whole(path, data)


@torch.no_grad()
def load(path: str | os.PathLike[str], model: Model) -> Model:
    """The converted model that was saved: its outputs are the same, to the bit

    ``model`` is the float model, whose weights do not matter; it may lie on the "meta" device. It stays as it is: a
    copy of it takes the file's tensors, on the device of its first tensor ("cpu" for "meta"). Buffers that no
    state_dict holds (persistent=False) are those of the given model. Tensors that it shares are shared again.

    A file that is damaged, changed, of a newer lowbit or of another model is a ValueError.
    """
    path = Path(path)
    _check_is_float(model)
    with _named(path):
        header, tensors = _read(path)
        loaded = copied(model)
        _check_weights(loaded, header.blueprint)
        build(loaded, header.blueprint)
        state = _state(loaded)
        _check_tensors(state, tensors, header)
        device = next((tensor.device for tensor in _all_tensors(model).values()), torch.device("cpu"))
        for key in state:
            state[key] = header.place(key, tensors, torch.device("cpu") if device.type == "meta" else device)
        ties = _ties(loaded, header)
        nn.Module.load_state_dict(loaded, state, assign=True)
        _tie(loaded, ties)
        _check_values(loaded)
    return loaded


@dataclass(frozen=True)
class _Header:
    """What the file says beside its tensors

    - ``aliases``: the keys of a state_dict whose tensor the file holds under another key, and that key
    - ``strides``: of the tensors that do not lie row by row, such as channels_last ones: a product may run by another
      kernel on them, and round otherwise
    - ``wide``: the scales that are float64, as those of float64 models may be; the others are float32
    - ``digest``: of the tensors in the file
    """

    blueprint: Blueprint
    aliases: dict[str, str]
    strides: dict[str, list[int]]
    wide: list[str]
    digest: str

    def to_metadata(self) -> dict[str, str]:
        metadata = {
            "lowbit_format": str(FORMAT),
            "lowbit_version": __version__,
            "torch_version": torch.__version__,
            "blueprint": json.dumps(self.blueprint.to_dict()),
            "aliases": json.dumps(self.aliases),
            "strides": json.dumps(self.strides),
            "wide": json.dumps(self.wide),
            "tensors_sha256": self.digest,
        }
        return metadata | {"metadata_sha256": _digest_text(metadata)}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> _Header:
        """The header that ``to_metadata`` wrote, or an error that says what is wrong with it."""
        if "lowbit_format" not in metadata:
            raise ValueError("this safetensors file is not one that lowbit.save wrote")
        number = metadata["lowbit_format"]
        if number.isdecimal() and int(number) > FORMAT:
            raise ValueError(
                f"the file was written by a newer lowbit ({metadata.get('lowbit_version', 'unknown')}), in format "
                f"{number}, and this one reads formats up to {FORMAT}; update lowbit"
            )
        written = {key: text for key, text in metadata.items() if key != "metadata_sha256"}
        if metadata.get("metadata_sha256") != _digest_text(written):
            raise ValueError("the header is damaged: its checksum differs from the one written; copy the file again")
        blueprint = Blueprint.from_dict(json.loads(metadata["blueprint"]))
        aliases, strides, wide = (json.loads(metadata[key]) for key in ("aliases", "strides", "wide"))
        return cls(blueprint, aliases, strides, wide, metadata["tensors_sha256"])

    def source(self, key: str) -> str:
        """The key under which the file holds this tensor."""
        return self.aliases.get(key, key)

    def is_scale(self, key: str) -> bool:
        """Whether this is the tensor of a quantizer's scales."""
        place, _, name = key.rpartition(".")
        return name == "scale" and (place in self.blueprint.weights or place in self.blueprint.activations)

    def place(self, key: str, tensors: Tensors, device: torch.device) -> Tensor:
        """A copy of the tensor, as it lay when it was saved; the file's own memory is mapped, and may change."""
        tensor = tensors[self.source(key)]
        strides = self.strides.get(self.source(key), list(tensor.stride()))
        return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=device).copy_(tensor)


def _converted(model: nn.Module) -> nn.Module:
    """The model itself where it is converted, by itself or in a wrapper; else what becomes of the prepared one."""
    for module in model.modules():
        if conversion_of(module) is not None:
            return module
    return convert(model, arithmetic="float")


def _describe(converted: nn.Module) -> tuple[Tensors, _Header]:
    """The tensors that a file holds, each once and dense, and what it says of them."""
    conversion = conversion_of(converted)
    assert conversion is not None
    weights = {  # of the dtype that they have now, which model.to(dtype) may have changed
        place: form | {"dtype": _dtype_name(converted.get_submodule(place).dtype)}
        for place, form in conversion.blueprint.weights.items()
    }
    tensors, aliases, strides = Tensors(), dict[str, str](), dict[str, list[int]]()
    keys: dict[Any, str] = {}
    storages = set()
    for key, tensor in _state(converted).items():
        _check_can_be_written(key, tensor)
        memory = tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        if keys.setdefault(memory, key) != key:
            aliases[key] = keys[memory]
            continue
        if _is_dense(tensor) and tensor.stride() != torch.empty(tensor.shape, device="meta").stride():
            strides[key] = list(tensor.stride())
        written = tensor.detach().cpu().contiguous()
        storage = written.untyped_storage().data_ptr()
        # Other views of one memory, such as those of a recurrent layer's weights on a GPU, are tensors of their own.
        tensors[key] = written.clone() if storage in storages else written
        storages.add(storage)
    header = _Header(replace(conversion.blueprint, weights=weights), aliases, strides, [], _digest(tensors))
    header.wide.extend(key for key in tensors if header.is_scale(key) and tensors[key].dtype == torch.float64)
    return tensors, header


def _check_can_be_written(key: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{key} is a {type(tensor).__name__}, but the file holds only tensors; make it one, or drop it")
    if tensor.is_meta:
        raise ValueError(f"{key} lies on the meta device, and has no values to save; load or train the model first")
    if tensor.layout != torch.strided:
        raise ValueError(f"{key} is a {tensor.layout} tensor, but the file holds only dense ones; call its to_dense()")


def _is_dense(tensor: Tensor) -> bool:
    """Whether the tensor fills its memory, in whatever order of axes."""
    axes = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(axes).is_contiguous()


def _read(path: Path) -> tuple[_Header, Tensors]:
    """The header, once it is found whole, and the tensors, which are still to be checked."""
    safetensors = _safetensors()
    if path.is_dir():
        raise ValueError("this is a directory; name a file that lowbit.save wrote")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            header = _Header.from_metadata(file.metadata() or {})
            return header, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
    except FileNotFoundError as error:
        hint = "there is no such file; write it with lowbit.save"
        raise FileNotFoundError(errno.ENOENT, hint, str(path)) from error
    except safetensors.SafetensorError as error:
        raise ValueError(f"this is no safetensors file, or only a part of one: {error}") from error


def _check_is_float(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}, but it must be an nn.Module, the float model")
    for module in model.modules():
        for what, found in (("prepared", preparation_of(module)), ("converted", conversion_of(module))):
            if found is not None:
                raise ValueError(f"the model is {what}, but load takes the float model; {_SAME}")


def _check_weights(model: nn.Module, blueprint: Blueprint) -> None:
    """The float weights that codes will stand for have their shapes and dtypes."""
    modules, owned = dict(model.named_modules()), {place: path for path, place in blueprint.owned.items()}
    shared = {place: places[0] for places in blueprint.edges for place in places}
    for place in {**blueprint.weights, **shared}:
        form = blueprint.weights.get(shared.get(place, place))
        if form is None or (".quantized_ops." in f".{place}" and place not in owned):
            continue  # no weight; or one that stays in the model as well
        weight = owned.get(place, place.removesuffix("_quantizer"))
        path, _, name = weight.rpartition(".")
        tensor = getattr(modules.get(path), name, None)
        if tensor is None:
            raise ValueError(f"the model has no {weight}, for which the file has codes; {_SAME}")
        _check_same(weight, (form["dtype"], tuple(form["shape"])), _kind(tensor))


def _check_tensors(state: Mapping[str, Any], tensors: Tensors, header: _Header) -> None:
    """The file has what the model needs, and as it was written."""
    held = {key for key in (*tensors, *header.aliases) if header.source(key) in tensors}
    if missing := [key for key in state if key not in held]:
        raise ValueError(f"the file has no {', '.join(missing)}, which the model has; {_SAME}")
    if unknown := sorted(held - state.keys()):
        raise ValueError(f"the model has no {', '.join(unknown)}, which the file has; {_SAME}")
    for key, wanted in state.items():
        if key.endswith("_extra_state"):  # whose shape is its module's own affair
            continue
        dtype, shape = _kind(wanted)
        if header.is_scale(key):
            dtype = "float64" if header.source(key) in header.wide else "float32"
        _check_same(key, _kind(tensors[header.source(key)]), (dtype, shape))
    if _digest(tensors) != header.digest:
        raise ValueError("the tensors are damaged: their checksum differs from the one written; copy the file again")


def _check_same(key: str, got: tuple[str, tuple[int, ...]], wanted: tuple[str, tuple[int, ...]]) -> None:
    if got != wanted:
        raise ValueError(
            f"{key} is {got[0]} of shape {got[1]} in the file, but the model needs {wanted[0]} of shape {wanted[1]}: "
            f"the file was changed, or the model is another; {_SAME}"
        )


def _check_values(loaded: nn.Module) -> None:
    if empty := [key for key, tensor in _all_tensors(loaded).items() if tensor.is_meta]:
        raise ValueError(
            f"no state_dict holds {', '.join(empty)}, and the given model has it on the meta device, without values; "
            "pass a model on another device"
        )


def _ties(model: nn.Module, header: _Header) -> list[list[str]]:
    """The keys of each tensor that the model, with nothing loaded, holds more than once."""
    keys: dict[int, list[str]] = {}
    for key, tensor in _state(model, keep_vars=True).items():
        keys.setdefault(id(tensor), []).append(key)
    ties = [tied for tied in keys.values() if len(tied) > 1]
    for tied in ties:
        if len({header.source(key) for key in tied}) > 1:
            raise ValueError(f"the model has one tensor as {' and '.join(tied)}, but the file has several; {_SAME}")
    return ties


def _tie(model: nn.Module, ties: list[list[str]]) -> None:
    state = _state(model, keep_vars=True)
    for first, *others in ties:
        for key in others:
            path, _, name = key.rpartition(".")
            setattr(model.get_submodule(path), name, state[first])


def _state(model: nn.Module, *, keep_vars: bool = False) -> dict[str, Any]:
    """torch's own state_dict: a model's own may have other ideas of what it saves, and of what it loads."""
    return nn.Module.state_dict(model, keep_vars=keep_vars)


def _all_tensors(model: nn.Module) -> Tensors:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _kind(tensor: Tensor) -> tuple[str, tuple[int, ...]]:
    return _dtype_name(tensor.dtype), tuple(tensor.shape)


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _digest(tensors: Tensors) -> str:
    digest = hashlib.sha256()
    for key in sorted(tensors):
        digest.update(json.dumps([key, tensors[key].nbytes]).encode())
        digest.update(tensors[key].flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _digest_text(metadata: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(sorted(metadata.items())).encode()).hexdigest()


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors that say of which file they speak."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _safetensors() -> Any:
    require("safetensors.torch", "export")
    return require("safetensors", "export")
