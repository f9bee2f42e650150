"""`-control`: what the operator asks of the running attempt."""

from typing import Annotated

from pydantic import Field

from qwen35_trainer.contract.document import Message, parse
from qwen35_trainer.contract.names import CONTROL_KEY
from qwen35_trainer.spec.checkpoint import Export


class Stop(Message):
    """Finish the current update, save a checkpoint, and end."""

    id: Annotated[str, Field(min_length=1, max_length=64)]
    """The acknowledgement names it, so that an answer to an earlier request is none to this one."""
    reason: Annotated[str, Field(max_length=128)]
    time: Annotated[float, Field(ge=0)]
    """Unix second at which it was asked."""


class Live(Message):
    """Fields of the spec that a running attempt takes over, all of them, at the next update."""

    checkpointEveryUpdates: Annotated[int, Field(ge=1)]
    checkpointKeep: Annotated[int, Field(ge=1)]
    evaluationEveryUpdates: Annotated[int, Field(ge=0)]
    checkpointExport: Export = "None"


class Control(Message):
    """Everything that is asked, every time: the newest replaces what came before."""

    attempt: Annotated[int, Field(ge=1)]
    """Which attempt is meant: another one ignores it."""
    stop: Stop | None = None
    rolloutNodes: Annotated[int, Field(ge=0)] = 0
    """Nodes that the rollout pool is to have."""
    leaving: Annotated[tuple[str, ...], Field(strict=False, max_length=1024)] = ()
    """Pods that go: their replicas take no more groups."""
    live: Live | None = None


def parse_control(text: str) -> Control:
    """The request in the key's value. Raises ContractError."""
    return parse(Control, text, CONTROL_KEY)
