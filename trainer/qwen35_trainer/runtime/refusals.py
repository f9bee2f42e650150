"""Decides whether a sequence that could not be generated is the fault of its replica or of its prompt.

    a replica refuses a sequence ─► the sequence is tried once more ─┬─ another replica generates it: a fault of the first replica
                                                                     └─ it is refused again, or its group leaves: no fault

The result of the second attempt is the only evidence: a replica that has lost a mounted folder, or whose engine is broken, refuses every
sequence in milliseconds, so that it always has free slots, and would consume the data of a whole run. Until each refused sequence
has its second result, the coordinator gives the replica no sequences (`SequenceRefused`, `ReplicaTrusted`). A replica with
MAX_FAULTS faults in a row is lost.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from qwen35_trainer.pipeline.events import SequenceId

MAX_FAULTS: Final = 3
"""Number of sequences that a replica refused and others generated, without one of its own between them, after which it is lost.

More than one, so that a file that cannot be read for a moment ends no replica.
"""


class Refusals:
    """Tracks the sequences that replicas have refused, and the faults of replicas."""

    def __init__(self) -> None:
        self._first: dict[SequenceId, int] = {}  # refused sequences that have not ended → the first replica
        self._open: dict[int, set[SequenceId]] = {}  # doubted replica → its refused sequences without a second result
        self._faults: Counter[int] = Counter()
        self._errors: dict[int, str] = {}

    def refused(self, name: SequenceId, replica: int, error: str) -> bool:
        """Record that a replica could not generate a sequence. Returns whether to try the sequence again."""
        if name in self._first:
            self._settle(name)
            return False
        self._first[name] = replica
        self._open.setdefault(replica, set()).add(name)
        self._errors[replica] = error
        return True

    def generated(self, name: SequenceId, replica: int) -> None:
        """Record that a replica has generated the first token of a sequence, or all of them."""
        self._faults.pop(replica, None)
        first = self._first.get(name)
        if self._settle(name) and first is not None and first != replica:
            self._faults[first] += 1

    def ended(self, name: SequenceId) -> None:
        """Drop a sequence that is complete, or whose group has left."""
        self._settle(name)
        self._first.pop(name, None)

    def lost(self, replica: int) -> None:
        """Drop a replica that is lost."""
        for by_replica in (self._open, self._faults, self._errors):
            by_replica.pop(replica, None)

    def take_trusted(self) -> list[int]:
        """Return the replicas whose refused sequences all have a second result, each once."""
        trusted = [replica for replica, names in self._open.items() if not names]
        for replica in trusted:
            del self._open[replica]
        return trusted

    def failure(self, replica: int) -> str | None:
        """Return why a replica is lost, or None if it has fewer than MAX_FAULTS faults."""
        if self._faults[replica] < MAX_FAULTS:
            return None
        return (
            f"it refused {self._faults[replica]} sequences in a row that other replicas generate; the last error was: "
            f"{self._errors[replica]}"
        )

    def _settle(self, name: SequenceId) -> bool:
        """Record that a refused sequence has its second result. Returns whether it had none before."""
        names = self._open.get(self._first.get(name, -1))
        if names is None or name not in names:
            return False
        names.discard(name)
        return True
