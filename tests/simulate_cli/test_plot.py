"""The page that `--plot` writes: drawn in a browser, with no network."""

from typing import Any

import pytest

from tests.browser import drawn, opened

SHORT = ("--workload", "batches=12", "--workload", "warm_up=4")


@pytest.fixture
def plotted(browser, run_command, tmp_path):
    """plotted("--sweep", …) is the page, opened."""

    def open_it(*arguments: str, scheme: str = "light") -> Any:
        path = tmp_path / "page.html"
        assert run_command("simulate", "--plot", path, *arguments, *SHORT).code == 0
        return opened(browser, path, scheme)

    return open_it


def data(page: Any, name: str) -> Any:
    return page.evaluate(f"document.getElementById('plot-{name}').data")


def test_a_run_is_a_point_and_a_histogram(plotted, run_command):
    page = plotted("--seeds", "2")
    assert drawn(page) == ["throughput", "lags"]
    result = run_command("simulate", "--json", "--seeds", "2", *SHORT).json["result"]
    (points,) = data(page, "throughput")
    assert len(points["x"]) == 2
    assert sum(points["y"]) / 2 == pytest.approx(result["effectiveThroughput"])
    (bars,) = data(page, "lags")
    assert sum(bars["y"]) == pytest.approx(1)
    assert page.locator("tr").count() == 1 + len(result)


def test_a_sweep_is_a_curve_for_each_rule(plotted):
    page = plotted("--sweep", "policy=deadline-first,fifo", "--sweep", "staleness-threshold=1,2,4")
    assert drawn(page) == ["throughput", "effective", "maximum-lag", "idle"]
    curves = data(page, "maximum-lag")
    assert [curve["name"] for curve in curves] == ["deadline-first", "fifo"]
    assert curves[1]["x"] == [1, 2, 4]
    assert curves[1]["y"] == [1, 2, 4]
    assert page.locator("#plot-throughput .shapelayer path").count() == 1


def test_a_sweep_without_numbers_is_bars(plotted):
    page = plotted("--sweep", "missed-deadline=Wait,MaskTokens")
    assert drawn(page) == ["throughput", "effective", "maximum-lag", "idle"]
    assert [bar["x"] for bar in data(page, "effective")] == [["Wait"], ["MaskTokens"]]
    assert page.locator("h1").inner_text() == "Sweep of missed-deadline"


def test_a_dark_screen_gets_a_dark_page(plotted):
    colours = [
        plotted(scheme=scheme).evaluate("getComputedStyle(document.body).backgroundColor")
        for scheme in ("light", "dark")
    ]
    assert colours[0] != colours[1]


def test_a_page_that_cannot_be_written_leaves_nothing(run_command, tmp_path):
    (tmp_path / "taken").mkdir()
    refused = run_command("simulate", "--plot", tmp_path / "taken", *SHORT)
    assert refused.code == 2
    assert "taken: is a folder; name a file in it" in refused.err
    assert [entry.name for entry in tmp_path.iterdir()] == ["taken"]
