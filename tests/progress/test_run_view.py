import io
from pathlib import Path

import pytest
from rich.console import Console
from rich.spinner import Spinner

from qwen35_trainer.progress.lines import LineView
from qwen35_trainer.progress.panel import panel
from qwen35_trainer.progress.records import EvaluationRecord, FinishRecord, RunRecord
from qwen35_trainer.progress.run_view import LiveView, View, make_view
from qwen35_trainer.progress.state import MeanHistory, RunState

from .conftest import make_update


def view_on(console: Console) -> View:
    return make_view(console, name="arithmetic", folder=Path("runs/arithmetic"), updates_total=3, max_version_lag=4)


def panel_lines(
    records: list[RunRecord], *, bound: int | None = 4, phase: str = "starting", name: str = "n"
) -> list[str]:
    state = RunState(name, Path("runs") / name, 3, bound, phase)
    for record in records:
        state.add(record)
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(panel(state, Spinner("dots"), 1.5, 80))
    return console.export_text().rstrip("\n").split("\n")


def test_a_terminal_gets_the_panel_and_anything_else_gets_lines() -> None:
    with view_on(Console(file=io.StringIO(), force_terminal=True, width=80)) as view:
        assert isinstance(view, LiveView)
    with view_on(Console(file=io.StringIO(), force_terminal=False)) as view:
        assert isinstance(view, LineView)


def test_the_panel_fits_a_small_terminal(run: list[RunRecord]) -> None:
    lines = panel_lines(run)
    assert {len(line) for line in lines} == {80}
    assert len(lines) <= 24


def test_the_panel_fits_with_the_longest_of_everything() -> None:
    named = {f"{'r' * 60}-{place}": 0.5 for place in range(99)}
    wide = make_update(
        999_999, updates_total=1_000_000, lag_max=15, lag_histogram={15: 1}, window_dispatched=99_999,
        window_limit=99_999, response_tokens_mean=31_000.0, response_tokens_max=32_000, tokens_per_second=9e6, seconds=1e4,
        score_by_reward=named, reward_by_source=named, reward_errors=10**9, first_reward_error="ill " * 100,
    )  # fmt: skip
    failed = FinishRecord(outcome="Failed", message="out of memory on train-0 " * 9, time=1e6)
    lines = panel_lines([wide, failed], bound=15, name="a-name-that-goes-on-" * 6)
    assert {len(line) for line in lines} == {80}
    assert len(lines) <= 24


def test_the_panel_shows_what_matters(run: list[RunRecord]) -> None:
    text = "\n".join(panel_lines(run[:-1]))
    for words in (
        "update 3 of 3", "version 2", "reward      0.600", "rewards     digit 0.600, brevity 0.500",
        "sources     easy 0.500, hard 0.250", "held out    accuracy 12% → 75%   reward 0.100 → 0.500   after update 3",
        "errors      1 of rewards in this update", "reward digit, prompt easy/0: ValueError: <b>ill</b>", "25.0 tokens", "maximum 64", "25% truncated",
        "mean 0.750", "maximum 1 of 4", "window 6 of 8", "rollout 30%", "train 60%", "waiting 10%, driver 2%", "400 tokens/s",
        "4.0 s per update", "update-2", "runs/n", "training",
    ):  # fmt: skip
        assert words in text, words


def test_before_the_first_update_the_panel_shows_the_phase() -> None:
    text = "\n".join(panel_lines([], phase="loading model"))
    assert "loading model" in text
    assert "update 0 of 3" in text


def test_a_run_without_rollout_has_no_lines_about_it(supervised_run: list[RunRecord]) -> None:
    text = "\n".join(panel_lines(supervised_run, bound=None))
    assert "loss" in text
    assert "reward" not in text
    assert "staleness" not in text


def test_the_end_replaces_the_phase(run: list[RunRecord]) -> None:
    assert "Succeeded: 3 updates" in "\n".join(panel_lines(run))


def test_a_live_view_leaves_the_last_state_on_the_screen(run: list[RunRecord]) -> None:
    file = io.StringIO()
    with view_on(Console(file=file, force_terminal=True, width=80, height=24)) as view:
        view.phase("loading model")
        for record in run:
            view.write(record)
    assert "Succeeded" in file.getvalue()


def test_lines_are_one_per_event_and_never_broken(run: list[RunRecord]) -> None:
    file = io.StringIO()
    with view_on(Console(file=file, width=80)) as view:
        view.phase("loading model")
        for record in run:
            view.write(record)
    lines = file.getvalue().splitlines()
    assert [line.partition("=")[0] for line in lines] == [
        "run", "phase", "evaluation", "reward_error", "update", "update", "checkpoint", "update", "evaluation", "outcome",
    ]  # fmt: skip
    assert lines[2] == "evaluation=0 accuracy=12.5% reward=0.100 samples=50"
    assert lines[3] == "reward_error=reward digit, prompt easy/0: ValueError: <b>ill</b>"
    assert lines[4] == (
        "update=1/3 version=0 reward=0.200 reward.digit=0.200 reward.brevity=0.500 source.easy=0.500 source.hard=0.250 "
        "errors=1 loss=-0.01 response=25.0 lag=0.75/1 idle=10%/20% tokens/s=1000 seconds=2.0 left=4"
    )


def test_a_long_exception_of_a_reward_is_cut() -> None:
    file = io.StringIO()
    with view_on(Console(file=file, width=80)) as view:
        view.write(make_update(1, reward_errors=1, first_reward_error="ValueError: " + "ill " * 100))
    [line] = [line for line in file.getvalue().splitlines() if line.startswith("reward_error=")]
    assert (len(line), line[-1]) == (len("reward_error=") + 300, "…")


def test_of_one_reward_and_one_source_only_the_mean_is_shown() -> None:
    alone = make_update(1, score_by_reward={"digit": 0.2}, reward_by_source={"easy": 0.2}, first_reward_error="")
    text = "\n".join(panel_lines([alone]))
    assert all(word not in text for word in ("digit", "easy", "errors"))


def test_an_accuracy_that_is_not_meaningful_is_not_shown() -> None:
    held_out = {"version": 0, "time": 1.0, "samples": 4, "accuracy": 0.0}
    graded: list[RunRecord] = [
        EvaluationRecord(update=0, reward_mean=0.25, **held_out), make_update(1),
        EvaluationRecord(update=1, reward_mean=0.5, **held_out),
    ]  # fmt: skip
    text = "\n".join(panel_lines(graded))
    assert "reward 0.250 → 0.500" in text
    assert "accuracy" not in text
    file = io.StringIO()
    with view_on(Console(file=file, width=80)) as view:
        view.write(graded[0])
    assert "evaluation=0 accuracy=- reward=0.250 samples=4" in file.getvalue()


def test_a_message_of_many_lines_is_one_line_of_the_log() -> None:
    file = io.StringIO()
    with view_on(Console(file=file, width=80)) as view:
        view.write(FinishRecord(outcome="Failed", message="1 problem\n  Traceback:\n  ValueError", time=1.0))
    assert file.getvalue().splitlines()[-1] == "outcome=Failed seconds=1 message=1 problem Traceback: ValueError"


def test_time_left_is_that_of_the_latest_updates() -> None:
    state = RunState("n", Path("n"), None, None)
    assert state.seconds_left() is None
    for number in range(1, 31):
        state.add(make_update(number, updates_total=40, seconds=100.0 if number <= 10 else 3.0))
    assert state.seconds_left() == pytest.approx(30.0)


def test_the_idle_row_names_the_two_largest_parts_of_the_time_without_training() -> None:
    parts = {"seconds_waiting": 0.01, "seconds_copying": 0.5, "seconds_driver": 0.2, "seconds_assembling": 0.1}
    text = "\n".join(panel_lines([make_update(1, seconds=2.0, seconds_training=1.19, **parts)]))
    assert "train 20%      copying 25%, driver 10% " in text, "more do not fit"
    assert "assembling" not in text
    little = make_update(1, seconds_waiting=0.001, seconds_driver=0.0)
    assert "waiting" not in "\n".join(panel_lines([little])), "less than 1 %"
    text = "\n".join(panel_lines([make_update(2, seconds=0.0)]))
    assert "waiting" not in text, "a later update of a batch has no time of its own"


@pytest.mark.parametrize("number", [0, 1, 511, 512, 513, 5000])
def test_the_course_of_the_reward_is_kept_in_bounded_memory(number: int) -> None:
    history = MeanHistory()
    for value in range(number):
        history.add(float(value))
    means = history.means
    assert len(means) <= 513
    assert means == sorted(means)
    if number:
        assert means[0] <= number / 256
        assert means[-1] >= number - 1 - number / 256
