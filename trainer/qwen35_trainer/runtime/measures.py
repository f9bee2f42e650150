"""From what the loop saw to the records that it writes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from qwen35_trainer.engines.base import UpdateMetrics
from qwen35_trainer.engines.batch import TrainBatch
from qwen35_trainer.progress.records import EvaluationRecord, UpdateRecord
from qwen35_trainer.rewards.scorer import Scored
from qwen35_trainer.rollout.base import Completed
from qwen35_trainer.runtime.assembly import ScoredGroup, TokenAge


@dataclass
class UpdateTimes:
    """Where the time since the last update went, in seconds."""

    waiting: float = 0.0
    training: float = 0.0
    publishing: float = 0.0

    def trained(self, waited: float, seconds: float) -> None:
        self.waiting += waited
        self.training += seconds

    def published(self, seconds: float) -> None:
        self.publishing += seconds


@dataclass(frozen=True)
class Pipeline:
    """The rollout side between two batches."""

    counted: int
    """Groups that count against the window."""
    limit: int
    idle: float
    """Share of the rollout pool's time without a sequence."""
    tokens_per_second: float
    left: Mapping[str, int]
    """Groups that left untrained, by reason."""
    lost_rewards: int
    """Reward errors in groups that could not be scored at all."""


def update_record(
    measured: UpdateMetrics,
    *,
    step: int,
    update: int,
    updates_total: int,
    version: int,
    time: float,
    seconds: float,
    batch: TrainBatch,
    age: TokenAge,
    groups: Sequence[ScoredGroup],
    times: UpdateTimes,
    pipeline: Pipeline | None,
    trainer_idle: float,
) -> UpdateRecord:
    """The record of update number `update`, which is step `step` of its batch. Ages and times stand at a batch's first
    step, so that sums over records count them once.
    """
    first = step == 0
    samples = batch.samples // batch.updates
    mine = slice(step * len(groups) // batch.updates, (step + 1) * len(groups) // batch.updates)
    rewards = np.array([reward for group in groups[mine] for reward in group.rewards if reward is not None])
    sequences = [sequence for group in groups[mine] for sequence in group.sequences]
    lengths = np.array([len(sequence.tokens) for sequence in sequences])
    mean = measured.means.get
    clipped = [value for name, value in measured.means.items() if name in ("clip_fraction_low", "clip_fraction_high")]
    trained = sum(age.histogram.values())
    return UpdateRecord(
        update=update,
        updates_total=updates_total,
        version=version,
        time=time,
        seconds=seconds if first else 0.0,
        prompts=len(groups[mine]) or samples,
        samples=samples,
        tokens=measured.tokens,
        masked_tokens=age.masked if first else 0,
        loss=measured.loss,
        gradient_norm=measured.gradient_norm,
        learning_rate=measured.learning_rate,
        policy_loss=mean("policy_loss"),
        entropy=mean("entropy"),
        kl=mean("kl"),
        behaviour_kl=mean("behaviour_kl"),
        clip_fraction=sum(clipped) if clipped else None,
        correction_weight_mean=mean("correction_weight"),
        seconds_waiting=times.waiting if first else 0.0,
        seconds_training=times.training if first else 0.0,
        seconds_publishing=times.publishing if first else 0.0,
        trainer_idle=trainer_idle,
        reward_mean=float(rewards.mean()) if rewards.size else None,
        reward_std=float(rewards.std()) if rewards.size else None,
        response_tokens_mean=float(lengths.mean()) if lengths.size else None,
        response_tokens_max=int(lengths.max()) if lengths.size else None,
        truncated_share=float(np.mean([s.truncated for s in sequences])) if sequences else None,
        lag_mean=sum(lag * count for lag, count in age.histogram.items()) / trained if trained else None,
        lag_max=max(age.histogram) if trained else None,
        lag_histogram=age.histogram if first else {},
        window_dispatched=None if pipeline is None else pipeline.counted,
        window_limit=None if pipeline is None else pipeline.limit,
        rollout_idle=None if pipeline is None else pipeline.idle,
        tokens_per_second=None if pipeline is None else pipeline.tokens_per_second,
        reward_errors=sum(group.errors for group in groups[mine])
        + (pipeline.lost_rewards if pipeline is not None and first else 0),
        groups_left=dict(pipeline.left) if pipeline is not None and first else {},
        groups_without_signal=sum(len({r for r in group.rewards if r is not None}) < 2 for group in groups[mine]),
    )


def evaluation_record(
    results: Sequence[tuple[list[Completed], list[Scored]]], *, update: int, version: int, time: float
) -> EvaluationRecord:
    """A response is right when every reward gives it full marks (1)."""
    scores = [score for _, scored in results for score in scored]
    lengths = [len(sequence.tokens) for completed, _ in results for sequence in completed]
    right = [bool(score.parts) and all(part >= 1.0 for part in score.parts.values()) for score in scores]
    return EvaluationRecord(
        update=update,
        version=version,
        time=time,
        accuracy=float(np.mean(right)),
        reward_mean=float(np.mean([score.value or 0.0 for score in scores])),
        samples=len(scores),
        response_tokens_mean=float(np.mean(lengths)),
    )


def supervised_evaluation_record(loss: float, *, update: int, samples: int, time: float) -> EvaluationRecord:
    """Held-out negative log-likelihood per target token, in nats."""
    return EvaluationRecord(update=update, version=0, time=time, samples=samples, loss=loss)
