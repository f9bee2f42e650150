"""The messages between operator and trainer while a training runs.

    operator ── -config ──►  trainer      the resolved manifest
    operator ── -control ──► trainer      Control: stop, rollout nodes, live settings
    operator ◄─ -progress ── trainer      ProgressReport: the state of the attempt, and how it ended

Each arrow is one key of one ConfigMap, whose name begins with the name of the training (`shared_names`).
"""

from qwen35_trainer.contract.control_message import Control, LiveSettings, StopOrder, parse_control
from qwen35_trainer.contract.message import ContractError
from qwen35_trainer.contract.progress_report import (
    AttemptState,
    CheckpointReport,
    ProgressReport,
    ReplicaReport,
    parse_progress,
)
from qwen35_trainer.failure_reasons import FailureReason

__all__ = [
    "AttemptState",
    "CheckpointReport",
    "ContractError",
    "Control",
    "FailureReason",
    "LiveSettings",
    "ProgressReport",
    "ReplicaReport",
    "StopOrder",
    "parse_control",
    "parse_progress",
]
