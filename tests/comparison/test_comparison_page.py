"""The page of `qwen35 compare`, in a browser without a network."""

from pathlib import Path
from typing import Any

from qwen35_trainer.comparison.compare_command import print_comparison
from qwen35_trainer.progress.records import RunRecord
from tests.browser import drawn, opened
from tests.progress.conftest import make_update

from .conftest import MakeRun


def test_the_page_has_every_chart_and_table(
    tmp_path: Path, browser: Any, make_run: MakeRun, run: list[RunRecord], recorded: list[Path]
) -> None:
    evil = "<b>evil"
    folders = [make_run("a", run), make_run(evil, [*run[:6], make_update(3)], {"train.nodes": 2}), *recorded]
    output = tmp_path / "page.html"
    print_comparison(folders, output, as_json=False)
    page = opened(browser, output)
    assert drawn(page) == [
        "reward-update", "reward-time", "held-out-accuracy-update", "held-out-accuracy-time", "held-out-reward-update",
        "held-out-reward-time", "time-of-an-update", "staleness", "seconds-of-an-update-update",
        "generated-tokens-per-second-update", "mean-lag-in-versions-update", "mean-response-in-tokens-update",
        "seconds-of-a-publication-update",
    ]  # fmt: skip
    assert page.evaluate("document.documentElement.scrollWidth") == 1280
    assert page.locator("header li").all_inner_texts() == ["a", evil, "finished", "running"]
    colours = page.eval_on_selector_all(
        "header li", "all => all.map(one => getComputedStyle(one, '::before').backgroundColor)"
    )
    assert len(set(colours)) == 4
    lines = ["|".join(row.locator("th, td").all_inner_texts()) for row in page.locator("table tr").all()]
    assert "train.nodes|1|2|2|2" in lines
    assert "replicas lost|–|–|–|–" not in lines
    assert any(line.startswith("Time of an update|") for line in lines)
