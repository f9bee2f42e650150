"""A small run, with numbers that can be checked by hand."""

import pytest

from qwen35_trainer.progress.records import (
    CheckpointRecord,
    EvaluationRecord,
    FinishRecord,
    RunRecord,
    SpanRecord,
    UpdateRecord,
)

START = 1769851800.0
"""2026-01-31 09:30 UTC"""


def make_update(number: int, **changes: object) -> UpdateRecord:
    fields: dict[str, object] = {
        "update": number, "updates_total": 3, "version": number - 1, "time": 10.0 + 2.0 * number, "prompts": 4,
        "samples": 16, "tokens": 400, "masked_tokens": 5, "loss": -0.01 * number, "policy_loss": -0.02, "entropy": 1.5,
        "kl": 0.001, "behaviour_kl": 0.0005, "clip_fraction": 0.02, "correction_weight_mean": 1.01, "gradient_norm": 0.5,
        "learning_rate": 1e-3, "reward_mean": 0.2 * number, "reward_std": 0.1, "response_tokens_mean": 25.0,
        "response_tokens_max": 64, "truncated_share": 0.25, "lag_mean": 0.75, "lag_max": 1,
        "lag_histogram": {0: 100, 1: 300}, "window_dispatched": 6, "window_limit": 8, "rollout_idle": 0.1,
        "train_idle": 0.2, "tokens_per_second": 1000.0, "seconds": 2.0, "seconds_waiting": 0.4,
        "seconds_training": 1.4, "seconds_driver": 0.1, "seconds_publishing": 0.2, "reward_errors": 1, "groups_without_signal": 2,
        "score_by_reward": {"digit": round(0.2 * number, 6), "brevity": 0.5}, "reward_by_source": {"easy": 0.5, "hard": 0.25},
        "errors_by_reward": {"digit": 1}, "first_reward_error": "reward digit, prompt easy/0: ValueError: <b>ill</b>",
        "wall_time": START + 10.0 + 2.0 * number,
    }  # fmt: skip
    return UpdateRecord(**(fields | changes))  # type: ignore[arg-type]


@pytest.fixture
def run() -> list[RunRecord]:
    """Three updates of 2, 2 and 4 seconds; the second reaches lag 2, the third is idle more."""
    held_out = {"samples": 50, "response_tokens_mean": 20.0}
    last = {"score_by_reward": {"digit": 0.75, "brevity": 0.25}, "reward_by_source": {"easy": 0.75, "hard": 0.25}}
    return [
        EvaluationRecord(update=0, version=0, time=9.0, accuracy=0.125, reward_mean=0.1, **held_out),
        make_update(1),
        SpanRecord(lane="rollout-0", kind="generate", start=10.0, end=11.5, label="group 1"),
        SpanRecord(lane="train-0", kind="train", start=11.5, end=12.0, label="update 1"),
        SpanRecord(lane="publish", kind="publish", start=12.0, end=12.2, label="version 1"),
        make_update(2, lag_histogram={1: 300, 2: 100}, lag_max=2),
        CheckpointRecord(update=2, version=2, time=14.5, path="checkpoints/update-2", seconds=0.5),
        make_update(3, time=18.0, seconds=4.0, rollout_idle=0.3, train_idle=0.6, tokens_per_second=400.0),
        EvaluationRecord(
            update=3, version=3, time=19.0, accuracy=0.75, reward_mean=0.5, timeouts_by_reward={"brevity": 1}, **held_out,
            **last,
        ),
        FinishRecord(outcome="Succeeded", message="3 updates", time=20.0),
    ]  # fmt: skip


@pytest.fixture
def supervised_run() -> list[RunRecord]:
    """SFT: no rollout, so neither reward nor lag."""
    fields = {"prompts": 8, "samples": 8, "tokens": 500, "gradient_norm": 1.0, "learning_rate": 1e-5, "seconds": 2.0}
    return [
        UpdateRecord(update=n, updates_total=2, version=n - 1, time=2.0 * n, loss=3.0 / n, train_idle=0.05, **fields)
        for n in (1, 2)
    ]  # fmt: skip
