"""The page in a real Chromium: it opens, draws, answers the pointer and the keys, sorts, and fits a phone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lowbit.app.report import Report, write
from lowbit.app.report_parts import Curve, Histogram, Measure, Table
from reporting import sample

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
EVIL = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"

pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="chromium and chromedriver are not installed (apt: chromium-driver)"
)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    driver.set_script_timeout(20)
    yield driver
    driver.quit()


class Browser:
    """A page in Chromium, at a width and in a scheme; ``close`` fails if anything was logged."""

    def __init__(self, driver: Any, folder: Path) -> None:
        self.driver, self.folder = driver, folder

    def open(self, report: Report, width: int = 1280, scheme: str = "light") -> None:
        path = self.folder / "report.html"
        write(report, path)
        phone = width < 600
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": phone}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": phone})
        wanted = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}  # scrolls are done at once then
        features = [{"name": name, "value": value} for name, value in wanted.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        self.driver.get(path.as_uri())
        self.settle()

    def settle(self) -> None:
        """Charts are drawn in the frame after the one that gave them a size."""
        self.driver.execute_async_script(
            "const done = arguments[0]; requestAnimationFrame(() => setTimeout(() => requestAnimationFrame(done), 50))"
        )

    def run(self, script: str, *args: Any) -> Any:
        return self.driver.execute_script(script, *args)

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements("css selector", selector)

    def one(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def hover(self, element: Any, x: int = 0, y: int = 0) -> str:
        """What the tooltip says with the pointer this far from the element's middle."""
        from selenium.webdriver import ActionChains

        self.reach(element)
        ActionChains(self.driver).move_to_element_with_offset(element, x, y).perform()
        return self.one("#tip").text

    def reach(self, element: Any) -> None:
        """Scroll to an element, out from under the bar at the top; a scroll hides the tooltip, so wait for its end."""
        self.run("arguments[0].scrollIntoView({block: 'center'})", element)
        self.settle()

    def sizes(self) -> list[list[float]]:
        """Width and height of every drawing that is not in a closed <details>."""
        return self.run(
            "return [...document.querySelectorAll('.plot')].filter((plot) => plot.checkVisibility())"
            ".map((plot) => { const box = plot.querySelector('svg')?.getBoundingClientRect(); "
            "return [box?.width ?? 0, box?.height ?? 0, plot.querySelectorAll('path, circle, rect').length]; })"
        )

    def overflow(self) -> int:
        return self.run("return document.documentElement.scrollWidth - document.documentElement.clientWidth")

    def column(self, table: Any, index: int) -> list[str]:
        script = "return [...arguments[0].tBodies[0].rows].map((row) => row.cells[arguments[1]].textContent)"
        return self.run(script, table, index)


@pytest.fixture
def browser(chromium: Any, tmp_path: Path) -> Iterator[Browser]:
    yield Browser(chromium, tmp_path)
    logged = chromium.get_log("browser")
    assert not [entry for entry in logged if entry["level"] in ("SEVERE", "WARNING")]


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light"), (360, "dark")])
def test_a_run_opens_and_every_chart_is_drawn(browser: Browser, width: int, scheme: str) -> None:
    report = sample()
    browser.open(report, width, scheme)
    sizes = browser.sizes()
    assert len(sizes) == 1 + 2 + 1 + len(report.histograms) + 2 * len(report.rules) + 2 + 2
    room = width - 2 * (16 if width < 640 else 24) - 16  # less margins and a scroll bar
    assert all(min(room, 250) <= wide <= room + 16 and high >= 80 and parts >= 2 for wide, high, parts in sizes)
    assert browser.overflow() == 0
    dark = browser.run("return getComputedStyle(document.body).backgroundColor") == "rgb(16, 20, 24)"
    assert dark == (scheme == "dark")
    assert browser.driver.title == report.title


def test_hover_tells_values(browser: Browser) -> None:
    report = sample()
    browser.open(report)
    loss = browser.hover(browser.one("#training .plot"))
    step = int(loss.split("\n")[0].removeprefix("step "))
    assert 80 < step < 120
    for curve in report.curves[:2]:
        assert curve.name in loss
        assert f"{curve.y[step - 1]:.4g}" in loss
    assert len(browser.all("#training .marks circle")) == 2
    noise = browser.hover(browser.one("#noise .plot"))
    assert "dB" in noise
    assert noise.split("\n")[0] in {row["layer"] for row in report.noise}
    weight = next(part for part in report.histograms if part.tensor == "weight")
    bars = browser.hover(browser.one("#histograms .plot")).split("\n")
    assert bars[0].startswith("weight / scale ")
    code = int(bars[3].removeprefix("code "))
    assert bars[-2:] == [f"values with code {code}", str((weight.codes or [])[code - weight.quant_min])]
    assert "quantized" in browser.hover(browser.one("#accuracy .plot"), 0, 15)
    browser.hover(browser.one("h1"))
    assert not browser.one("#tip").is_displayed()


def test_keys_read_a_chart_aloud(browser: Browser) -> None:
    browser.open(sample())
    plot = browser.one("#training .plot")
    assert plot.get_attribute("role") == "img"
    assert plot.get_attribute("aria-label") == "Line chart of loss over step: float, quantized"
    browser.reach(plot)
    plot.send_keys("\ue011")  # Home
    assert browser.one("#tip").text.startswith("step 1\n")
    plot.send_keys("\ue014\ue014")  # twice right
    said = browser.run("return document.getElementById('spoken').textContent")
    assert said.startswith("step 3, float ")
    plot.send_keys("\ue00c")  # Escape
    assert not browser.one("#tip").is_displayed()


def test_a_finger_reads_a_chart_too(browser: Browser) -> None:
    browser.open(sample(), 390)
    plot = browser.one("#training .plot")
    browser.reach(plot)
    box = browser.run("const {x, y, width, height} = arguments[0].getBoundingClientRect(); "
                      "return {x: x + width / 2, y: y + height / 2}", plot)  # fmt: skip
    for kind, points in (("touchStart", [box]), ("touchEnd", [])):
        browser.driver.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    browser.settle()
    assert browser.one("#tip").text.startswith("step ")  # though the finger is gone
    edges = browser.run("const {left, right} = document.getElementById('tip').getBoundingClientRect(); "
                        "return [left, right]")  # fmt: skip
    assert edges[0] >= 0
    assert edges[1] <= 390


def test_a_legend_hides_and_shows(browser: Browser) -> None:
    browser.open(sample())
    first = browser.one("#training .legend button")
    assert (first.text, first.get_attribute("aria-pressed")) == ("float", "true")
    before = len(browser.all("#training .chart:first-child path"))
    first.click()
    assert first.get_attribute("aria-pressed") == "false"
    assert len(browser.all("#training .chart:first-child path")) < before
    assert "float" not in browser.hover(browser.one("#training .plot"))
    first.click()
    assert len(browser.all("#training .chart:first-child path")) == before


def test_counts_switch_between_logarithmic_and_linear(browser: Browser) -> None:
    browser.open(sample())

    def drawn() -> str:
        return browser.one("#histograms .plot path").get_attribute("d")

    before = drawn()
    browser.one("#log-counts").click()
    assert drawn() != before
    browser.one("#log-counts").click()
    assert drawn() == before


def test_tables_sort_by_each_column(browser: Browser) -> None:
    rows = [["layer.10", 2.5, "b"], ["layer.9", None, "a"], ["layer.2", 1e-3, "c"], ["layer.1", 300, "a"]]
    browser.open(Report("t", tables=[Table("s", ["name", "value", "tag"], rows)]))
    table = browser.one("table")
    name, value, tag = browser.all("thead th")
    assert [head.get_attribute("aria-sort") for head in (name, value, tag)] == ["none"] * 3
    name.click()
    assert browser.column(table, 0) == ["layer.1", "layer.2", "layer.9", "layer.10"]
    assert [head.get_attribute("aria-sort") for head in (name, value, tag)] == ["ascending", "none", "none"]
    value.find_element("css selector", "button").send_keys("\ue007")  # Enter
    assert browser.column(table, 0) == ["layer.2", "layer.10", "layer.1", "layer.9"]  # nothing last
    value.click()
    assert value.get_attribute("aria-sort") == "descending"
    assert browser.column(table, 0) == ["layer.1", "layer.10", "layer.2", "layer.9"]  # nothing last, here too
    tag.click()
    assert browser.column(table, 2) == ["a", "a", "b", "c"]
    assert browser.column(table, 0)[:2] == ["layer.1", "layer.9"]  # equal ones in the order that they had


def test_a_real_table_sorts(browser: Browser) -> None:
    browser.open(sample())
    table, head = browser.one("#noise table"), browser.all("#noise thead th")[2]
    head.click()
    up = [float(cell) for cell in browser.column(table, 2)]
    head.click()
    down = [float(cell) for cell in browser.column(table, 2)]
    assert up == sorted(up)
    assert down == sorted(up, reverse=True)
    assert len(up) == len(sample().noise)


@pytest.mark.parametrize("width", [1280, 360])
def test_names_and_numbers_that_are_hostile(browser: Browser, width: int) -> None:
    """Names that are markup or as long as a line, and values that no axis has a place for."""
    nan = float("nan")
    long = "model.encoder.layers.10.self_attention.output_projection.weight_quantizer" * 2
    names = [EVIL, long, *(f"layer.{i}" for i in range(30))]
    report = Report(
        EVIL,
        facts={EVIL: long, "command": EVIL},
        findings=[EVIL],
        tables=[Table(EVIL, [EVIL, long], [[EVIL, long]])],
        curves=[
            Curve(EVIL, "nothing", [1, 2], [nan, nan]),
            Curve("a", "one", [1], [1e-9]),
            Curve("a", "constant", [1, 2, nan], [0, 0, 0]),
            Curve("a", "huge", [1, 2], [-1e300, 1e300]),
        ],
        noise=[{"layer": name, "tensor": "weight", "snr_db": -3.0} for name in names] + [{"layer": "l", "snr_db": nan}],
        histograms=[
            Histogram(name, "weight", [0, 1e-3, 1], [0, 10**9], 1e-3, 0, -128, 127, [1] * 256) for name in names
        ]
        + [Histogram("l", "activation", [nan, nan], [1], 1.0), Histogram("m", "bias", [0, 1], [0])],
        scales=[Curve(name, "scale", [0, 1, 2], [0.0, -1.0, 10.0**-i]) for i, name in enumerate(names)],
        sizes=[Measure(long, 0.0), Measure(EVIL, nan), Measure("b", 12345678.0)],
    )
    browser.open(report, width)
    assert browser.overflow() == 0
    assert browser.driver.title == EVIL
    assert browser.all("img") == []
    assert all(wide > 0 and high > 0 for wide, high, _ in browser.sizes())
    assert "and 24 more" in browser.hover(browser.one("#scales .plot"), 10)
    drawn = len(browser.sizes())
    browser.reach(browser.one("summary"))
    browser.one("summary").click()
    browser.settle()
    sizes = browser.sizes()
    assert len(sizes) == drawn + 20
    assert all(wide > 0 and high > 0 for wide, high, _ in sizes)
    assert browser.driver.title == EVIL


def test_paper_has_everything_on_it(browser: Browser) -> None:
    report = Report("t", histograms=[Histogram(f"layer.{i}", "weight", [0, 1, 2], [1, 2]) for i in range(20)])
    browser.open(report)
    assert len(browser.sizes()) == 12
    browser.driver.execute_cdp_cmd("Page.printToPDF", {})
    assert len(browser.sizes()) == 20
    assert all(wide > 0 for wide, _, _ in browser.sizes())
