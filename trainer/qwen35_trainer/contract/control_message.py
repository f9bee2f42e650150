"""The message in the ConfigMap `-control`: the operator's orders to the running attempt."""

from typing import Annotated

from pydantic import Field

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
    """The operator's current orders to the trainer. Each message replaces the previous one."""

    attempt: Annotated[int, Field(ge=1)]
    """The attempt that these orders are for; other attempts ignore them."""
    stop: StopOrder | None = None
    rolloutNodes: Annotated[int, Field(ge=0)] = 0
    """Number of nodes that the rollout pool should have; 0: the number in the manifest."""
    leaving: Annotated[tuple[str, ...], Field(strict=False, max_length=1024)] = ()
    """Pods that will be deleted: their replicas receive no more groups."""
    live: LiveSettings | None = None


def parse_control(text: str | bytes) -> Control:
    """Parse the operator's orders from the JSON text in the `-control` ConfigMap.

    Raises ContractError if the text is not valid.
    """
    return parse(Control, text, CONTROL_KEY)
