"""What a metric sink is."""

from typing import Protocol

from qwen35_trainer.progress.records import Record


class Sink(Protocol):
    """Takes the records of a run, in order. A sink ignores the records that it has no use for."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None:
        """Deliver what is left. Nothing is written afterwards."""
