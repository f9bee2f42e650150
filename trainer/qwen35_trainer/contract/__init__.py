"""What operator and trainer say to each other while a training runs.

    operator ── -config ──►  trainer      the resolved manifest
    operator ── -control ──► trainer      Control: stop, rollout nodes, live fields
    operator ◄─ -progress ── trainer      Progress: where the attempt stands, and how it ended

Each arrow is one key of one ConfigMap, named after the training; `names` says which.
"""

from qwen35_trainer.contract.control import Control, Live, Stop, parse_control
from qwen35_trainer.contract.document import ContractError
from qwen35_trainer.contract.progress import AttemptState, CheckpointReport, Progress, Replica, parse_progress

__all__ = [
    "AttemptState",
    "CheckpointReport",
    "ContractError",
    "Control",
    "Live",
    "Progress",
    "Replica",
    "Stop",
    "parse_control",
    "parse_progress",
]
