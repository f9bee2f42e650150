"""The measured times of a rollout replica: of decoding steps, prefill, and giving a sequence to another replica."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaTimes:
    """The measured speed of a replica. Times are in seconds, or in the unit of a simulation."""

    steps: tuple[tuple[float, float], ...] = ()
    """Pairs (n, seconds) in strictly ascending order of n: mean duration of a decoding step with n sequences.

    The step generates one token for each of the n sequences. Empty if no step was measured.
    """
    prefill_seconds_per_token: float = 0.0
    """Seconds to prefill one token of a prompt or of a response generated so far. 0: not measured."""
    hand_over_seconds: float = 0.0
    """Seconds from the order to move a sequence away until the sequence has left this replica. 0: not measured.

    The prefill on the other replica is not included.
    """

    @property
    def is_measured(self) -> bool:
        """Whether the duration of any decoding step was measured."""
        return bool(self.steps)

    @property
    def largest(self) -> float:
        """The largest number of sequences with which a decoding step was measured; 0 if no step was measured."""
        return self.steps[-1][0] if self.steps else 0.0

    def step_seconds(self, sequences: float) -> float:
        """Return the seconds of a decoding step with `sequences` sequences.

        Between two measured numbers of sequences the duration is interpolated linearly. Outside the measured range it
        is the duration at the nearest measured number. Raises ValueError if no step was measured.
        """
        if not self.steps:
            raise ValueError("no step of the replica was measured")
        below = self.steps[0]
        for above in self.steps:
            if above[0] >= sequences:
                share = (sequences - below[0]) / (above[0] - below[0]) if above[0] > below[0] else 1.0
                return below[1] + max(0.0, share) * (above[1] - below[1])
            below = above
        return below[1]


UNMEASURED = ReplicaTimes()
"""The times of a replica before its first measurement."""
