"""The page that `--plot` writes: drawn in a browser, with no network."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SHORT = ("--set", "batches=12", "--set", "warm_up=4")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine to open the page in")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as started:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        opened = started.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield opened
        opened.close()


@pytest.fixture
def opened(browser, said, tmp_path):
    """opened("--sweep", …) is the page, after checking that it asked for nothing but itself and complained of nothing."""

    def open_it(*arguments: str, scheme: str = "light") -> Any:
        path: Path = tmp_path / "page.html"
        assert said("simulate", "--plot", path, *arguments, *SHORT).code == 0
        page = browser.new_context(
            offline=True, viewport={"width": 1280, "height": 800}, color_scheme=scheme
        ).new_page()
        requests: list[str] = []
        complaints: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(path.as_uri())
        page.wait_for_load_state("networkidle")
        assert requests == [path.as_uri()]
        assert complaints == []
        return page

    return open_it


def drawn(page: Any) -> list[str]:
    """Names of the charts, each of which must have been drawn."""
    names: list[str] = page.eval_on_selector_all(".plot", "plots => plots.map(plot => plot.id)")
    for name in names:
        assert page.locator(f"#{name} .main-svg .trace, #{name} .main-svg .point").count() > 0, name
    return [name.removeprefix("plot-") for name in names]


def data(page: Any, name: str) -> Any:
    return page.evaluate(f"document.getElementById('plot-{name}').data")


def test_a_run_is_a_point_and_a_histogram(opened, said):
    page = opened("--seeds", "2")
    assert drawn(page) == ["throughput", "lags"]
    result = said("simulate", "--json", "--seeds", "2", *SHORT).json["result"]
    (points,) = data(page, "throughput")
    assert len(points["x"]) == 2
    assert sum(points["y"]) / 2 == pytest.approx(result["effectiveThroughput"])
    (bars,) = data(page, "lags")
    assert sum(bars["y"]) == pytest.approx(1)
    assert page.locator("tr").count() == 1 + len(result)


def test_a_sweep_is_a_curve_for_each_rule(opened):
    page = opened("--sweep", "policy=deadline-first,fifo", "--sweep", "staleness-threshold=1,2,4")
    assert drawn(page) == ["throughput", "effective", "greatest-lag", "idle"]
    curves = data(page, "greatest-lag")
    assert [curve["name"] for curve in curves] == ["deadline-first", "fifo"]
    assert curves[1]["x"] == [1, 2, 4]
    assert curves[1]["y"] == [1, 2, 4]
    assert page.locator("#plot-throughput .shapelayer path").count() == 1


def test_a_sweep_without_numbers_is_bars(opened):
    page = opened("--sweep", "missed-deadline=Wait,MaskTokens")
    assert drawn(page) == ["throughput", "effective", "greatest-lag", "idle"]
    assert [bar["x"] for bar in data(page, "effective")] == [["Wait"], ["MaskTokens"]]
    assert page.locator("h1").inner_text() == "Sweep of missed-deadline"


def test_a_dark_screen_gets_a_dark_page(opened):
    colours = [
        opened(scheme=scheme).evaluate("getComputedStyle(document.body).backgroundColor")
        for scheme in ("light", "dark")
    ]
    assert colours[0] != colours[1]


def test_a_page_that_cannot_be_written_leaves_nothing(said, tmp_path):
    (tmp_path / "taken").mkdir()
    refused = said("simulate", "--plot", tmp_path / "taken", *SHORT)
    assert refused.code == 2
    assert "taken: is a folder; name a file in it" in refused.err
    assert [entry.name for entry in tmp_path.iterdir()] == ["taken"]
