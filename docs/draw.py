"""The pictures of the documentation, drawn by lowbit itself, and the mkdocs hooks that put them in place.

Each function draws one picture and returns it; ``PICTURES`` names them. Every picture comes in two themes, for a light
and for a dark page.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Rectangle
from torch import Tensor

from lowbit import EMA, FakeQuantize, Grid, PerBatch, PerBlock, PerChannel, PerGroup, PerTensor, PerToken, SteKind
from lowbit.functional import fake_quantize, fake_quantize_backward
from lowbit.granularity import Granularity
from lowbit.observers import Histogram, MinMax


class Theme(NamedTuple):
    """The colours of one kind of page, chosen to stay apart for the colour-blind."""

    name: str
    ink: str
    faint: str
    band: str
    forward: str
    gradient: str


LIGHT = Theme("light", "#30363d", "#8f99a3", "#e8eef4", "#0072b2", "#c44e00")
DARK = Theme("dark", "#d5d9e0", "#7d8594", "#2d3343", "#6cb8f0", "#ff9e57")

# About the width of a page's text, so that letters keep the size they are given here.
WIDTH = 7.2


def style(theme: Theme) -> dict[str, Any]:
    """What matplotlib is told, once, for every picture."""
    inked = ("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor")
    lined = ("axes.edgecolor", "xtick.color", "ytick.color")
    return {
        **dict.fromkeys(inked, theme.ink),
        **dict.fromkeys(lined, theme.faint),
        "axes.facecolor": "none",
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlepad": 14,
        "axes.titlesize": 9,
        "font.size": 9,
        "lines.linewidth": 1.8,
        "svg.hashsalt": "lowbit",  # the same picture, the same bytes
    }


class Example(NamedTuple):
    """A quantizer to draw: its name, grid, scale and zero point."""

    name: str
    grid: Grid
    scale: float
    zero_point: int

    @property
    def range(self) -> tuple[float, float]:
        """lo, hi = (quant_min - z) * s, (quant_max - z) * s"""
        low, high = self.grid.quant_min - self.zero_point, self.grid.quant_max - self.zero_point
        return low * self.scale, high * self.scale

    def forward(self, x: Tensor) -> Tensor:
        """y = fake_quantize(x)"""
        return fake_quantize(x, self.scale, self.zero_point, grid=self.grid)

    def gradient(self, x: Tensor, ste: SteKind) -> Tensor:
        """dx of the rule, for g = 1"""
        return fake_quantize_backward(torch.ones_like(x), x, self.scale, self.zero_point, grid=self.grid, ste=ste)


EXAMPLES = (
    Example("symmetric: codes -4 to 3, s = 0.5, z = 0", Grid(3), 0.5, 0),
    Example("affine: codes 0 to 7, s = 0.5, z = 2", Grid(3, signed=False), 0.5, 2),
)

# Past both ends of both examples, in steps that hit every rounding boundary.
INPUTS = torch.arange(-600, 701, dtype=torch.float64) / 200


def gradient(ste: SteKind, theme: Theme) -> Figure:
    """One rule: the staircase y above and dx for g = 1 below, on a symmetric and on an affine grid."""
    figure = Figure(figsize=(WIDTH, 3.9), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True, sharey="row", height_ratios=(3, 2))
    for (above, below), example in zip(axes.T, EXAMPLES, strict=True):
        _mark_range(above, example, theme)
        _mark_range(below, example, theme)
        _label_range(above, example, theme)
        above.plot(INPUTS, INPUTS, color=theme.faint, linewidth=1, linestyle="dotted")
        above.plot(INPUTS, example.forward(INPUTS), color=theme.forward, label="y")
        below.plot(INPUTS, example.gradient(INPUTS, ste), color=theme.gradient, label="dx")
        above.set(title=example.name, ylim=(-2.5, 3), yticks=(-2, -1, 0, 1, 2))
        below.set(xlabel="x", xlim=(-3, 3.5), ylim=(-0.1, 1.2), yticks=(0, 0.5, 1))
    axes[0, 0].set_ylabel("y")
    axes[1, 0].set_ylabel("dx, for g = 1")
    return figure


def gradients(theme: Theme) -> Figure:
    """Every rule, one row each: dx for g = 1, on a symmetric and on an affine grid."""
    figure = Figure(figsize=(WIDTH, 4.6), layout="constrained")
    axes = figure.subplots(len(SteKind), len(EXAMPLES), sharex=True, sharey=True)
    for row, ste in zip(axes, SteKind, strict=True):
        for axis, example in zip(row, EXAMPLES, strict=True):
            dx = example.gradient(INPUTS, ste)
            _mark_range(axis, example, theme)
            axis.fill_between(INPUTS[::4], dx[::4], color=theme.gradient, alpha=0.15, linewidth=0)
            axis.plot(INPUTS, dx, color=theme.gradient, label=ste.name)
            axis.set(xlim=(-3, 3.5), ylim=(-0.12, 1.3), yticks=(0, 1))
        row[0].set_ylabel(ste.name.replace("_", "_\n"), rotation=0, ha="right", va="center", linespacing=1.5)
    for axis, example in zip(axes[0], EXAMPLES, strict=True):
        axis.set_title(example.name)
        _label_range(axis, example, theme)
    for axis in axes[-1]:
        axis.set_xlabel("x")
    figure.supylabel("dx, for g = 1", fontsize="medium")
    return figure


def scale_modes(theme: Theme) -> Figure:
    """The scale after every batch of a noisy sequence: PerBatch follows each batch, EMA their mean."""
    batches = noisy_batches()
    figure = Figure(figsize=(WIDTH, 3.1), layout="constrained")
    axis = figure.subplots()
    axis.plot(
        per_batch_scales(batches), color=theme.faint, linewidth=0.8, marker="o", markersize=2.5, label="PerBatch()"
    )
    axis.plot(ema_scales(batches, 0.9), color=theme.gradient, label="EMA(0.9)")
    axis.plot(ema_scales(batches, 0.99), color=theme.forward, linestyle="dashed", label="EMA(0.99)")
    axis.set(xlabel="batch", ylabel="scale", xlim=(-2, len(batches) + 1), ylim=(0, None))
    axis.legend(loc="upper left", ncols=3, frameon=False)
    return figure


def noisy_batches() -> list[Tensor]:
    """Batches whose spread doubles half way, with an outlier now and then."""
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(256, generator=generator) * (1 if step < 90 else 2) for step in range(180)]
    for step in (20, 64, 71, 130, 155):
        batches[step][0] = 2.5 * batches[step].abs().max()
    return batches


def per_batch_scales(batches: list[Tensor]) -> list[float]:
    """The scale that PerBatch gives each batch, read off the largest value it lets out."""
    quantizer = FakeQuantize(4, narrow=True, scale_mode=PerBatch())
    return [quantizer(batch).abs().max().item() / quantizer.grid.quant_max for batch in batches]


def ema_scales(batches: list[Tensor], decay: float) -> list[float]:
    """The state of EMA after each batch."""
    quantizer = FakeQuantize(4, narrow=True, scale_mode=EMA(decay))
    scales = []
    for batch in batches:
        quantizer(batch)
        scales.append(quantizer.scale.item())
    return scales


def observers(theme: Theme) -> Figure:
    """What Histogram counted, and the range that each method chose for it."""
    figure = Figure(figsize=(WIDTH, 3.9), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(5, 4))
    watcher = Histogram(bins=256)
    watcher.observe(skewed_values())
    width = watcher.limit.item() / (watcher.bins // 2)
    left = [(bin_ - watcher.bins // 2) * width for bin_ in range(watcher.bins)]
    above.bar(left, watcher.counts.tolist(), width=width, align="edge", color=theme.forward, alpha=0.75, linewidth=0)
    above.set(yscale="log", ylabel="count (log)")
    ranges = observed_ranges()
    for row, (low, high) in enumerate(ranges.values()):
        below.plot((low, high), (row, row), color=theme.gradient, linewidth=2, marker="|", markersize=10)
    below.set(xlabel="x", ylim=(len(ranges) - 0.4, -0.6), yticks=range(len(ranges)), yticklabels=ranges)
    below.grid(axis="x", color=theme.band)
    above.set_xlim(watcher.low.item() - 0.5, watcher.high.item() + 0.5)
    below.tick_params(axis="y", length=0)
    return figure


def skewed_values() -> Tensor:
    """Values as an activation has them: most near 0, a long tail to one side, a few far out."""
    generator = torch.Generator().manual_seed(1)
    bulk = torch.randn(20_000, generator=generator)
    tail = torch.empty(2_000).exponential_(0.6, generator=generator)
    return torch.cat([bulk.where(bulk > 0, bulk * 0.6), tail])


@cache
def observed_ranges() -> dict[str, tuple[float, float]]:
    """lo, hi of a 4-bit affine grid, by the name of the method that chose it."""
    grid, ranges = Grid(4, signed=False), {}
    for name, watcher in (
        ("MinMax", MinMax()),
        ("percentile=99.9", Histogram(method="percentile", percentile=99.9)),
        ("mse", Histogram(method="mse", bins=1024)),
        ("entropy", Histogram(method="entropy", bins=1024)),
    ):
        watcher.observe(skewed_values())
        scale, zero_point = watcher.quant_params(grid, symmetric=False)
        ranges[name] = Example(name, grid, scale.item(), int(zero_point)).range
    return ranges


def granularities(theme: Theme) -> Figure:
    """Which elements of a (2, 4, 8) tensor share a scale: one shape, one colour and one number, one scale."""
    figure = Figure(figsize=(WIDTH, 5.2), layout=ConstrainedLayoutEngine(hspace=0.08))
    panels = figure.subplots(2, 3)
    colours = LinearSegmentedColormap.from_list("cells", ("#f6d55c", "#7cc0ad", "#3a7ca5", "#2a4a86"))
    pers = (PerTensor(), PerChannel(axis=2), PerToken(), PerGroup(size=4), PerBlock(rows=2, columns=4))
    for axis, per in zip(panels.flat, pers, strict=False):
        groups = scale_groups(per, (2, 4, 8))
        shade = groups / max(int(groups.max()), 1)
        for sheet, row, column in itertools.product(*map(range, groups.shape)):
            colour, down = shade[sheet, row, column].item(), sheet * 4.7
            left, top, right, bottom = _cell(groups[sheet], row, column)
            corner, size = (left, top + down), (right - left, bottom - top)
            axis.add_patch(Rectangle(corner, *size, color=colours(colour), linewidth=0))
            axis.annotate(
                str(groups[sheet, row, column].item()),
                (column + 0.5, row + 0.52 + down),
                ha="center",
                va="center",
                color="#1b1f24" if colour < 0.5 else "#ffffff",
                fontsize=7,
            )
        axis.set_title(f"{per}\nscale {tuple(per.scale_shape(groups.shape))}", pad=5)
        axis.set(xlim=(0, 8), ylim=(8.7, 0), aspect="equal")
        axis.set_axis_off()
    panels.flat[-1].set_axis_off()
    panels.flat[-1].annotate(_KEY, (0.05, 0.5), xycoords="axes fraction", va="center", linespacing=1.6)
    return figure


def _cell(sheet: Tensor, row: int, column: int) -> tuple[float, float, float, float]:
    """left, top, right, bottom of a cell: a gap where the neighbour has another scale, an overlap where it has not."""

    def edge(down: int, across: int) -> float:
        r, c = row + down, column + across
        inside = 0 <= r < sheet.shape[0] and 0 <= c < sheet.shape[1]
        return 0.02 if inside and sheet[r, c] == sheet[row, column] else -0.05

    return column - edge(0, -1), row - edge(-1, 0), column + 1 + edge(0, 1), row + 1 + edge(1, 0)


_KEY = "x has shape (2, 4, 8):\ntwo sheets of 4 x 8.\n\nElements with the same\nnumber share a scale."


def scale_groups(per: Granularity, shape: tuple[int, ...]) -> Tensor:
    """The number of the scale that each element of a tensor of this shape uses."""
    numbers = torch.arange(math.prod(per.scale_shape(shape))).reshape(per.scale_shape(shape))
    split = per.split(torch.empty(shape))
    return per.join(per.spread(numbers, split).expand(split.shape), shape)


def _mark_range(axis: Axes, example: Example, theme: Theme) -> None:
    axis.axvspan(*example.range, color=theme.band, linewidth=0, zorder=0)


def _label_range(axis: Axes, example: Example, theme: Theme) -> None:
    for name, end in zip(("lo", "hi"), example.range, strict=True):
        axis.annotate(
            name, (end, 1), xycoords=("data", "axes fraction"), xytext=(0, 1), textcoords="offset points",
            ha="center", va="bottom", color=theme.ink, fontsize=8,
        )  # fmt: skip


PICTURES: dict[str, Callable[[Theme], Figure]] = {
    **{f"gradient-{ste.value}": partial(gradient, ste) for ste in SteKind},
    "gradients": gradients,
    "scale-modes": scale_modes,
    "observers": observers,
    "granularities": granularities,
}


def render(picture: Callable[[Theme], Figure], theme: Theme) -> bytes:
    """The picture as SVG, on a transparent ground; the same bytes on every run."""
    with mpl.rc_context(style(theme)):
        buffer = io.BytesIO()
        picture(theme).savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    return buffer.getvalue()


def draw_all(folder: Path) -> None:
    """Write every picture in both themes; a file that would not change is left alone, so that a watcher stays calm."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in PICTURES.items():
        for theme in (LIGHT, DARK):
            path, content = folder / f"{name}-{theme.name}.svg", render(picture, theme)
            if not path.exists() or path.read_bytes() != content:
                path.write_bytes(content)


def on_pre_build(config: Any) -> None:
    """Mkdocs calls this before it collects files."""
    draw_all(Path(config.docs_dir) / "pictures")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A page names a picture once, ``pictures/name.svg``; the site shows the one that fits its theme."""
    both = " ".join(rf"![\1](pictures/\2-{theme.name}.svg#only-{theme.name})" for theme in (LIGHT, DARK))
    return re.sub(r"!\[([^\]]*)\]\(pictures/([\w-]+)\.svg\)", both, markdown)
