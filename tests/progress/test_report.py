from pathlib import Path
from typing import Any

import pytest

from qwen35_trainer.progress.formatting import duration, number, percent
from qwen35_trainer.progress.records import FinishRecord, Record, UpdateRecord
from qwen35_trainer.progress.report import write_report
from qwen35_trainer.progress.summary import Summary, summarise
from tests.browser import drawn, opened

from .conftest import make_update

MANIFEST = """\
metadata: {name: arithmetic}
spec: {mode: FullyAsync, model: {name: tiny}, algorithm: {advantage: GRPO}, train: {engine: FSDP}}
# </pre><script>throw 1</script>
"""


def summary_of(records: list[Record], bound: int | None = 4) -> Summary:
    return summarise(records, max_version_lag=bound, peak_rss_mib=100.0)


def test_the_report_replaces_the_old_one_and_leaves_nothing_aside(tmp_path: Path, run: list[Record]) -> None:
    (tmp_path / "report.html").write_text("old")
    path = write_report(tmp_path, run, MANIFEST, summary_of(run))
    assert path == tmp_path / "report.html"
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]


def test_a_report_that_fails_leaves_the_old_one(tmp_path: Path, run: list[Record]) -> None:
    (tmp_path / "report.html").write_text("old")
    with pytest.raises(KeyError):
        write_report(tmp_path, run, MANIFEST, {})  # type: ignore[typeddict-item]
    assert (tmp_path / "report.html").read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]


def test_the_report_draws_every_chart_with_no_network(tmp_path: Path, browser: Any, run: list[Record]) -> None:
    page = opened(browser, write_report(tmp_path, run, MANIFEST, summary_of(run)))
    assert drawn(page) == [
        "reward", "staleness", "response-length", "idle-share", "generation", "loss", "entropy", "gradient-norm",
        "timeline",
    ]  # fmt: skip
    assert page.evaluate("document.documentElement.scrollWidth") == 1280
    assert page.locator("#plot-staleness .shapelayer path").count() == 1
    assert page.locator("#plot-timeline .point").count() == 3


def test_the_numbers_on_the_page_are_those_of_the_summary(tmp_path: Path, browser: Any, run: list[Record]) -> None:
    summary = summary_of(run)
    page = opened(browser, write_report(tmp_path, run, MANIFEST, summary))
    shown = {tile.get_attribute("id"): tile.inner_text() for tile in page.locator("dd").all()}
    assert shown == {
        "accuracy": f"{percent(summary['accuracyBefore'])} → {percent(summary['accuracyAfter'])}",
        "updates": "3 of 3",
        "lag": "2 versions, bound 4",
        "idle": f"{percent(summary['rolloutIdle'])} · {percent(summary['trainerIdle'])}",
        "tokensPerSecond": f"{number(summary['tokensPerSecond'])} tokens/s",
        "seconds": duration(summary["seconds"]),
    }
    assert page.locator("h1").inner_text() == "arithmetic"
    assert page.locator(".facts").inner_text() == "tiny · FullyAsync · GRPO · FSDP"
    assert page.locator("table tr").count() == len(summary)
    assert page.locator("pre").text_content() == MANIFEST


def test_groups_that_left_untrained_have_a_place_of_their_own(tmp_path: Path, browser: Any) -> None:
    left: list[Record] = [make_update(1, groups_left={"filtered": 12, "failed": 3}), make_update(2)]
    page = opened(browser, write_report(tmp_path, left, MANIFEST, summary_of(left)))
    assert page.locator("#left").inner_text() == "15 3 failed, 12 filtered"


def test_a_dark_screen_gets_a_dark_report(tmp_path: Path, browser: Any, run: list[Record]) -> None:
    path = write_report(tmp_path, run, MANIFEST, summary_of(run))
    colours = [
        opened(browser, path, scheme).evaluate(
            "[getComputedStyle(document.body).backgroundColor, document.getElementById('plot-loss').data[0].line.color]"
        )
        for scheme in ("light", "dark")
    ]
    assert colours[0][0] != colours[1][0]
    assert colours[0][1] != colours[1][1]


def test_sft_has_charts_of_training_only(tmp_path: Path, browser: Any, supervised_run: list[Record]) -> None:
    page = opened(browser, write_report(tmp_path, supervised_run, MANIFEST, summary_of(supervised_run, None)))
    assert drawn(page) == ["loss", "idle-share", "gradient-norm"]
    assert page.locator("#lag").count() == 0
    assert page.locator("#loss").inner_text() == "1.50"


def test_a_run_of_one_update_is_drawn(tmp_path: Path, browser: Any) -> None:
    records: list[Record] = [make_update(1)]
    page = opened(browser, write_report(tmp_path, records, MANIFEST, summary_of(records)))
    assert "reward" in drawn(page)
    assert page.locator(".outcome").inner_text() == "Not finished"


def test_a_stopped_run_says_why(tmp_path: Path, browser: Any, run: list[Record]) -> None:
    records = [*run[:4], FinishRecord(outcome="Stopped", message="<b>interrupted</b> & saved", time=13.0)]
    page = opened(browser, write_report(tmp_path, records, MANIFEST, summary_of(records)))
    assert page.locator(".outcome").inner_text() == "Stopped"
    assert page.locator(".message").inner_text() == "<b>interrupted</b> & saved"


def test_an_empty_run_has_a_report(tmp_path: Path, browser: Any) -> None:
    page = opened(browser, write_report(tmp_path, [], "", summary_of([])))
    assert drawn(page) == []
    assert page.locator(".empty").inner_text() == "No update was recorded."
    assert page.locator("h1").inner_text() == tmp_path.name


def test_rewards_that_are_no_shares_get_an_axis_of_their_own(tmp_path: Path, browser: Any, run: list[Record]) -> None:
    records: list[Record] = [
        make_update(record.update, reward_mean=-3.0) if isinstance(record, UpdateRecord) else record for record in run
    ]
    page = opened(browser, write_report(tmp_path, records, MANIFEST, summary_of(records)))
    assert drawn(page)[:3] == ["reward", "staleness", "accuracy"]


def test_a_diverged_value_is_a_gap(tmp_path: Path, browser: Any) -> None:
    nan = float("nan")
    records: list[Record] = [make_update(1), make_update(2, loss=nan, gradient_norm=nan), make_update(3, loss=nan)]
    page = opened(browser, write_report(tmp_path, records, MANIFEST, summary_of(records)))
    assert page.evaluate("document.getElementById('plot-loss').data[0].y") == [-0.01, None, None]
