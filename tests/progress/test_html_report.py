import math
from pathlib import Path
from typing import Any

import pytest

from qwen35_trainer import __version__
from qwen35_trainer.formatting import duration, number, percent
from qwen35_trainer.progress.charts import charts
from qwen35_trainer.progress.html_report import render_report, write_report
from qwen35_trainer.progress.records import EvaluationRecord, FinishRecord, RunRecord
from qwen35_trainer.progress.run_fold import RunFold
from qwen35_trainer.progress.sample_file import Moment, Sample, SampleFile
from qwen35_trainer.progress.summary import Summary, summarise
from tests.browser import drawn, opened

from .conftest import make_update

MANIFEST = """\
metadata: {name: arithmetic}
spec: {mode: FullyAsync, model: {name: tiny}, algorithm: {advantage: GRPO}, train: {engine: FSDP}, seed: 7}
# </pre><script>throw 1</script>
"""


def summary_of(records: list[RunRecord], bound: int | None = 4) -> Summary:
    return summarise(records, max_version_lag=bound, peak_rss_mib=100.0)


def test_the_report_replaces_the_old_one_and_leaves_no_other_file(tmp_path: Path, run: list[RunRecord]) -> None:
    (tmp_path / "report.html").write_text("old")
    path = write_report(tmp_path, RunFold.of(run), MANIFEST, summary_of(run))
    assert path == tmp_path / "report.html"
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]


def test_a_report_that_fails_leaves_the_old_one(tmp_path: Path, run: list[RunRecord]) -> None:
    (tmp_path / "report.html").write_text("old")
    with pytest.raises(KeyError):
        write_report(tmp_path, RunFold.of(run), MANIFEST, {})  # type: ignore[typeddict-item]
    assert (tmp_path / "report.html").read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]


def test_the_report_draws_every_chart_and_shows_responses_with_no_network(
    tmp_path: Path, browser: Any, run: list[RunRecord]
) -> None:
    evil = "</dd><script>throw 1</script>" + "x" * 500
    sample = Sample(prompt_id="s/0", prompt=evil, response=((4, "old"), (0, evil)), tokens=2, reward=1.0)
    SampleFile(tmp_path / "samples.jsonl").add(Moment(kind="trained", update=3, version=4, samples=(sample,)))
    page = opened(browser, write_report(tmp_path, RunFold.of(run), MANIFEST, summary_of(run)))
    assert drawn(page) == [
        "reward", "staleness", "response-length", "idle-share", "train-time", "generation", "loss", "entropy", "gradient-norm",
        "rewards", "sources", "truncated", "without-signal", "reward-errors", "kl", "clipped", "learning-rate", "timeline",
    ]  # fmt: skip
    assert page.evaluate("document.documentElement.scrollWidth") == 1280
    assert page.locator("#plot-staleness .shapelayer path").count() == 1
    assert page.locator("#plot-timeline .point").count() == 3
    assert page.locator("article .text").all_inner_texts() == [evil, f"old{evil}"]
    colours = page.eval_on_selector_all(".text span", "all => all.map(one => getComputedStyle(one).backgroundColor)")
    assert len(set(colours)) == 2


def test_the_numbers_on_the_page_are_those_of_the_summary(tmp_path: Path, browser: Any, run: list[RunRecord]) -> None:
    summary = summary_of(run)
    page = opened(browser, write_report(tmp_path, RunFold.of(run), MANIFEST, summary))
    shown = {tile.get_attribute("id"): tile.inner_text() for tile in page.locator("dd").all()}
    assert shown == {
        "accuracy": "12% → 75%",
        "reward": "0.100 → 0.500",
        "updates": "3 of 3",
        "lag": "2 versions, bound 4",
        "idle": f"{percent(summary['rolloutIdle'])} · {percent(summary['trainIdle'])}",
        "tokensPerSecond": f"{number(summary['tokensPerSecond'])} tokens/s",
        "seconds": duration(summary["seconds"]),
    }
    assert page.locator("h1").inner_text() == "arithmetic"
    assert page.locator(".facts").inner_text() == "tiny · FullyAsync · GRPO · FSDP"
    assert page.locator(".origin").inner_text() == f"started 2026-01-31 09:30 UTC · qwen35 {__version__} · seed 7"
    assert [line for line in page.locator(".warning").inner_text().splitlines() if line] == [
        "Rewards failed",
        "4 calls failed: brevity 1 time-out; digit 3 errors",
        "The first one: reward digit, prompt easy/0: ValueError: <b>ill</b>",
    ]
    assert page.locator("table tr").count() == len(summary)
    assert page.locator("pre").text_content() == MANIFEST


def test_a_failed_run_shows_its_last_line_before_the_traceback() -> None:
    traceback = "Traceback (most recent call last):\n  …\nModuleNotFoundError: No module named '<x>'\n"
    message = f"1 problem in the rewards\n  reward judge: importing failed\n    {traceback}"
    pages = [
        render_report("x", RunFold.of(records), MANIFEST, summary_of(records))
        for records in (
            [FinishRecord(outcome="Failed", message=message, time=1.0)],
            [FinishRecord(outcome="Failed", message="the judge is <b>ill</b>", time=1.0, traceback=traceback)],
            [FinishRecord(outcome="Failed", message="the judge is ill", time=1.0)],
        )
    ]
    assert '<p class="message Failed">ModuleNotFoundError: No module named &#x27;&lt;x&gt;&#x27;</p>' in pages[0]
    assert "<pre>1 problem in the rewards\n  reward judge: importing failed\n    Traceback" in pages[0]
    assert '<p class="message Failed">the judge is &lt;b&gt;ill&lt;/b&gt;</p><pre>Traceback (most' in pages[1]
    assert '<p class="message Failed">the judge is ill</p></header>' in pages[2]


def test_failed_rewards_of_an_older_trainer_are_reported_by_their_number() -> None:
    old = make_update(1, reward_errors=1, errors_by_reward={}, timeouts_by_reward={}, first_reward_error="")
    assert "<p>1 call failed</p></section>" in render_report("x", RunFold.of([old]), MANIFEST, summary_of([old]))
    well = make_update(1, reward_errors=0, errors_by_reward={}, first_reward_error="")
    assert "Rewards failed" not in render_report("x", RunFold.of([well]), MANIFEST, summary_of([well]))


def test_responses_that_cannot_be_read_do_not_prevent_the_report(tmp_path: Path, run: list[RunRecord]) -> None:
    (tmp_path / "samples.jsonl").write_text("?\n")
    text = write_report(tmp_path, RunFold.of(run), MANIFEST, summary_of(run)).read_text()
    assert "Sampled responses cannot be shown: " in text
    assert "samples.jsonl, line 1: not JSON" in text


def test_scores_that_are_not_finite_have_an_empty_chart() -> None:
    endless = make_update(1, score_by_reward={"a": math.inf, "b": math.nan})
    assert "rewards" in {chart.name for chart in charts([endless], [], {}, None)}


def test_charts_of_what_the_run_does_not_have_are_left_out() -> None:
    update = make_update(
        1, score_by_reward={"a": 1.0}, reward_by_source={"s": 1.0}, reward_errors=0, kl=None, behaviour_kl=None,
        clip_fraction=None,
    )  # fmt: skip
    names = {chart.name for chart in charts([update], [], {}, None)}
    assert not names & {"rewards", "sources", "reward-errors", "kl", "clipped"}
    assert {"reward", "truncated", "without-signal", "learning-rate"} <= names


def test_of_many_sources_as_many_are_drawn_as_there_are_colours() -> None:
    many = [make_update(n, reward_by_source={f"s{i}": 0.1 * i for i in range(12)}) for n in (1, 2)]
    [drawn_sources] = [chart for chart in charts(many, [], {}, None) if chart.name == "sources"]
    assert len(drawn_sources.key) == len(drawn_sources.figure["data"]) == 8
    assert drawn_sources.note.endswith("the first 8 of 12")


def test_graded_rewards_have_a_held_out_reward_and_no_accuracy() -> None:
    held_out = {"version": 0, "time": 1.0, "samples": 4, "accuracy": 0.0}
    evaluations = [EvaluationRecord(update=at, reward_mean=0.25 + at / 4, **held_out) for at in (0, 1)]
    [reward] = [chart for chart in charts([make_update(1)], evaluations, {}, None) if chart.name == "reward"]
    assert [(line["name"], line["y"]) for line in reward.figure["data"]] == [
        ("reward", [0.2]),
        ("held out", [0.25, 0.5]),
    ]


def test_groups_that_left_untrained_have_a_place_of_their_own() -> None:
    records: list[RunRecord] = [make_update(1, groups_left={"filtered": 12, "failed": 3}), make_update(2)]
    assert '<dd id="left">15 <small>3 failed, 12 filtered</small></dd>' in render_report(
        "x", RunFold.of(records), MANIFEST, summary_of(records)
    )


def test_a_dark_screen_gets_a_dark_report(tmp_path: Path, browser: Any, run: list[RunRecord]) -> None:
    path = write_report(tmp_path, RunFold.of(run), MANIFEST, summary_of(run))
    colours = [
        opened(browser, path, scheme).evaluate(
            "[getComputedStyle(document.body).backgroundColor, document.getElementById('plot-loss').data[0].line.color]"
        )
        for scheme in ("light", "dark")
    ]
    assert colours[0][0] != colours[1][0]
    assert colours[0][1] != colours[1][1]


def test_sft_has_charts_of_training_only(tmp_path: Path, browser: Any, supervised_run: list[RunRecord]) -> None:
    page = opened(
        browser, write_report(tmp_path, RunFold.of(supervised_run), MANIFEST, summary_of(supervised_run, None))
    )
    assert drawn(page) == ["loss", "idle-share", "gradient-norm", "learning-rate"]
    assert page.locator("#lag").count() == 0
    assert page.locator("#loss").inner_text() == "1.50"


def test_a_run_of_one_update_is_drawn(tmp_path: Path, browser: Any) -> None:
    records: list[RunRecord] = [make_update(1)]
    page = opened(browser, write_report(tmp_path, RunFold.of(records), MANIFEST, summary_of(records)))
    assert "reward" in drawn(page)
    assert page.locator(".outcome").inner_text() == "Not finished"


def test_a_stopped_run_has_its_reason(tmp_path: Path, browser: Any, run: list[RunRecord]) -> None:
    records = [*run[:4], FinishRecord(outcome="Stopped", message="<b>interrupted</b> & saved", time=13.0)]
    page = opened(browser, write_report(tmp_path, RunFold.of(records), MANIFEST, summary_of(records)))
    assert page.locator(".outcome").inner_text() == "Stopped"
    assert page.locator(".message").inner_text() == "<b>interrupted</b> & saved"


def test_an_empty_run_has_a_report(tmp_path: Path, browser: Any) -> None:
    page = opened(browser, write_report(tmp_path, RunFold.of([]), "", summary_of([])))
    assert drawn(page) == []
    assert page.locator(".empty").inner_text() == "No update was recorded."
    assert page.locator("h1").inner_text() == tmp_path.name


def test_rewards_that_are_not_shares_get_a_separate_axis() -> None:
    held_out = EvaluationRecord(update=1, version=1, time=1.0, samples=4, accuracy=0.5, reward_mean=-1.0)
    by_name = {chart.name: chart for chart in charts([make_update(1, reward_mean=-3.0)], [held_out], {0: 1}, None)}
    assert list(by_name)[:3] == ["reward", "staleness", "accuracy"]
    assert by_name["reward"].figure["layout"]["yaxis"]["range"] == pytest.approx([-3.16, -0.84])
    assert by_name["accuracy"].figure["layout"]["yaxis"]["range"] == [0.0, 1.02]


def test_a_diverged_value_is_a_gap() -> None:
    nan = float("nan")
    records = [make_update(1), make_update(2, loss=nan, gradient_norm=nan), make_update(3, loss=nan)]
    [loss] = [chart for chart in charts(records, [], {}, None) if chart.name == "loss"]
    assert loss.figure["data"][0]["y"] == [-0.01, None, None]


def test_a_report_of_a_long_run_says_how_many_updates_its_charts_show() -> None:
    records: list[RunRecord] = [make_update(number) for number in range(1, 2501)]
    page = render_report("x", RunFold.of(records), MANIFEST, summary_of(records))
    assert '<p class="note">The charts show 1,251 of the 2,500 updates.</p>' in page
    short = render_report("x", RunFold.of(records[:10]), MANIFEST, summary_of(records[:10]))
    assert "The charts show" not in short


def test_the_parts_of_the_trainers_time_are_one_bar() -> None:
    shares = {"training": 0.7, "copying": 0.25, "driver": 0.05}
    [bar] = [chart for chart in charts([make_update(1)], [], {}, None, shares) if chart.name == "train-time"]
    assert [(part["name"], part["x"]) for part in bar.figure["data"]] == [
        ("training", [0.7]),
        ("copying", [0.25]),
        ("driver", [0.05]),
    ]
    assert [name for _, name in bar.key] == ["training 70.0%", "copying 25.0%", "driver 5.0%"]
    assert bar.figure["data"][2]["text"] == [""], "it has no room for its number"
