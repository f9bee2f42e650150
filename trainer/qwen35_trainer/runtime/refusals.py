"""Decides whether a sequence that could not be generated is the fault of its replica or of its prompt.

    a replica refuses sequences ─► each is tried once more ─┬─ another replica generates one: a fault of the first replica
                                                            └─ all are refused again, or their groups leave: no fault

The result of the second attempt is the only evidence: a replica that has lost a mounted folder, or whose engine is broken, refuses every
sequence in milliseconds, so that it always has free slots, and would consume the data of a whole run. Until each refused sequence
has its second result, the coordinator gives the replica no sequences (`SequenceRefused`, `ReplicaTrusted`), so that everything
that it refused until then is one fault at most. A replica with MAX_FAULTS faults in a row is lost.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from qwen35_trainer.pipeline.events import SequenceId

MAX_FAULTS: Final = 3
"""Number of faults of a replica in a row, without a sequence of its own between them, after which it is lost.

More than one, so that a file that cannot be read for a moment ends no replica, however many sequences need it at that moment.
"""


class Refusals:
    """Tracks the sequences that replicas have refused, and the faults of replicas."""

    def __init__(self) -> None:
        self._first: dict[SequenceId, int] = {}  # refused sequences that have not ended → the first replica
        self._open: dict[int, set[SequenceId]] = {}  # doubted replica → its refused sequences without a second result
        self._at_fault: set[int] = set()  # doubted replicas of which another one has generated a refused sequence
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
        if not (self._first or self._faults or self._at_fault):
            return  # hot: called twice for each sequence, and replicas rarely refuse one
        self._faults.pop(replica, None)
        self._at_fault.discard(replica)
        first = self._first.get(name)
        if self._settle(name) and first is not None and first != replica:
            self._at_fault.add(first)

    def ended(self, name: SequenceId) -> None:
        """Drop a sequence that is complete, or whose group has left."""
        if name in self._first:
            self._settle(name)
            del self._first[name]

    def lost(self, replica: int) -> None:
        """Drop a replica that is lost."""
        self._at_fault.discard(replica)
        for by_replica in (self._open, self._faults, self._errors):
            by_replica.pop(replica, None)

    def take_trusted(self) -> list[int]:
        """Return the replicas whose refused sequences all have a second result, each once, and count their faults."""
        trusted = [replica for replica, names in self._open.items() if not names]
        for replica in trusted:
            del self._open[replica]
            self._faults[replica] += replica in self._at_fault
            self._at_fault.discard(replica)
        return trusted

    def failure(self, replica: int) -> str | None:
        """Return why a replica is lost, or None if it has fewer than MAX_FAULTS faults."""
        if self._faults[replica] < MAX_FAULTS:
            return None
        return (
            f"it refused sequences that other replicas generate, {self._faults[replica]} times in a row; the last error was: "
            f"{self._errors[replica]}"
        )

    def _settle(self, name: SequenceId) -> bool:
        """Record that a refused sequence has its second result. Returns whether it had none before."""
        names = self._open.get(self._first.get(name, -1))
        if names is None or name not in names:
            return False
        names.discard(name)
        return True
