"""Messages that the operator and the trainer exchange through ConfigMaps while a training runs.

    operator ── -config ──►  trainer      the resolved manifest
    operator ── -control ──► trainer      Control: stop, rollout nodes, live settings
    operator ◄─ -progress ── trainer      ProgressReport: the state of the attempt, and how it ended

The name of each ConfigMap is the training's name followed by the suffix on the arrow (`shared_names`). A message is the
value of one key of its ConfigMap.

There is no heartbeat. The trainer writes a report only when a value has changed. The operator treats an attempt as
stalled when no new version of the weights has appeared for too long (`ProgressReport.versionTime`), and detects the
loss of the driver by the status of the head pod.
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
