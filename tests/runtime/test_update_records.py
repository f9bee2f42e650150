import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from qwen35_trainer.data.encode import EncodedPrompt
from qwen35_trainer.data.prompt import Prompt
from qwen35_trainer.engines.train_engine import UpdateMetrics
from qwen35_trainer.progress.records import TIME_PARTS, UpdateRecord
from qwen35_trainer.progress.sinks.scalars import scalars
from qwen35_trainer.rewards.combiner import Failures
from qwen35_trainer.rewards.reward import CombinedScore
from qwen35_trainer.rollout.rollout_engine import Completed, EndReason, GeneratedTokens
from qwen35_trainer.rollout.version_runs import VersionRuns
from qwen35_trainer.runtime.assembly import ScoredGroup, assemble
from qwen35_trainer.runtime.measurements import (
    PipelineMeasures,
    UpdateTimes,
    evaluation_record,
    supervised_evaluation_record,
    update_record,
)


def sequence(length: int, *, version: int = 0, truncated: bool = False) -> Completed:
    tokens = GeneratedTokens(
        np.zeros(length, np.int32), np.zeros(length, np.float32), VersionRuns.of([version] * length)
    )
    return Completed((0, 0), tokens, EndReason.LENGTH if truncated else EndReason.STOP)


def group(source: str, sequences: Sequence[Completed], *scores: CombinedScore) -> ScoredGroup:
    return ScoredGroup(
        0, EncodedPrompt(Prompt(f"{source}/0", source, "question"), np.ones(1, np.int32)), tuple(sequences), scores
    )


def scored(value: float | None, **parts: float) -> CombinedScore:
    return CombinedScore(value, parts, {})


GROUPS = [
    group("easy", (sequence(2), sequence(4, truncated=True)), scored(1.0, a=1.0, b=2.0), scored(0.0, a=0.0, b=0.0)),
    group(
        "hard", [sequence(1, version=1)] * 2, scored(0.5, a=0.5, b=0.0), CombinedScore(0.5, {"b": 0.0}, {"a": "ill"})
    ),
]
PIPELINE = PipelineMeasures(
    counted=3,
    limit=8,
    idle=0.25,
    tokens_per_second=100.0,
    untrained={"filtered": 3, "failed": 2},
    failures=Failures(Counter(a=7), Counter(a=1, b=2), "reward a, prompt easy/0: ill \ud800"),
    replicas_lost=2,
)


def records(updates: int, *, greedy_last: bool = False) -> list[UpdateRecord]:
    batch, age = assemble(GROUPS, version=1, max_lag=1, mask_old=False, updates=updates, greedy_last=greedy_last)
    times = UpdateTimes()
    times.copied(0.125)
    times.saved(0.0625)
    times.assembled(0.03125)
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
            wall_time=1003.0,
            seconds=2.75,
            batch=batch,
            age=age,
            groups=GROUPS,
            times=times,
            pipeline=PIPELINE,
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


def test_the_greedy_response_of_a_group_is_in_no_measure_of_its_update():
    """ReMax draws it from another distribution, and it does not train."""
    (record,) = records(1, greedy_last=True)
    assert (record.reward_mean, record.response_tokens_mean, record.truncated_share) == (0.75, 1.5, 0.0)
    assert record.score_by_reward == {"a": 0.75, "b": 1.0}
    assert record.reward_by_source == {"easy": 1.0, "hard": 0.5}
    assert record.groups_without_signal == 1, "the reward of the greedy response decides whether there is a signal"


def test_the_train_pool_is_idle_only_while_it_waits_for_a_batch():
    assert [record.train_idle for record in records(2)] == [0.5 / 2.75, 0.5 / 2.75]


def test_an_update_reports_the_scores_of_each_reward_and_the_reward_of_each_source():
    (record,) = records(1)
    assert record.score_by_reward == {"a": 0.5, "b": 0.5}  # of three samples, and of four
    assert record.reward_by_source == {"easy": 0.5, "hard": 0.5}
    assert [record.reward_by_source for record in records(2)] == [{"easy": 0.5}, {"hard": 0.5}]
    assert [record.score_by_reward for record in records(2)] == [{"a": 0.5, "b": 1.0}, {"a": 0.5, "b": 0.0}]


def test_groups_that_left_untrained_and_failures_since_the_last_update_are_reported():
    (record,) = records(1)
    assert record.groups_left == {"filtered": 3, "failed": 2}
    assert (record.reward_errors, record.errors_by_reward, record.timeouts_by_reward) == (
        10,
        {"a": 7},
        {"a": 1, "b": 2},
    )
    assert record.first_reward_error == r"reward a, prompt easy/0: ill \ud800", "which a file can hold"


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
        *(f"seconds_{part}" for part in TIME_PARTS),
        "seconds_publishing",
        "prompts",
        "samples",
        "reward_errors",
        "replicas_lost",
    ):
        assert sum(getattr(record, name) for record in twice) == getattr(once[0], name), name
    assert [record.lag_histogram for record in twice] == [once[0].lag_histogram, {}]
    assert [record.groups_left for record in twice] == [once[0].groups_left, {}]
    assert [record.timeouts_by_reward for record in twice] == [once[0].timeouts_by_reward, {}]


def test_a_response_is_right_when_every_reward_gives_full_marks():
    ill = CombinedScore(None, {"b": 1.0}, {"a": "Timeout: too slow"}, frozenset("a"))
    groups = [
        group("easy", (sequence(2), sequence(2)), scored(1.0, a=1.0, b=1.0), scored(0.8, a=1.0, b=0.0)),
        group("hard", [sequence(4)], ill),
    ]
    record = evaluation_record(groups, update=5, version=2, time=1.0)
    assert record.accuracy == pytest.approx(1 / 3), "one that a reward could not score is not right"
    assert record.reward_mean == pytest.approx(0.6)
    assert (record.samples, record.response_tokens_mean) == (3, pytest.approx(8 / 3))
    assert record.score_by_reward == {"a": 1.0, "b": pytest.approx(2 / 3)}
    assert record.reward_by_source == {"easy": pytest.approx(0.9), "hard": 0.0}
    assert (record.errors_by_reward, record.timeouts_by_reward) == ({}, {"a": 1})
    assert record.first_reward_error == "reward a, prompt hard/0: Timeout: too slow"


def test_a_penalty_does_not_count_for_accuracy():
    """A right answer without repetitions gets 0 from the penalty, and one with repetitions 1."""
    penalty = frozenset({"repeats"})
    right = CombinedScore(1.0, {"Math": 1.0, "repeats": 0.0}, {}, penalties=penalty)
    repeated = CombinedScore(0.5, {"Math": 1.0, "repeats": 1.0}, {}, penalties=penalty)
    wrong = CombinedScore(-0.5, {"Math": 0.0, "repeats": 1.0}, {}, penalties=penalty)
    groups = [group("easy", [sequence(1)] * 3, right, repeated, wrong)]
    assert evaluation_record(groups, update=5, version=2, time=1.0).accuracy == pytest.approx(2 / 3)


def test_pass_at_k_is_the_share_of_k_draws_with_a_right_answer():
    rights = [(1, 0, 0, 1, 0, 0), (0, 0, 0, 0, 0, 0), (1, 1, 1, 1, 1, 0)]
    groups = [group("easy", [sequence(1)] * 6, *(scored(float(r), a=float(r)) for r in each)) for each in rights]
    record = evaluation_record(groups, update=5, version=2, time=1.0)
    draws = {k: [any(draw) for each in rights for draw in itertools.combinations(each, k)] for k in (2, 4, 6)}
    assert record.pass_at_k == {k: pytest.approx(sum(hits) / len(hits)) for k, hits in draws.items()}
    assert list(record.pass_at_k) == [2, 4, 6]
    assert scalars(record)["evaluation/pass_at_k/6"] == pytest.approx(2 / 3)


def test_one_response_per_prompt_has_no_pass_at_k():
    groups = [group("easy", [sequence(1)], scored(1.0, a=1.0))]
    assert evaluation_record(groups, update=5, version=2, time=1.0).pass_at_k == {}


def test_a_supervised_evaluation_has_a_loss_and_no_accuracy():
    record = supervised_evaluation_record(0.5, update=1, samples=8, time=2.0)
    assert (record.loss, record.samples, record.accuracy, record.reward_mean) == (0.5, 8, None, None)


def test_the_parts_of_an_update_add_up_to_its_time():
    (record,) = records(1)
    assert (record.seconds_copying, record.seconds_saving, record.seconds_assembling) == (0.125, 0.0625, 0.03125)
    assert record.seconds_driver == 2.75 - 0.5 - 2.0 - 0.125 - 0.0625 - 0.03125
    assert sum(getattr(record, f"seconds_{part}") for part in TIME_PARTS) == record.seconds


def test_parts_that_overlap_leave_no_negative_rest():
    times = UpdateTimes()
    times.trained(1.0, 2.0)
    assert times.driver(2.5) == 0.0
