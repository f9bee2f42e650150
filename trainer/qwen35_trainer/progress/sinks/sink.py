"""The interface of a metric sink."""

from typing import Protocol

from qwen35_trainer.progress.records import RunRecord


class Sink(Protocol):
    """Receives the records of a run, in order. A sink ignores the kinds of records that it does not use."""

    def write(self, record: RunRecord) -> None: ...

    def close(self) -> None:
        """Deliver the remaining records. `write` is not called afterwards."""
