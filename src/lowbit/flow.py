"""Flow: what one run of a float model shows of how its data flows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lowbit.nn.attention import disable_fast_path, enable_fast_path
from lowbit.nn.families import family_of
from lowbit.nn.ops import KINDS, Kind, counts, not_in_place, operands

# What gives no negative value; what gives none if it takes none; and what gives only values that it takes, or zero.
_NON_NEGATIVE = {"relu", "relu_", "relu6", "sigmoid", "softmax", "hardsigmoid", "abs", "square", "exp", "softplus"}
_MOVES = {
    *("view", "reshape", "flatten", "unflatten", "permute", "transpose", "contiguous", "clone", "squeeze", "unsqueeze"),
    *("__getitem__", "chunk", "split", "detach", "expand", "repeat", "to", "narrow", "select", "t", "movedim"),
    *("max_pool1d", "max_pool2d", "max_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d"),
    *("pixel_shuffle", "channel_shuffle", "unbind", "roll", "flip", "view_as", "reshape_as", "index_select"),
}
_KEEPS_SIGN = _MOVES | {
    *("dropout", "mean", "sum", "cat", "concat", "stack", "add", "add_", "mul", "mul_", "interpolate", "pad"),
    *("avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"),
}
_KEEPS_GRID = _MOVES | {"relu", "relu_", "pad"}

Key = tuple[int, int]


class Value(NamedTuple):
    """What is known of a tensor: the layers it comes from, whether it can be negative, and its last join."""

    sources: frozenset[str] = frozenset()
    non_negative: bool = False
    joined: str = ""


class Use(NamedTuple):
    """A tensor that a consumer takes in one of its slots; ``order`` is that of the run."""

    key: Key
    value: Value
    order: int
    dims: int


@dataclass
class Site:
    """An op in the forward of a module: its kind, its number there, and what it takes, by slot."""

    owner: str
    kind: Kind
    number: int
    uses: dict[str, Use]
    weights: dict[str, Tensor]
    sole: frozenset[str] = frozenset()  # the slots of weights that nothing else takes

    @property
    def name(self) -> str:
        """As in ``add_0``."""
        return f"{self.kind.name}_{self.number}"


@dataclass
class Flow:
    """All that a run showed. Paths are those of ``named_modules``."""

    uses: dict[str, dict[str, Use]]  # of each layer called, by slot
    sites: list[Site]
    totals: dict[str, dict[str, int]]  # how many ops of each kind a call of an owner runs, where all calls agree
    folds: list[tuple[str, str]]  # a layer, and the batch norm that alone takes its output
    in_place: bool = False  # some module drops the result of an add_, whose effect it wants
    device: torch.device | None = None  # of the example inputs


def trace(model: nn.Module, example_inputs: Any) -> Flow:
    """Run the model in eval mode and without gradients, once as it is and once watched: both must agree."""
    modules = list(model.modules())
    for module in modules:
        disable_fast_path(module)
    try:
        with torch.no_grad(), torch.random.fork_rng(), in_eval_mode(model):
            torch.manual_seed(0)
            wanted = call(model, example_inputs)
            recorder = _Recorder(model)
            recorder.seed(example_inputs)
            torch.manual_seed(0)
            with recorder.watching():
                got = call(model, example_inputs)
    finally:
        for module in modules:
            enable_fast_path(module)
    flow = recorder.flow(got)
    pairs = zip(tree_leaves(wanted), tree_leaves(got), strict=True)
    flow.in_place = not all(_same(a, b) for a, b in pairs)
    flow.device = next((leaf.device for leaf in tree_leaves(example_inputs) if isinstance(leaf, Tensor)), None)
    return flow


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """The model in eval mode; afterwards every module in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def call(model: nn.Module, batch: Any) -> Any:
    """model(batch), model(*batch) or model(**batch), by the type of the batch"""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, list | tuple) and not hasattr(batch, "_fields"):
        return model(*batch)
    return model(batch)


class _Frame(NamedTuple):
    path: str
    call: int


@dataclass
class _Op:
    stack: tuple[_Frame, ...]
    kind: Kind
    found: list[Tensor]
    keys: list[Key]
    values: list[Value]
    result: Key
    order: int


class _Recorder(TorchFunctionMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.alive: list[Any] = []  # so that no two tensors have one id
        self.values: dict[Key, Value] = {}
        self.uses: dict[str, dict[str, Use]] = {}
        self.calls: Counter[str] = Counter()
        self.takers: Counter[Key] = Counter()
        self.made_by: dict[Key, str] = {}
        self.norms: list[tuple[str, Key, int]] = []
        self.stack: list[_Frame] = []
        self.ops: list[_Op] = []
        self.inside: list[str] = []  # layers that are running: what they compute is their own affair

    def seed(self, inputs: Any) -> None:
        """What comes in is data; integers and masks are not."""
        for tensor in _tensors(inputs):
            self.alive.append(tensor)
            if tensor.is_floating_point():
                self.values[_key(tensor)] = Value(frozenset({""}))

    @contextmanager
    def watching(self) -> Iterator[None]:
        handles = []
        for path, module in self.model.named_modules():
            handles.append(module.register_forward_pre_hook(self._entering(path), with_kwargs=True))
            handles.append(module.register_forward_hook(self._leaving(path), with_kwargs=True, always_call=True))
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _entering(self, path: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.calls[path] += 1
            family = family_of(module)
            if family is not None and not self.inside:
                taken = family.inputs(args, kwargs)
                uses = {slot: self._use(x) for slot, x in taken.items() if isinstance(x, Tensor)}
                self.uses[path] = _merged(self.uses[path], uses) if path in self.uses else uses
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and args:  # noqa: SLF001
                self.norms.append((path, _key(args[0]), args[0].dim()))
            if family is not None:
                self.inside.append(path)
            self.stack.append(_Frame(path, self.calls[path]))

        return enter

    def _leaving(self, path: str) -> Callable[..., None]:
        def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self.stack.pop()
            if self.inside and self.inside[-1] == path:
                self.inside.pop()
                for tensor in _tensors(output):
                    self.alive.append(tensor)
                    self.values[_key(tensor)] = Value(frozenset({path}))
                    self.made_by[_key(tensor)] = path

        return leave

    def _use(self, x: Tensor) -> Use:
        self.alive.append(x)
        return Use(_key(x), self.values.get(_key(x), Value()), len(self.alive), x.dim())

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        taken = _tensors((args, kwargs))
        keys = [_key(tensor) for tensor in taken]
        kind = KINDS.get(func)
        found = operands(kind, args, kwargs) if kind is not None else []
        numbered = kind is not None and not self.inside and counts(kind, found)
        before = [_key(operand) for operand in found] if numbered else []
        # As in a prepared model, where the result of += is a new tensor.
        result = (not_in_place(func) if numbered else func)(*args, **kwargs)
        made = _tensors(result)
        if not made:
            return result
        self.alive.extend((taken, made))
        for key in set(keys):
            self.takers[key] += 1
        operands_of = [self.values.get(key, Value()) for key, x in zip(keys, taken, strict=True) if _is_float(x)]
        value = _derive(getattr(func, "__name__", ""), args, kwargs, operands_of)
        for tensor in made:
            self.values[_key(tensor)] = value
        if numbered:
            assert kind is not None
            values = [self.values.get(key, Value()) for key in before]
            self.ops.append(_Op(tuple(self.stack), kind, found, before, values, _key(made[0]), len(self.alive)))
            if kind.joins:
                self.values[_key(made[0])] = value._replace(joined=str(len(self.ops) - 1))
        return result

    def flow(self, outputs: Any) -> Flow:
        for tensor in _tensors(outputs):
            self.takers[_key(tensor)] += 1
        chosen = [op for op in self.ops if self._is_wanted(op)]
        wanted = {id(op) for op in chosen}
        owners = {op.stack[-1].path for op in chosen}
        numbers: Counter[tuple[_Frame, str]] = Counter()
        sites: dict[tuple[str, str], Site] = {}
        names: dict[str, str] = {}
        for index, op in enumerate(self.ops):
            frame = next((frame for frame in reversed(op.stack) if frame.path in owners), None)
            if frame is None:
                continue
            number = numbers[frame, op.kind.name]
            numbers[frame, op.kind.name] += 1
            if id(op) in wanted and op.stack[-1] == frame:
                site = self._site(frame.path, number, op)
                if (frame.path, site.name) in sites:
                    site.uses = _merged(sites[frame.path, site.name].uses, site.uses)
                sites[frame.path, site.name] = site
                names[str(index)] = f"{frame.path}.{site.name}".removeprefix(".")
        return Flow(
            {path: _named(uses, names) for path, uses in self.uses.items()},
            [replace(site, uses=_named(site.uses, names)) for site in sites.values()],
            _agreed(numbers),
            list(self._folds()),
        )

    def _is_wanted(self, op: _Op) -> bool:
        """Products of data; sums and joins of what came through different layers: those of residual networks."""
        if op.kind.name in ("add", "cat"):
            sources = [value.sources for value in op.values]
            fits = op.kind.joins or op.found[0].shape == op.found[1].shape
            return fits and all(sources) and len(set(sources)) > 1
        return bool(op.values[0].sources)

    def _site(self, owner: str, number: int, op: _Op) -> Site:
        if op.kind.joins:
            # A key of its own: the consumers of the result take what this quantizer has given.
            value = self.values[op.result]._replace(joined="")
            uses = {"result_quantizer": Use((-1, op.order), value, op.order, op.found[0].dim())}
            return Site(owner, op.kind, number, uses, {})
        uses, weights = {}, {}
        for name, x, key, value in zip(op.kind.operands, op.found, op.keys, op.values, strict=True):
            if name == op.kind.weight and not value.sources:
                weights[f"{name}_quantizer"] = x
            elif value.sources:
                uses[f"{name}_quantizer"] = Use(key, value, op.order, x.dim())
        sole = {slot for slot, weight in weights.items() if self.takers[_key(weight)] == 1}
        return Site(owner, op.kind, number, uses, weights, frozenset(sole))

    def _folds(self) -> Iterator[tuple[str, str]]:
        modules = dict(self.model.named_modules())
        for path, key, dims in self.norms:
            layer = self.made_by.get(key)
            if layer is None or self.takers[key] != 1 or self.calls[path] != 1 or self.calls[layer] != 1:
                continue
            if can_fold(modules[layer], modules[path], dims):
                yield layer, path


def can_fold(layer: Any, norm: Any, dims: int = 0) -> bool:
    """Whether a batch norm's channels are the layer's outputs, and its running statistics are kept."""
    family = family_of(layer)
    if family is None or not family.folds or norm.running_mean is None:
        return False
    outputs = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    grouped = isinstance(layer, nn.modules.conv._ConvTransposeNd) and layer.groups > 1  # noqa: SLF001
    return outputs == norm.num_features and not grouped and not (isinstance(layer, nn.Linear) and dims > 2)


def _derive(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], taken: list[Value]) -> Value:
    """What is known of a function's result; a parameter is a Value of which nothing is known."""
    sources = frozenset[str]().union(*(value.sources for value in taken))
    lowest = args[1] if len(args) > 1 else kwargs.get("min_val", kwargs.get("min"))
    clamps = name in ("hardtanh", "clamp", "clamp_min") and isinstance(lowest, int | float) and lowest >= 0
    filling = (args[3] if len(args) > 3 else kwargs.get("value")) or 0 if name == "pad" else 0
    factors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, int | float)]
    keeps = name in _KEEPS_SIGN and bool(taken) and all(value.non_negative for value in taken) and filling >= 0
    if name in ("add", "add_", "mul", "mul_"):
        keeps = keeps and all(factor >= 0 for factor in factors)
    if name == "interpolate":
        keeps = keeps and kwargs.get("mode", "nearest") != "bicubic"  # which overshoots
    joined = taken[0].joined if name in _KEEPS_GRID and len(taken) == 1 and filling == 0 else ""
    return Value(sources, name in _NON_NEGATIVE or clamps or keeps, joined)


def _merged(first: dict[str, Use], later: dict[str, Use]) -> dict[str, Use]:
    """What a layer or op takes, of two calls: what is known of both tensors; and it is no one's edge but its own."""
    merged = {}
    for slot, use in first.items():
        other = later.get(slot, use)
        value = Value(
            use.value.sources | other.value.sources,
            use.value.non_negative and other.value.non_negative,
            use.value.joined if use.value.joined == other.value.joined else "",
        )
        key = use.key if use.key == other.key else (-2, use.order)
        merged[slot] = use._replace(value=value, key=key)
    return merged


def _agreed(numbers: Mapping[tuple[_Frame, str], int]) -> dict[str, dict[str, int]]:
    found: dict[tuple[str, str], set[int]] = {}
    for (frame, kind), count in numbers.items():
        found.setdefault((frame.path, kind), set()).add(count)
    totals: dict[str, dict[str, int]] = {}
    for (path, kind), counts_seen in found.items():
        if len(counts_seen) == 1:
            totals.setdefault(path, {})[kind] = counts_seen.pop()
    return totals


def _named(uses: dict[str, Use], names: dict[str, str]) -> dict[str, Use]:
    """The same, with the last join by its name; "" where that is not quantized."""
    return {
        slot: use._replace(value=use.value._replace(joined=names.get(use.value.joined, "")))
        for slot, use in uses.items()
    }


def _key(tensor: Tensor) -> Key:
    with torch._C.DisableTorchFunction():  # noqa: SLF001
        return id(tensor), 0 if tensor.is_inference() else tensor._version  # noqa: SLF001


def _is_float(x: Tensor) -> bool:
    with torch._C.DisableTorchFunction():  # noqa: SLF001
        return x.is_floating_point()


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _same(a: Any, b: Any) -> bool:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return True
    # A lost sum shows plainly; the last bits may differ from run to run on a GPU.
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-3, atol=1e-5, equal_nan=True)
