"""The documentation is run: its snippets, its list of names, its pictures."""

from __future__ import annotations

import doctest
import importlib.util
import itertools
import re
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest
import torch

import lowbit
from lowbit import Grid, SteKind
from lowbit.functional import dequantize, fake_quantize, quantize
from lowbit.observers import Histogram

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
SOURCES = [ROOT / "README.md", *PAGES]

FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    language: str
    line: int
    code: str


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page, with the line on which each one's code starts."""
    return [
        Block(
            match["language"],
            text.count("\n", 0, match.start("body")) + 1,
            "".join(line.removeprefix(match["indent"]) for line in match["body"].splitlines(keepends=True)),
        )
        for match in FENCE.finditer(text)
    ]


def run_page(text: str, name: str) -> int:
    """Run the python blocks of a page, in order, in one namespace; the number of blocks."""
    namespace: dict[str, object] = {"__name__": "page"}
    snippets = [block for block in blocks(text) if block.language == "python"]
    with torch.random.fork_rng():
        for block in snippets:
            if ">>>" in block.code:
                run_doctest(block, name, namespace)
            else:
                # Blank lines put the block where it stands on the page, so that a traceback names the right line.
                exec(compile("\n" * (block.line - 1) + block.code, name, "exec"), namespace)
    return len(snippets)


def run_doctest(block: Block, name: str, namespace: dict[str, object]) -> None:
    test = doctest.DocTestParser().get_doctest(block.code, namespace, name, name, block.line - 1)
    report: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(test, out=report.append, clear_globs=False)
    namespace.update(test.globs)
    assert not result.failed, "".join(report)


@pytest.mark.parametrize("page", SOURCES, ids=lambda page: page.name)
def test_snippets_run(page: Path):
    run_page(page.read_text(encoding="utf-8"), page.name)


# A tutorial opens with what it is for.
@pytest.mark.parametrize(
    "page", [page for page in PAGES if not page.name.startswith("tutorial_")], ids=lambda page: page.name
)
def test_a_page_opens_with_a_formula_and_has_a_snippet(page: Path):
    languages = [block.language for block in blocks(page.read_text(encoding="utf-8"))]
    assert languages[0] == "text"
    assert "python" in languages


def test_blocks_of_a_page_share_a_namespace():
    page = (
        "```python\na = 1\n```\n\n```python\n>>> a + 1\n2\n>>> b = 3\n```\n\n"
        "- item\n\n    ```python\n    assert b == 3\n    ```\n"
    )
    assert run_page(page, "page.md") == 3


@pytest.mark.parametrize(
    ("page", "error"),
    [
        ("```python\nassert False\n```\n", AssertionError),
        ("```python\n>>> 1 + 1\n3\n```\n", AssertionError),
        ("```python\n>>> undefined\n```\n", AssertionError),
        ("```python\nundefined\n```\n", NameError),
        ("    ```python\n    undefined\n    ```\n", NameError),
    ],
)
def test_a_snippet_that_does_not_run_fails(page: str, error: type[Exception]):
    with pytest.raises(error):
        run_page(page, "page.md")


def names_in_code(text: str) -> set[str]:
    """The words inside code spans and fenced blocks."""
    spans = re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
    return set(re.findall(r"\w+", " ".join([*spans, *(block.code for block in blocks(text))])))


@pytest.mark.parametrize("module", [lowbit, lowbit.functional], ids=lambda module: module.__name__)
def test_every_public_name_is_documented(module: ModuleType):
    mentioned = set().union(*(names_in_code(page.read_text(encoding="utf-8")) for page in PAGES))
    assert set(module.__all__) - mentioned == set()


def test_names_in_code_are_not_those_in_prose():
    assert names_in_code("A round table, `F.clamp(x)`.\n\n```python\nfloor(1)\n```\n") == {
        "F",
        "clamp",
        "x",
        "floor",
        "1",
    }


@pytest.fixture(scope="module")
def draw() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw", ROOT / "docs" / "draw.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pictures_are_drawn_once(draw: ModuleType, tmp_path: Path):
    draw.draw_all(tmp_path)
    files = sorted(tmp_path.iterdir())
    assert len(files) == 2 * len(draw.PICTURES)
    assert all(path.read_text().startswith("<?xml") and path.stat().st_size > 1000 for path in files)

    # A second build writes nothing, so that `mkdocs serve` does not see a change and build again.
    written = {path: path.stat().st_mtime_ns for path in files}
    draw.draw_all(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == written


def test_every_picture_is_shown_and_every_shown_picture_exists(draw: ModuleType):
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert set(re.findall(r"\(pictures/([\w-]+)\.svg\)", text)) == set(draw.PICTURES)


def test_a_picture_is_shown_in_both_themes(draw: ModuleType):
    assert draw.on_page_markdown("![a b](pictures/x.svg)", page=None) == (
        "![a b](pictures/x-light.svg#only-light) ![a b](pictures/x-dark.svg#only-dark)"
    )


def library_gradient(example, x: torch.Tensor, ste: SteKind) -> np.ndarray:
    """What autograd gives for g = 1, which is not the function that the pictures call."""
    x = x.clone().requires_grad_()
    y = fake_quantize(x, example.scale, example.zero_point, grid=example.grid, ste=ste)
    return torch.autograd.grad(y.sum(), x)[0].numpy()


def curves(axes) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return {line.get_label(): line.get_data() for line in axes.get_lines()}


@pytest.mark.parametrize("ste", list(SteKind))
def test_the_picture_of_a_rule_plots_the_library(draw: ModuleType, ste: SteKind):
    axes = draw.gradient(ste, draw.LIGHT).get_axes()
    assert [example.grid.bits for example in draw.EXAMPLES] == [3, 3]
    for example, above, below in zip(draw.EXAMPLES, axes[:2], axes[2:], strict=True):
        x, y = curves(above)["y"]
        x = torch.tensor(x)
        codes = quantize(x, example.scale, example.zero_point, grid=example.grid)
        low, high = example.range
        assert x.min() < low < high < x.max()
        assert len(codes.unique()) == 8
        np.testing.assert_array_equal(y, dequantize(codes, example.scale, example.zero_point))
        np.testing.assert_array_equal(curves(below)["dx"][1], library_gradient(example, x, ste))


def test_the_picture_of_all_rules_plots_the_library(draw: ModuleType):
    axes = iter(draw.gradients(draw.DARK).get_axes())
    for ste in SteKind:
        for example in draw.EXAMPLES:
            x, dx = curves(next(axes))[ste.name]
            np.testing.assert_array_equal(dx, library_gradient(example, torch.tensor(x), ste))


def test_the_examples_are_a_symmetric_and_an_affine_grid(draw: ModuleType):
    symmetric, affine = draw.EXAMPLES
    assert symmetric.grid.signed
    assert symmetric.zero_point == 0
    assert affine.zero_point != 0


def test_the_picture_of_scale_modes_plots_the_library(draw: ModuleType):
    lines = curves(draw.scale_modes(draw.LIGHT).get_axes()[0])
    scales = [batch.abs().max().item() / Grid(4, narrow=True).quant_max for batch in draw.noisy_batches()]
    np.testing.assert_allclose(lines["PerBatch()"][1], scales, rtol=1e-6)
    for decay in (0.9, 0.99):
        averages = [scales[0]]
        for scale in scales[1:]:
            averages.append(decay * averages[-1] + (1 - decay) * scale)
        np.testing.assert_allclose(lines[f"EMA({decay})"][1], averages, rtol=1e-5)


def test_the_picture_of_observers_plots_the_library(draw: ModuleType):
    above, below = draw.observers(draw.LIGHT).get_axes()
    values = draw.skewed_values()
    assert sum(bar.get_height() for bar in above.patches) == values.numel()

    scale, zero_point = histogram_params("mse", values)
    low, high = below.get_lines()[2].get_xdata()
    assert low == pytest.approx((0 - zero_point) * scale)
    assert high == pytest.approx((15 - zero_point) * scale)
    assert [label.get_text() for label in below.get_yticklabels()][2] == "mse"


def histogram_params(method: str, values: torch.Tensor) -> tuple[float, int]:
    watcher = Histogram(method=method, bins=1024)
    watcher.observe(values)
    scale, zero_point = watcher.quant_params(Grid(4, signed=False), symmetric=False)
    return scale.item(), zero_point.item()


def test_the_picture_of_granularities_plots_the_library(draw: ModuleType):
    panels = {axis.get_title().split("\n")[0]: axis for axis in draw.granularities(draw.LIGHT).get_axes()}
    for per, group in (
        (lowbit.PerTensor(), lambda i, j, k: 0),
        (lowbit.PerChannel(axis=2), lambda i, j, k: k),
        (lowbit.PerToken(), lambda i, j, k: 4 * i + j),
        (lowbit.PerGroup(size=4), lambda i, j, k: 8 * i + 2 * j + k // 4),
        (lowbit.PerBlock(rows=2, columns=4), lambda i, j, k: 4 * i + 2 * (j // 2) + k // 4),
    ):
        expected = [group(i, j, k) for i, j, k in itertools.product(range(2), range(4), range(8))]
        assert draw.scale_groups(per, (2, 4, 8)).flatten().tolist() == expected
        assert [text.get_text() for text in panels[str(per)].texts] == list(map(str, expected))
