"""A report of a real run: a small network, trained at 4 bits on random clusters."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

import lowbit
from lowbit import FakeQuantize, Learned, PerChannel, QuantSpec, Recipe
from lowbit.app.report import Report
from lowbit.app.report_parts import Accuracy, Curve, Histogram, Measure, Table
from lowbit.preparation import quantizers

RECIPE = Recipe(
    weight=QuantSpec(bits=4, per=PerChannel(0), scale_mode=Learned(), narrow=True),
    activation=QuantSpec(bits=4, symmetric=False, scale_mode=Learned(batch_axis=0)),
)
STEPS, BATCH = 200, 64


class Net(nn.Module):
    """Four linear layers, in blocks, so that their names have dots."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(32, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(2))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Run:
    """Training in float, then quantized, with what happened on the way."""

    def __init__(self, seed: int = 0) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.centres = torch.randn(10, 32, generator=self.random)
        torch.manual_seed(seed)
        self.loss: dict[str, list[float]] = {"float": [], "quantized": []}
        self.checked: dict[str, list[float]] = {"float": [], "quantized": []}
        self.scales: dict[str, list[float]] = {}
        self.test = self.draw(1000)
        model = Net()
        self.train(model, "float")
        self.float_model = model
        x, _ = self.draw(256)
        self.model = lowbit.prepare(model, RECIPE, x)
        lowbit.calibrate(self.model, [x])
        self.after = self.accuracy(self.model)
        self.train(self.model, "quantized")
        self.model.eval()

    def draw(self, count: int) -> tuple[Tensor, Tensor]:
        """Points around their centres."""
        label = torch.randint(10, (count,), generator=self.random)
        return self.centres[label] + 1.6 * torch.randn(count, 32, generator=self.random), label

    def train(self, model: nn.Module, name: str) -> None:
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        model.train()
        for step in range(STEPS):
            x, label = self.draw(BATCH)
            loss = nn.functional.cross_entropy(model(x), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            self.loss[name].append(loss.item())
            if step % 20 == 19:
                self.checked[name].append(self.accuracy(model).value or 0)
            if name == "quantized":
                for path, _, quantizer in quantizers(model):
                    self.scales.setdefault(path, []).append(quantizer.scale.mean().item())

    @torch.no_grad()
    def accuracy(self, model: nn.Module, name: str = "post-training") -> Accuracy:
        x, label = self.test
        share = (model(x).argmax(1) == label).double().mean().item()
        margin = 1.96 * (share * (1 - share) / len(x)) ** 0.5
        return Accuracy(name, 100 * share, 100 * (share - margin), 100 * min(share + margin, 1))

    def by_bits(self) -> Table:
        """What rounding alone leaves, at a number of bits."""
        found = []
        for bits in (8, 6, 4, 3, 2):
            recipe = Recipe(weight=replace(RECIPE.weight, bits=bits), activation=replace(RECIPE.activation, bits=bits))
            x, _ = self.draw(256)
            model = lowbit.prepare(self.float_model, recipe, x)
            lowbit.calibrate(model, [x])
            signal = lowbit.noise(model, self.test[0]).lines[0]
            found.append([f"w{bits}a{bits}", bits, self.accuracy(model).value, signal.decibels, layer_of(signal.path)])
        columns = ["recipe", "bits", "accuracy (%)", "lowest signal-to-noise (dB)", "in layer"]
        return Table("Post-training, by bits", columns, found, "The float network, rounded but not trained further.")

    @torch.no_grad()
    def histograms(self) -> list[Histogram]:
        """Of every weight in steps of its own scale, for it has one for each channel; of every activation as it is."""
        seen: dict[str, Tensor] = {}
        handles = [
            quantizer.register_forward_pre_hook(lambda _, args, path=path: seen.update({path: args[0]}))
            for path, _, quantizer in quantizers(self.model)
        ]
        self.model(self.test[0])
        for handle in handles:
            handle.remove()
        return [
            _histogram(layer_of(path), role, seen[path], quantizer)
            for path, role, quantizer in quantizers(self.model)
            if path in seen
        ]


def layer_of(path: str) -> str:
    """The layer of a quantizer's path."""
    return path.rpartition(".")[0]


def _histogram(layer: str, role: str, x: Tensor, quantizer: FakeQuantize) -> Histogram:
    low, high = quantizer.quant_range()
    if role == "weight":
        x, scale, zero_point, label = x / quantizer.scale.reshape(-1, 1), 1.0, 0, "weight / scale"
    else:
        scale, zero_point, label = quantizer.scale.item(), int(quantizer.zero_point.item() + 0.5), "value"
    # Bins of an even width as far as the grid is wide to either side; one more at each end for what is far out.
    near = [(q - zero_point) * scale for q in (2 * low - high, 2 * high - low)]
    inner = torch.linspace(max(near[0], x.min().item()), min(near[1], x.max().item()), 61)
    far = [end for end in (x.min(), x.max()) if not near[0] <= end <= near[1]]
    counts, edges = torch.histogram(x.flatten(), torch.stack([*inner, *far]).sort().values)
    codes = lowbit.functional.quantize(x, scale, zero_point, grid=quantizer.grid, dtype=torch.int32) - low
    used = torch.bincount(codes.flatten(), minlength=high - low + 1).tolist()
    counted = [int(count) for count in counts.tolist()]
    return Histogram(layer, role, edges.tolist(), counted, scale, zero_point, low, high, used, label)


@cache
def sample() -> Report:
    """The report of a run, with everything in it; made once."""
    with tempfile.TemporaryDirectory() as folder:
        return _report(Run(), Path(folder))


def _report(run: Run, folder: Path) -> Report:
    x, _ = run.test
    path = folder / "net-w4a4.onnx"
    lowbit.export_onnx(run.model, x[:4], path)
    total = lowbit.summary(run.model)
    results = [run.accuracy(run.float_model, "float"), run.after, run.accuracy(run.model, "quantized")]
    gained = (results[2].value or 0) - (results[0].value or 0)
    steps = list(range(1, STEPS + 1))
    checks = steps[19::20]
    return Report(
        title="Four linear layers at 4 bits",
        facts={
            "model": "Net: four linear layers, two residual sums",
            "data": "10 random clusters in 32 dimensions, 1,000 test points",
            "recipe": "4-bit weights per channel, 4-bit affine activations, learned scales",
            "seed": "0",
            "versions": f"lowbit {lowbit.__version__}, torch {torch.__version__}",
            "device": "cpu",
            "command": "lowbit train --model net --recipe w4a4.toml --steps 200 --seed 0",
        },
        findings=[
            f"At 4 bits {results[2].value:.1f} % of the answers are right, {gained:+.1f} points against float.",
            f"Without training, rounding alone leaves {results[1].value:.1f} %.",
            f"The parameters take {100 * total.bytes / total.float_bytes:.0f} % of the bytes they take in float.",
        ],
        accuracy=results,
        curves=[
            *(Curve(name, "loss", steps, ys, "step", "cross-entropy") for name, ys in run.loss.items()),
            *(Curve(name, "test accuracy", checks, ys, "step", "%") for name, ys in run.checked.items()),
        ],
        noise=[
            {"layer": layer_of(line.path), "tensor": line.role, "snr_db": line.decibels}
            for line in lowbit.noise(run.model, x).lines
        ],
        histograms=run.histograms(),
        rules=["clipped_identity", "in_range", "hard_tanh"],
        scales=[
            Curve(name, "weights" if "weight" in name else "activations", steps, ys, "step", "scale")
            for name, ys in run.scales.items()
        ],
        sizes=[
            Measure("float", float(total.float_bytes)),
            Measure("quantized", float(total.bytes)),
            Measure("net-w4a4.onnx", float(path.stat().st_size)),
            Measure("float, 1,000 points", _seconds(run.float_model, x), "s"),
            Measure("prepared, 1,000 points", _seconds(run.model, x), "s"),
        ],
        verification=lowbit.verify(run.model, path, x[:64]).to_dict(),
        tables=[run.by_bits()],
    )


@torch.no_grad()
def _seconds(model: nn.Module, x: Tensor) -> float:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        model(x)
        times.append(time.perf_counter() - start)
    return sorted(times)[2]
