from pathlib import Path

import pytest

from qwen35_trainer.failure_reasons import FailureReason
from qwen35_trainer.progress.records import CheckpointRecord, EvaluationRecord, FinishRecord, UpdateRecord
from qwen35_trainer.progress.summary import Summary, summarise
from qwen35_trainer.runtime.folder import RunFolder
from qwen35_trainer.runtime.results import failure_text, summary_rows
from qwen35_trainer.runtime.run_command import FinishedRun

UPDATE = {
    "updates_total": 9, "version": 0, "time": 1.0, "prompts": 1, "samples": 4, "tokens": 9, "loss": 0.0,
    "gradient_norm": 1.0, "learning_rate": 1e-3, "seconds": 1.0, "reward_mean": 0.5,
}  # fmt: skip


def summary(*held_out: dict[str, object], **update: object) -> Summary:
    records = [
        EvaluationRecord(update=at, version=at, time=1.0, samples=4, **evaluation)
        for at, evaluation in enumerate(held_out)
    ]
    trained = UpdateRecord(update=1, **UPDATE | update)
    return summarise([*records[:1], trained, *records[1:]], max_version_lag=3, peak_rss_mib=None)


def test_a_run_of_one_reward_prints_its_accuracy_in_percent():
    text = summary(
        {"accuracy": 0.016, "reward_mean": 0.016, "score_by_reward": {"digit": 0.016}},
        {"accuracy": 1.0, "reward_mean": 1.0, "score_by_reward": {"digit": 1.0}},
        lag_histogram={0: 5, 1: 4},
        rollout_idle=0.81,
        train_idle=0.11,
        tokens_per_second=4779.0,
    )
    assert summary_rows(text) == [
        ("held-out accuracy", "1.6% → 100%"),
        ("maximum token lag", "1 version (bound 3)"),
        ("idle", "rollout 81%, trainer 11%"),
        ("generated", "4779 tokens/s"),
    ]


def test_graded_rewards_tell_the_reward_and_its_parts():
    graded = {"accuracy": 0.0, "score_by_reward": {"a": 0.5, "b": 0.25}, "reward_by_source": {"x": 0.0, "y": 1.0}}
    text = summary(graded | {"reward_mean": 0.1}, graded | {"reward_mean": 0.6})
    assert summary_rows(text) == [
        ("held-out reward", "0.100 → 0.600"),
        ("held-out by reward", "a 0.500, b 0.250"),
        ("held-out by source", "x 0.000, y 1.000"),
    ]


def test_failed_rewards_are_listed_by_name_with_the_first_exception_on_one_line():
    text = summary(
        reward_errors=14,
        errors_by_reward={"judge": 12, "digit": 1},
        timeouts_by_reward={"judge": 1},
        first_reward_error="reward judge, prompt s/5: ValueError: the judge\n is ill",
    )
    assert summary_rows(text) == [
        ("reward errors", "digit 1 error; judge 12 errors, 1 time-out"),
        ("first of them", "reward judge, prompt s/5: ValueError: the judge is ill"),
    ]


def test_a_long_exception_of_a_reward_is_cut():
    long = summary(reward_errors=1, errors_by_reward={"judge": 1}, first_reward_error="ValueError: " + "ill " * 100)
    _, (name, first) = summary_rows(long)
    assert name == "first of them"
    assert (len(first), first[-1]) == (300, "…")


@pytest.mark.parametrize(
    ("reason", "message", "saved", "advice"),
    [
        (FailureReason.WORKER_LOST, "the train pool was lost during training a batch", True, True),
        (FailureReason.WORKER_LOST, "the train pool was lost during training a batch", False, False),
        (FailureReason.WORKER_LOST, "lost; continue with --resume auto", True, False),
        (FailureReason.REWARD_FAILED, "reward judge failed", True, False),
        ("", "of another release", True, False),
    ],
)
def test_a_failed_run_names_the_command_that_continues_it_if_that_can_succeed(reason, message, saved, advice):
    checkpoint = CheckpointRecord(update=1, version=1, time=1.0, path="update-000001", seconds=1.0)
    records = [UpdateRecord(update=1, **UPDATE), *([checkpoint] if saved else [])]
    finish = FinishRecord(outcome="Failed", message=message, time=2.0, reason=reason)
    text = summarise([*records, finish], max_version_lag=3, peak_rss_mib=None)
    lines = failure_text(FinishedRun(finish, text, RunFolder(Path("runs/a"))), "qwen35 run a.yaml --resume auto")
    command = ["Continue with: qwen35 run a.yaml --resume auto"] if advice else []
    assert lines.splitlines() == [message, *command, f"Logs: {Path('runs/a/logs')}"]
