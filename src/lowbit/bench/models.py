"""Whole models: what a training step of a quantized network costs, in units of the float step, beside the peers'."""

from __future__ import annotations

import copy
import gc
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lowbit import recipes
from lowbit.bench.contenders import UnfitError
from lowbit.bench.networks import DTYPES, Network
from lowbit.bench.peers import import_peer
from lowbit.bench.report import environment, format_seconds
from lowbit.bench.runner import Clock, alternate, cpu_clock, cuda_clock, cuda_peak_bytes
from lowbit.functional.float_linear import float_linear
from lowbit.kernels.float_products import has_faster
from lowbit.model import prepare, weights_once
from lowbit.nn.ops import QuantOp
from lowbit.preparation import quantizers
from lowbit.recipe import Recipe, Rule

FLOAT = "float"
_SAMPLE_SECONDS = {"cpu": 0.05, "cuda": 0.25}
# Small enough that a step repeated on one batch stays in the first, ordinary part of training.
_RATE = 1e-3
# Signal to noise of the logits, in decibels: of 8-bit networks, and of the same network compiled or captured.
_EIGHT_BITS, _SAME = 10.0, 60.0
_BF16 = 30.0  # of the same network in bf16, where compiled code rounds elsewhere
# Compiled sums come in another order, so that a few values round to the code beside: the loss moves by 1e-4 of itself.
_LOSS_TOLERANCE = 5e-3

LEGEND = (
    "step: median time of forward, loss, backward and SGD. /float: the median of the rounds' own ratios; spread: their "
    "interquartile range over it.\npeak: most bytes of tensors alive at once in a step, kept: those alive between "
    "forward and backward, both beyond parameters, buffers and optimizer state.\nSNR: of the checked logits, in "
    "training mode, float's being the signal."
)
_COLUMNS = ("step", "/float", "spread", "peak MB", "/float", "kept MB", "/float", "SNR dB")


@dataclass(frozen=True)
class Trainee:
    """A way to train a network: ``build(model, network, inputs)`` turns the float model into what is trained

    ``build`` raises UnfitError where it cannot. ``least_snr`` is what the check asks of the logits; None: nothing.
    """

    name: str
    build: Callable[[nn.Module, Network, Tensor], tuple[nn.Module, str]]
    least_snr: float | None = _EIGHT_BITS
    is_ours: bool = False
    compiled: bool = False
    breaks: bool = False  # what it compiles is not one graph
    captured: bool = False  # as a CUDA graph
    once: bool = False  # in weights_once: on a GPU, the codes of all weights in one launch


@dataclass
class ModelRow:
    """One trainee on one network. Ratios are medians of the rounds' own ratios, and None where not measured.

    ``status`` is ok, skipped (``note`` says why), wrong or failed; only what is ok was timed.
    """

    network: str
    contender: str
    status: str = "ok"
    note: str = ""
    seconds: float | None = None
    ratio_to_float: float | None = None
    spread: float | None = None
    peak_bytes: int | None = None
    kept_bytes: int | None = None
    snr_db: float | None = None
    rounds: int = 0


class Training:
    """A model, its batch and its optimizer: ``step()`` is one training step, and leaves no gradient behind."""

    def __init__(
        self,
        model: nn.Module,
        batch: tuple[Tensor, Tensor],
        *,
        compiled: bool = False,
        breaks: bool = False,
        regions: str = "",
        once: bool = False,
    ) -> None:
        self.model, self.inputs, self.targets = model, *batch
        self.weights = weights_once if once else nullcontext
        whole = compiled and not regions
        options: dict[str, Any] = {"fullgraph": not breaks, "dynamic": False}
        self.forward = torch.compile(model, **options) if whole else model
        for region in getattr(model, regions) if compiled and regions else ():
            region.compile(**options)
        self.optimizer = torch.optim.SGD(model.parameters(), _RATE, momentum=0.9)

    def forward_loss(self) -> tuple[Tensor, Tensor]:
        """logits, cross_entropy(logits, targets)"""
        logits = self.forward(self.inputs)
        return logits, functional.cross_entropy(logits.flatten(0, -2), self.targets.flatten())

    def step(self) -> None:
        """forward, loss, backward, SGD"""
        with self.weights(self.model):
            self.forward_loss()[1].backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def capture(self) -> None:
        """Make a CUDA graph of the step, which has run before."""
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step()

    def replay(self) -> None:
        """The captured step."""
        self.graph.replay()

    def state(self) -> list[Tensor]:
        """A copy of all parameters."""
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def tensors(self) -> list[Tensor]:
        """All that a step may change: parameters, buffers, and the optimizer's state."""
        momenta = [value for state in self.optimizer.state.values() for value in state.values()]
        owned = (*self.model.parameters(), *self.model.buffers(), *momenta)
        return [tensor.detach() for tensor in owned if isinstance(tensor, Tensor)]


def run_models(
    networks: Sequence[Network], trainees: Sequence[Trainee], device: torch.device, seconds: float
) -> Iterator[list[ModelRow]]:
    """The rows of each network, as soon as they are there."""
    for network in networks:
        yield run_network(network, trainees, device, seconds)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def run_network(
    network: Network, trainees: Sequence[Trainee], device: torch.device, seconds: float, clock: Clock | None = None
) -> list[ModelRow]:
    """The rows of one network, one for each trainee, in their order; float must be among them."""
    clock = clock or (cuda_clock if device.type == "cuda" else cpu_clock)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        try:
            model = network.build().to(device, DTYPES[device.type])
        except ImportError as error:
            return [ModelRow(network.name, FLOAT, "skipped", str(error))]
        inputs, targets = network.batch()
    inputs = inputs.to(DTYPES[device.type]) if inputs.is_floating_point() else inputs
    batch = inputs.to(device), targets.to(device)
    with torch.no_grad():
        signal = copy.deepcopy(model)(batch[0])
    torch.compiler.reset()  # else the networks share Dynamo's limit of recompilations
    rows, steps = [], {}
    for trainee in trainees:
        row = ModelRow(network.name, trainee.name)
        rows.append(row)
        try:
            trained, row.note = trainee.build(copy.deepcopy(model), network, batch[0])
            names = {name for name, _ in model.named_parameters()}
            training = _check(row, trainee, trained, batch, signal, names, network)
        except UnfitError as unfit:
            row.status, row.note = "skipped", str(unfit)
        except torch.cuda.OutOfMemoryError:
            row.status, row.note = "failed", "out of memory"
        except Exception as error:  # whatever a contender raises is its result
            row.status, row.note = "failed", f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        if row.status == "ok":
            training.step()  # the optimizer's state is there from now on
            row.peak_bytes, row.kept_bytes = _memory(training, device)
            if trainee.captured:
                _capture(row, training)
            if row.status == "ok":
                steps[trainee.name] = training.replay if trainee.captured else training.step
    fill_in(rows, alternate(steps, clock, seconds, _SAMPLE_SECONDS[device.type]))
    return rows


def _check(
    row: ModelRow,
    trainee: Trainee,
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    signal: Tensor,
    names: set[str],
    network: Network,
) -> Training:
    """The first step: are the logits near float's, the loss finite, and is there a gradient for every parameter?"""
    model.train()
    # Scales that follow the data start in a first, eager batch: torch.compile would compile that one too, and again.
    with torch.no_grad():
        model(batch[0])
    twin = Training(copy.deepcopy(model), batch) if trainee.compiled else None
    options = {"compiled": trainee.compiled, "breaks": trainee.breaks, "once": trainee.once}
    training = Training(model, batch, regions=network.regions, **options)
    logits, loss = training.forward_loss()
    problems = []
    if trainee.name != FLOAT:
        row.snr_db = signal_to_noise(logits.detach(), signal)
        least = None if trainee.least_snr is None else trainee.least_snr - network.extra_noise
        if least is not None and signal.dtype == torch.bfloat16:
            least = min(least, _BF16)
        if least is not None and not row.snr_db >= least:
            problems.append(f"the logits have {row.snr_db:.1f} dB of signal to noise, of {least:.0f}")
    if not loss.isfinite():
        problems.append(f"the loss is {loss.item()}")
    if twin is not None:
        eager = twin.forward_loss()[1].item()
        if not abs(loss.item() - eager) <= _LOSS_TOLERANCE * abs(eager):
            problems.append(f"the loss is {loss.item():.6g} compiled, {eager:.6g} eager")
    loss.backward()
    problems += _gradient_problems(model, names)
    training.optimizer.zero_grad()
    if problems:
        row.status, row.note = "wrong", "; ".join(problems)
    return training


def _capture(row: ModelRow, training: Training) -> None:
    """Capture the step, and compare what a replay makes of the parameters with what the step makes of them."""
    moves, before = [], [tensor.clone() for tensor in training.tensors()]
    training.capture()
    for step in (training.replay, training.step):
        for tensor, start in zip(training.tensors(), before, strict=True):
            tensor.copy_(start)
        first = training.state()
        step()
        moves.append([after - start for after, start in zip(training.state(), first, strict=True)])
    found, wanted = moves
    missed = [a - b for a, b in zip(found, wanted, strict=True)]
    error, size = (sum(float(part.double().square().sum()) for part in parts) for parts in (missed, wanted))
    if not error <= 1e-2 * size:
        row.status, row.note = "wrong", "a replay of the captured step does not move the parameters as the step does"


def _gradient_problems(model: nn.Module, names: set[str]) -> list[str]:
    """Parameters of the float network whose gradient is missing, zero or not finite."""
    parameters = dict(model.named_parameters())
    missing = names - parameters.keys()
    grads = {name: parameters[name].grad for name in names - missing}
    still = {name for name, grad in grads.items() if grad is None or not grad.any()}
    wild = {name for name, grad in grads.items() if grad is not None and not grad.isfinite().all()}
    kinds = {"is gone": missing, "has no gradient": still, "has a gradient that is not finite": wild}
    return [f"{min(found)} {what} ({len(found)} so)" for what, found in kinds.items() if found]


def signal_to_noise(noisy: Tensor, signal: Tensor) -> float:
    """10 * log10(sum(signal^2) / sum((noisy - signal)^2)); infinite where they are equal"""
    signal, noise = signal.double(), noisy.double() - signal.double()
    return float(10 * torch.log10(signal.square().sum() / noise.square().sum()))


def _memory(training: Training, device: torch.device) -> tuple[int, int]:
    """Bytes of one step beyond what was there before: the most at once, and those between forward and backward."""
    if device.type == "cuda":
        peak = cuda_peak_bytes(training.step, device)
        before = torch.cuda.memory_allocated(device)
        held = training.forward_loss()
        kept = torch.cuda.memory_allocated(device) - before
        del held
        return peak, kept
    return max(_allocations(training.step)), _allocations(training.forward_loss)[-1]


def _allocations(function: Callable[[], Any]) -> list[int]:
    """Bytes alive on the CPU after each allocation and release inside the call, its result still being held

    torch's profiler sees what its allocator gives out, in eager and in compiled code; not the scratch memory of oneDNN.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = function()
    del result
    assert profile.profiler is not None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive, total = [0], 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        alive.append(total)
    return alive


def fill_in(rows: Sequence[ModelRow], samples: dict[str, list[float]]) -> None:
    """The times of the rows that are ok, of seconds in each round."""
    for row in rows:
        if row.status != "ok":
            continue
        times = samples[row.contender]
        row.seconds, row.rounds = median(times), len(times)
        ratios = [mine / base for mine, base in zip(times, samples[FLOAT], strict=True)]
        row.ratio_to_float = median(ratios)
        quarter, _, three_quarters = quantiles(ratios, n=4)
        row.spread = (three_quarters - quarter) / row.ratio_to_float


def describe_models(rows: Sequence[ModelRow]) -> str:
    """One network as a block of text: its name, then a line for each trainee."""
    base = next(row for row in rows if row.contender == FLOAT)
    width = max(20, *(len(row.contender) for row in rows))
    lines = [rows[0].network, f"  {'':{width}}" + "".join(f"{name:>10}" for name in _COLUMNS)]
    for row in rows:
        if row.status == "ok":
            line = f"  {row.contender:{width}}" + "".join(f"{cell:>10}" for cell in _cells(row, base))
            lines.append(f"{line}  {row.note}".rstrip())
        else:
            lines.append(f"  {row.contender:{width}}{row.status:>10}: {row.note}")
    return "\n".join(lines)


def _cells(row: ModelRow, base: ModelRow) -> list[str]:
    cells = [
        "-" if row.seconds is None else format_seconds(row.seconds),
        "-" if row.ratio_to_float is None else f"{row.ratio_to_float:.2f}x",
        "-" if row.spread is None else f"{row.spread:.0%}",
    ]
    for mine, floats in ((row.peak_bytes, base.peak_bytes), (row.kept_bytes, base.kept_bytes)):
        cells.append("-" if mine is None else f"{mine / 1e6:.4g}")
        cells.append(f"{mine / floats:.2f}x" if mine is not None and floats else "-")
    return [*cells, "-" if row.snr_db is None else f"{row.snr_db:.1f}"]


def write_models_json(path: Path, rows: Iterable[ModelRow], device: torch.device, command: str) -> None:
    """The rows, and all that they depend on."""
    report = environment(device) | {"command": command, "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(report, indent=1) + "\n")


def _float(model: nn.Module, network: Network, inputs: Tensor) -> tuple[nn.Module, str]:
    return model, ""


class _FasterLinear(nn.Linear):
    """y = x @ w^T + b, by the library that lowbit's own layers take"""

    def forward(self, x: Tensor) -> Tensor:
        return float_linear(x, self.weight, self.bias)


def multiply_faster(model: nn.Module) -> nn.Module:
    """The float model, without quantizers, its linear layers by that library: what is left is the quantizers' share."""
    if next(model.parameters()).is_cuda or not has_faster():
        raise UnfitError("torch's own library for products of floats is the one that lowbit takes here too")
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = _FasterLinear
    return model


def _float_by_onednn(model: nn.Module, network: Network, inputs: Tensor) -> tuple[nn.Module, str]:
    return multiply_faster(model), ""


def _lowbit(recipe: Callable[[], Recipe]) -> Callable[[nn.Module, Network, Tensor], tuple[nn.Module, str]]:
    def build(model: nn.Module, network: Network, inputs: Tensor) -> tuple[nn.Module, str]:
        prepared = prepare(model, recipe(), inputs, inplace=True)
        roles = [role for _, role, _ in quantizers(prepared)]
        weights = roles.count("weight")
        has_ops = any(isinstance(module, QuantOp) for module in prepared.modules())
        where = "also sums and products outside of layers" if has_ops else "layers only"
        return prepared, f"quantizes {weights} weights, {len(roles) - weights} activations; {where}"

    return build


def _torchao(model: nn.Module, network: Network, inputs: Tensor) -> tuple[nn.Module, str]:
    if network.convolves:
        raise UnfitError("torchao quantizes linear layers, and this network is made of convolutions")
    return quantize_by_torchao(model), _only(model, "linear layers", nn.Linear)


def quantize_by_torchao(model: nn.Module) -> nn.Module:
    """8-bit affine tokens and 8-bit symmetric rows of weights, both from the data of each batch."""
    quantization, qat = import_peer("torchao.quantization"), import_peer("torchao.quantization.qat")
    config = qat.QATConfig(
        activation_config=qat.IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False),
        weight_config=qat.IntxFakeQuantizeConfig(torch.int8, "per_channel"),
        step="prepare",
    )
    quantization.quantize_(model, config)
    return model


def _brevitas(model: nn.Module, network: Network, inputs: Tensor) -> tuple[nn.Module, str]:
    """8-bit weights per output channel, from their own range; 8-bit inputs with one learned scale.

    It takes a percentile of each input in its first 300 batches; here in the first alone, so that what is timed is
    training and not calibration.
    """
    layers, quant = import_peer("brevitas.nn"), import_peer("brevitas.quant")
    act = type("Act", (quant.Int8ActPerTensorFloat,), {"collect_stats_steps": 1})
    schemes = {"weight_quant": quant.Int8WeightPerChannelFloat, "input_quant": act}
    for path, layer in list(model.named_modules()):
        device = next(layer.parameters(), inputs).device
        has_bias = getattr(layer, "bias", None) is not None
        if isinstance(layer, nn.Linear):
            new = layers.QuantLinear(layer.in_features, layer.out_features, bias=has_bias, **schemes)
        elif isinstance(layer, nn.Conv2d):
            sizes = {"kernel_size": layer.kernel_size, "stride": layer.stride, "padding": layer.padding}
            new = layers.QuantConv2d(layer.in_channels, layer.out_channels, **sizes, bias=has_bias, **schemes)
        else:
            continue
        new.load_state_dict(layer.state_dict(), strict=False)  # the quantizers start anew
        model.set_submodule(path, new.to(device))
    return model, _only(model, "convolutions and linear layers", nn.Linear, nn.Conv2d)


def _only(model: nn.Module, what: str, *kinds: type[nn.Module]) -> str:
    count = sum(isinstance(module, kinds) for module in model.modules())
    return f"quantizes {count} weights, {count} activations; {what} only"


def _linear_only() -> Recipe:
    """w8a8_dynamic for linear layers, and float for all else, as torchao has it"""
    every = recipes.w8a8_dynamic()
    return Recipe(rules=[Rule(nn.Linear, weight=every.weight, activation=every.activation)])


TRAINEES = (
    Trainee(FLOAT, _float, least_snr=None),
    Trainee("float by oneDNN", _float_by_onednn, least_snr=_SAME),
    Trainee("float compiled", _float, least_snr=_SAME, compiled=True),
    Trainee("lowbit w8a8", _lowbit(recipes.w8a8), is_ours=True),
    Trainee("lowbit w8a8_dynamic", _lowbit(recipes.w8a8_dynamic), is_ours=True),
    Trainee("lowbit w2a2", _lowbit(recipes.w2a2), least_snr=None, is_ours=True),
    Trainee("lowbit w8a8 compiled", _lowbit(recipes.w8a8), is_ours=True, compiled=True),
    Trainee("lowbit w8a8_dynamic compiled", _lowbit(recipes.w8a8_dynamic), is_ours=True, compiled=True),
    Trainee("lowbit linear only", _lowbit(_linear_only), is_ours=True),
    Trainee("lowbit linear only compiled", _lowbit(_linear_only), is_ours=True, compiled=True),
    Trainee("lowbit linear only, weights once", _lowbit(_linear_only), is_ours=True, once=True),
    Trainee("float captured", _float, least_snr=_SAME, captured=True),
    Trainee("lowbit w8a8_dynamic captured", _lowbit(recipes.w8a8_dynamic), is_ours=True, captured=True),
    Trainee("lowbit linear only captured", _lowbit(_linear_only), is_ours=True, captured=True),
    Trainee("float compiled, captured", _float, least_snr=_SAME, compiled=True, captured=True),
    Trainee(
        "lowbit w8a8_dynamic compiled, captured",
        _lowbit(recipes.w8a8_dynamic),
        is_ours=True,
        compiled=True,
        captured=True,
    ),
    Trainee("lowbit linear only compiled, captured", _lowbit(_linear_only), is_ours=True, compiled=True, captured=True),
    Trainee("torchao", _torchao),
    Trainee("torchao compiled", _torchao, compiled=True, breaks=True),
    Trainee("brevitas", _brevitas),
)
