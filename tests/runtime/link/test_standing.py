"""Folding records into a report."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.contract import parse_progress
from qwen35_trainer.progress.records import (
    CheckpointRecord,
    EvaluationRecord,
    ExportRecord,
    FinishRecord,
    RunRecord,
    SpanRecord,
    UpdateRecord,
)
from qwen35_trainer.progress.totals import RunTotals
from qwen35_trainer.runtime.link.standing import AttemptEnd, Standing, checkpoint_report
from qwen35_trainer.runtime.measurements import TrainingClock

anything = st.floats()
times = st.floats(0, 1e7)
shares = st.none() | anything


def update(number: int, **changes: object) -> UpdateRecord:
    fields: dict[str, object] = {
        "update": number, "updates_total": 40, "version": number - 1, "time": 10.0 * number, "seconds": 10.0,
        "prompts": 4, "samples": 16, "tokens": 400, "loss": 0.0, "gradient_norm": 1.0, "learning_rate": 1e-3,
    }  # fmt: skip
    return UpdateRecord(**(fields | changes))  # type: ignore[arg-type]


def totals(*records: RunRecord) -> RunTotals:
    added = RunTotals()
    for record in records:
        added.add(record)
    return added


def publication(version: int, end: float) -> SpanRecord:
    return SpanRecord(lane="publish", kind="publish", start=end - 1, end=end, version=version)


records = st.lists(
    st.one_of(
        st.builds(
            update,
            st.integers(1, 50),
            version=st.integers(0, 50),
            time=times,
            seconds=st.sampled_from([0.0, 1.0, 1e-9]) | times,
            reward_mean=shares,
            lag_mean=st.none() | st.floats(0),
            lag_max=st.none() | st.integers(0, 9),
            rollout_idle=shares,
            train_idle=shares,
            tokens_per_second=st.none() | st.floats(0),
        ),
        st.builds(publication, st.integers(1, 50), times),
        st.builds(SpanRecord, lane=st.just("rollout-0"), kind=st.just("generate"), start=times, end=times),
        st.builds(CheckpointRecord, update=st.integers(0, 50), version=st.just(0), time=times, path=st.just("/c"), seconds=times),
        st.builds(EvaluationRecord, update=st.just(0), version=st.just(0), time=times, samples=st.just(1)),
        st.builds(FinishRecord, outcome=st.just("Failed"), message=st.text(), time=times),
    ),
    max_size=40,
)  # fmt: skip


@given(history=records)
def test_counters_never_go_back_and_every_report_can_be_read(history):
    standing = Standing(1, TrainingClock(1e9), hosts={"rollout-0": ("pod-0",)})
    before = standing.progress(0.0)
    for record in history:
        standing = standing.after(record)
        report = standing.progress(1e9)
        assert parse_progress(report.text()) == report
        for counter in ("update", "version", "prompts", "samples", "tokens"):
            assert getattr(report, counter) >= getattr(before, counter), counter
        before = report


@given(history=records)
def test_an_attempt_runs_until_its_end_is_reported(history):
    standing = Standing(1)
    for record in history:
        standing = standing.after(record)
    assert standing.progress(0.0).state == "Running"


def test_the_pace_is_the_median_between_the_latest_twenty_versions():
    standing = Standing(1, TrainingClock(1000.0))
    ends = [10.0, 20.0, 1020.0, *(1020.0 + 4.0 * n for n in range(1, 20))]
    paces = []
    for version, end in enumerate(ends, start=1):
        standing = standing.after(publication(version, end))
        paces.append(standing.progress(0.0).versionSeconds)
    assert paces[:3] == [None, None, (10.0 + 1000.0) / 2]
    assert paces[-1] == 4.0
    report = standing.progress(0.0)
    assert (report.version, report.versionTime) == (22, 1000.0 + ends[-1])
    assert len(standing.published) == 20


def test_times_are_of_the_wall_clock_although_records_count_over_all_attempts():
    standing = Standing(2, TrainingClock(started=5000.0, earlier=300.0)).after(
        CheckpointRecord(update=20, version=20, time=310.0, path="/run/update-000020", seconds=1.0)
    )
    report = standing.progress(0.0).checkpoint
    assert report is not None
    assert (report.uri, report.update, report.time) == ("file:///run/update-000020", 20, 5010.0)


def test_a_model_is_reported_where_it_was_written_and_not_when_that_failed():
    written = ExportRecord(update=20, version=20, time=10.0, path="/run/exports/update-000020", seconds=1.0)
    failed = replace(written, update=40, path="/run/exports/update-000040", problem="no space")
    report = Standing(1, TrainingClock(5000.0)).after(written).after(failed).progress(0.0).export
    assert report is not None
    assert (report.uri, report.update, report.time) == ("file:///run/exports/update-000020", 20, 5010.0)


def test_totals_continue_from_what_the_checkpoint_contains():
    standing = Standing(2).resumed(
        TrainingClock(100.0, 50.0),
        totals(update(1), update(2)),
        checkpoint_report(Path("/run/update-000002"), 2, time=90.0),
    )
    report = standing.after(update(3)).progress(0.0)
    assert (report.update, report.prompts, report.samples, report.tokens) == (3, 12, 48, 1200)
    assert standing.progress(0.0).version == 1


def test_the_latest_update_speaks_for_itself():
    report = (
        Standing(1)
        .after(update(1, reward_mean=0.1, lag_mean=9.0, lag_max=9))
        .after(
            update(
                2, reward_mean=0.5, lag_mean=0.75, lag_max=2, rollout_idle=0.1, train_idle=0.2, tokens_per_second=7.0
            )
        )
        .progress(0.0)
    )
    assert (report.reward, report.lagMean, report.lagMax) == (0.5, 0.75, 2)
    assert (report.rolloutIdle, report.trainIdle, report.tokensPerSecond) == (0.1, 0.2, 7.0)
    assert (report.phase, report.updates) == ("training", 40)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_a_number_is_left_out(value):
    assert Standing(1).after(update(1, reward_mean=value)).progress(0.0).reward is None


def test_idle_is_each_replicas_own_between_two_updates():
    standing = Standing(1, hosts={"rollout-0": ("pod-a",), "rollout-1": ("pod-b",)})
    for start, end in ((0.0, 4.0), (6.0, 10.0)):
        standing = standing.after(SpanRecord(lane="rollout-0", kind="generate", start=start, end=end))
    standing = standing.after(update(1, seconds=10.0)).after(update(2, seconds=0.0))  # one batch of two updates
    first, second = standing.progress(0.0).replicas
    assert (first.pods, first.idle) == (("pod-a",), pytest.approx(0.2))
    assert (second.pods, second.idle) == (("pod-b",), 1.0)


def test_a_replica_of_several_nodes_is_reported_with_all_its_pods():
    standing = Standing(1, hosts={"rollout-0": ("pod-a", "pod-b"), "rollout-1": ("pod-c", "pod-d")})
    assert [replica.pods for replica in standing.progress(0.0).replicas] == [("pod-a", "pod-b"), ("pod-c", "pod-d")]


def test_a_replica_that_leaves_is_reported_as_drained_once_it_is():
    standing = Standing(1, hosts={"rollout-0": ("pod-a",), "rollout-1": ("pod-b",)}, drained=frozenset({"rollout-1"}))
    assert [replica.drained for replica in standing.progress(0.0).replicas] == [False, True]


def test_an_end_is_reported_within_the_contracts_lengths():
    report = Standing(1, end=AttemptEnd("Failed", "E" * 999, "m" * 9999)).progress(0.0)
    assert (report.state, len(report.reason or ""), len(report.message)) == ("Failed", 128, 4096)


def test_a_reward_whose_calls_all_fail_is_a_warning_from_the_fifth_batch_until_it_works():
    def batch(number: int, failed: int) -> UpdateRecord:
        return update(
            number,
            calls_by_reward={"judge": 16, "Math": 16},
            errors_by_reward={"judge": failed - 1, "Math": 3},
            timeouts_by_reward={"judge": 1},
            first_reward_error=f"reward judge, prompt s/{number}: no route to host",
        )

    standing = Standing(1)
    for number in range(1, 5):
        standing = standing.after(batch(number, 16)).after(update(number, seconds=0.0))
    assert standing.progress(0.0).warning == "", "four batches, each with a second update without calls"
    warning = standing.after(batch(5, 16)).progress(0.0).warning
    assert "reward judge failed" in warning
    assert "reward judge, prompt s/5: no route to host" in warning
    assert standing.after(batch(5, 15)).after(batch(6, 16)).progress(0.0).warning == ""
    long = replace(standing, failing={"n" * 2000: 9}).progress(0.0)
    assert len(long.warning) == 1024


def test_the_pace_is_the_mean_of_the_latest_updates_and_needs_three():
    standing = Standing(1).after(update(1, seconds=9.0)).after(update(2, seconds=1.0))
    assert standing.progress(0.0).secondsPerUpdate is None
    assert standing.after(update(3, seconds=2.0)).progress(0.0).secondsPerUpdate == 4.0
    for number in range(3, 23):
        standing = standing.after(update(number, seconds=0.5))
    assert standing.progress(0.0).secondsPerUpdate == 0.5


def test_the_accuracy_is_that_of_the_latest_evaluation():
    seen = [EvaluationRecord(update=at, version=at, time=1.0, samples=4, accuracy=at / 10) for at in (0, 5)]
    assert Standing(1).progress(0.0).accuracy is None
    assert Standing(1).after(seen[0]).after(seen[1]).after(update(6)).progress(0.0).accuracy == 0.5
    loss = EvaluationRecord(update=6, version=6, time=1.0, samples=4, loss=2.0)
    assert Standing(1).after(loss).progress(0.0).accuracy is None, "SFT has none"


def test_an_accuracy_of_graded_rewards_that_says_nothing_is_not_reported():
    graded = [
        EvaluationRecord(update=at, version=at, time=1.0, samples=4, accuracy=accuracy, reward_mean=0.5)
        for at, accuracy in enumerate((0.0, 0.25))
    ]
    assert Standing(1).after(graded[0]).progress(0.0).accuracy is None
    assert Standing(1).after(graded[0]).after(graded[1]).progress(0.0).accuracy == 0.25


@pytest.mark.parametrize(
    ("accuracy", "reward", "reported"),
    [(0.5, 0.5, (0.5, None)), (0.0, 0.4, (None, 0.4)), (0.5, 0.7, (0.5, 0.7)), (None, None, (None, None))],
    ids=["right or wrong", "graded, none right", "graded", "a loss"],
)
def test_the_held_out_reward_is_reported_where_accuracy_does_not_show_it(accuracy, reward, reported):
    seen = EvaluationRecord(update=2, version=2, time=1.0, samples=4, accuracy=accuracy, reward_mean=reward)
    report = Standing(1).after(seen).progress(0.0)
    assert (report.accuracy, report.heldOutReward) == reported
    again = Standing(2).resumed(TrainingClock(0.0), totals(update(2), seen), None).progress(0.0)
    assert (again.accuracy, again.heldOutReward) == reported
