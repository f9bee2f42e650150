"""The numbers of a record as named scalars. Every sink uses the same names."""

from collections.abc import Mapping
from typing import Final

from qwen35_trainer.progress.records import CheckpointRecord, EvaluationRecord, RunRecord, UpdateRecord

_UPDATE: Final = {
    "train/reward_mean": "reward_mean",
    "train/reward_std": "reward_std",
    "train/loss": "loss",
    "train/policy_loss": "policy_loss",
    "train/entropy": "entropy",
    "train/kl": "kl",
    "train/kl_coefficient": "kl_coefficient",
    "train/clip_fraction": "clip_fraction",
    "train/router_load_balancing": "router_load_balancing",
    "train/router_z": "router_z",
    "train/mtp_nll": "mtp_nll",
    "train/saved_token_share": "saved_token_share",
    "train/replayed_token_share": "replayed_token_share",
    "train/gradient_norm": "gradient_norm",
    "train/learning_rate": "learning_rate",
    "train/tokens": "tokens",
    "train/masked_tokens": "masked_tokens",
    "train/samples": "samples",
    "train/groups_without_signal": "groups_without_signal",
    "train/reward_errors": "reward_errors",
    "train/idle": "train_idle",
    "rollout/response_tokens_mean": "response_tokens_mean",
    "rollout/response_tokens_max": "response_tokens_max",
    "rollout/truncated_share": "truncated_share",
    "rollout/tokens_per_second": "tokens_per_second",
    "rollout/idle": "rollout_idle",
    "rollout/replicas_lost": "replicas_lost",
    "staleness/lag_mean": "lag_mean",
    "staleness/lag_max": "lag_max",
    "staleness/behaviour_kl": "behaviour_kl",
    "staleness/correction_weight_mean": "correction_weight_mean",
    "staleness/window_dispatched": "window_dispatched",
    "staleness/window_limit": "window_limit",
    "publication/probe_difference_mean": "probe_difference_mean",
    "publication/probe_difference_max": "probe_difference_max",
    "publication/probes_passed": "probes_passed",
    "publication/probes_skipped": "probes_skipped",
    "publication/probes_dropped": "probes_dropped",
    "time/update_seconds": "seconds",
    "time/waiting_seconds": "seconds_waiting",
    "time/assembling_seconds": "seconds_assembling",
    "time/training_seconds": "seconds_training",
    "time/copying_seconds": "seconds_copying",
    "time/saving_seconds": "seconds_saving",
    "time/evaluating_seconds": "seconds_evaluating",
    "time/driver_seconds": "seconds_driver",
    "time/publishing_seconds": "seconds_publishing",
    "progress/version": "version",
}
_EVALUATION: Final = {
    "evaluation/accuracy": "accuracy",
    "evaluation/loss": "loss",
    "evaluation/reward_mean": "reward_mean",
    "evaluation/response_tokens_mean": "response_tokens_mean",
}
_CHECKPOINT: Final = {"checkpoint/seconds": "seconds"}
SCALARS: Final[Mapping[type[RunRecord], Mapping[str, str]]] = {
    UpdateRecord: _UPDATE,
    EvaluationRecord: _EVALUATION,
    CheckpointRecord: _CHECKPOINT,
}
"""Class of a record → name of a scalar → attribute of the record with its number."""
GROUPS: Final[Mapping[type[RunRecord], str]] = {UpdateRecord: "train", EvaluationRecord: "evaluation"}
"""Class of a record → first part of the names of its scalars that exist for each reward or data source."""
_BY_REWARD: Final = ("score_by_reward", "reward_by_source", "errors_by_reward", "timeouts_by_reward")
NAMED: Final[Mapping[type[RunRecord], tuple[str, ...]]] = {
    UpdateRecord: _BY_REWARD,
    EvaluationRecord: (*_BY_REWARD, "pass_at_k"),
}
"""Class of a record → its attributes with one number per reward, data source or k. That reward, source or k becomes the
last part of the scalar's name."""


def scalars(record: RunRecord) -> dict[str, float]:
    """Return all scalars of a record: name that trackers show → number.

    Values that the run does not have are left out. The result is empty for records of spans, exports and the end
    of the run.
    """
    plain = {name: getattr(record, attribute) for name, attribute in SCALARS.get(type(record), {}).items()}
    numbers = {name: float(value) for name, value in plain.items() if value is not None}
    if (group := GROUPS.get(type(record))) is None:
        return numbers
    return numbers | {
        f"{group}/{attribute}/{name}": float(value)
        for attribute in NAMED[type(record)]
        for name, value in getattr(record, attribute).items()
    }
