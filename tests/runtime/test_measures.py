import numpy as np
import pytest

from qwen35_trainer.engines.base import UpdateMetrics
from qwen35_trainer.progress.records import UpdateRecord
from qwen35_trainer.rewards.scorer import Scored
from qwen35_trainer.rollout.base import Completed, Tokens
from qwen35_trainer.runtime.assembly import ScoredGroup, assemble
from qwen35_trainer.runtime.measures import (
    Pipeline,
    UpdateTimes,
    evaluation_record,
    supervised_evaluation_record,
    update_record,
)


def sequence(length: int, *, version: int = 0, truncated: bool = False) -> Completed:
    tokens = Tokens(np.zeros(length, np.int32), np.zeros(length, np.float32), np.full(length, version, np.int32))
    return Completed((0, 0), tokens, truncated)


GROUPS = [
    ScoredGroup(0, (1,), (sequence(2), sequence(4, truncated=True)), (1.0, 0.0), errors=1),
    ScoredGroup(1, (1,), (sequence(1, version=1), sequence(1, version=1)), (0.5, 0.5)),
]


PIPELINE = Pipeline(
    counted=3, limit=8, idle=0.25, tokens_per_second=100.0, left={"filtered": 3, "failed": 2}, lost_rewards=8
)


def records(updates: int) -> list[UpdateRecord]:
    batch, age = assemble(GROUPS, version=1, max_lag=1, mask_old=False, updates=updates)
    times = UpdateTimes()
    times.trained(0.5, 2.0)
    times.published(0.25)
    return [
        update_record(
            UpdateMetrics(0.1, 2.0, 1e-3, 4, {"clip_fraction_low": 0.125, "clip_fraction_high": 0.25, "entropy": 1.5}),
            step=step,
            update=step + 1,
            updates_total=9,
            version=1,
            time=3.0,
            seconds=2.75,
            batch=batch,
            age=age,
            groups=GROUPS,
            times=times,
            pipeline=PIPELINE,
            trainer_idle=0.5,
        )
        for step in range(updates)
    ]


def test_an_update_reports_its_samples_and_lags():
    (record,) = records(1)
    assert (record.prompts, record.samples) == (2, 4)
    assert (record.reward_mean, record.response_tokens_mean, record.response_tokens_max) == (0.5, 2.0, 4)
    assert record.truncated_share == 0.25
    assert record.lag_histogram == {0: 2, 1: 6}
    assert (record.lag_mean, record.lag_max) == (0.75, 1)
    assert (record.window_dispatched, record.window_limit) == (3, 8)
    assert (record.rollout_idle, record.tokens_per_second) == (0.25, 100.0)


def test_groups_that_left_untrained_are_told_with_the_errors_of_those_without_any_reward():
    (record,) = records(1)
    assert record.groups_left == {"filtered": 3, "failed": 2}
    assert record.reward_errors == 1 + 8


def test_a_group_of_equal_rewards_is_counted_as_without_signal():
    assert [record.groups_without_signal for record in records(2)] == [0, 1]


def test_clipping_counts_both_sides_and_what_was_not_measured_is_none():
    (record,) = records(1)
    assert record.clip_fraction == 0.375
    assert record.entropy == 1.5
    assert record.kl is None


def test_sums_over_the_updates_of_a_batch_count_its_time_and_tokens_once():
    once, twice = records(1), records(2)
    for name in (
        "seconds",
        "seconds_waiting",
        "seconds_training",
        "seconds_publishing",
        "prompts",
        "samples",
        "reward_errors",
    ):
        assert sum(getattr(record, name) for record in twice) == getattr(once[0], name), name
    assert [record.lag_histogram for record in twice] == [once[0].lag_histogram, {}]
    assert [record.groups_left for record in twice] == [once[0].groups_left, {}]


def test_a_response_is_right_when_every_reward_gives_full_marks():
    completed = [sequence(2), sequence(2), sequence(4)]
    scores = [
        Scored(1.0, {"a": 1.0, "b": 1.0}, {}),
        Scored(0.8, {"a": 1.0, "b": 0.0}, {}),
        Scored(None, {}, {"a": "ill"}),
    ]
    record = evaluation_record([(completed, scores)], update=5, version=2, time=1.0)
    assert record.accuracy == pytest.approx(1 / 3)
    assert record.reward_mean == pytest.approx(0.6)
    assert (record.samples, record.response_tokens_mean) == (3, pytest.approx(8 / 3))


def test_a_supervised_evaluation_has_a_loss_and_no_accuracy():
    record = supervised_evaluation_record(0.5, update=1, samples=8, time=2.0)
    assert (record.loss, record.samples, record.accuracy, record.reward_mean) == (0.5, 8, None, None)
