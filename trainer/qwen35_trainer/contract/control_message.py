"""The message in the ConfigMap `<training>-control`: the operator's orders to the running attempt."""

from typing import Annotated

from pydantic import FailFast, Field

from qwen35_trainer.contract.message import ContractMessage, parse
from qwen35_trainer.contract.shared_names import CONTROL_KEY
from qwen35_trainer.manifest.checkpoint import Export


class StopOrder(ContractMessage):
    """The operator's order to finish the current update, save a checkpoint, and end."""

    id: Annotated[str, Field(min_length=1, max_length=64)]
    """Identifies this order. The trainer repeats the id when it acknowledges the order (`ProgressReport.stopAcknowledged`)."""
    reason: Annotated[str, Field(max_length=128)]
    time: Annotated[float, Field(ge=0)]
    """Unix time of the order."""


class LiveSettings(ContractMessage):
    """Fields of the spec that may change while an attempt runs. The attempt applies all of them at the next update."""

    checkpointEveryUpdates: Annotated[int, Field(ge=1)]
    checkpointKeep: Annotated[int, Field(ge=1)]
    evaluationEveryUpdates: Annotated[int, Field(ge=0)]
    checkpointExport: Export = "None"


class Control(ContractMessage):
    """The operator's current orders to the trainer. A message contains all orders, and replaces the previous message."""

    attempt: Annotated[int, Field(ge=1)]
    """Number of the attempt that the orders are for. The trainer of any other attempt ignores the message."""
    stop: StopOrder | None = None
    rolloutNodes: Annotated[int, Field(ge=0)] = 0
    """Number of nodes that the rollout pool should have; 0: the number in the manifest."""
    leaving: Annotated[tuple[str, ...], FailFast(), Field(strict=False, max_length=1024)] = ()
    """Names of the rollout pods that will be deleted. Replicas in these pods get no more sequences."""
    leavingSince: Annotated[float, Field(ge=0)] | None = None
    """Unix time since which all of these pods have been named, from which the operator counts its limit; None if there are none."""
    live: LiveSettings | None = None


def parse_control(text: str | bytes) -> Control:
    """Parse the operator's orders from the JSON text in the `-control` ConfigMap.

    Raises ContractError if the text is not valid.
    """
    return parse(Control, text, CONTROL_KEY)
