"""The measured times of a rollout replica: of its steps by their number of sequences, of its prefill, and of a hand-over."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaTimes:
    """The measured speed of a replica. Times are in seconds, or in the unit of a simulation."""

    steps: tuple[tuple[float, float], ...] = ()
    """(n, seconds): mean duration of a step that gives each of n sequences one token. Ascending numbers of sequences, none
    twice. Empty: no step was measured."""
    prefill_seconds_per_token: float = 0.0
    """Seconds to compute one token of a prompt or of an earlier response. 0: not measured, or too short to matter."""
    hand_over_seconds: float = 0.0
    """Seconds during which a sequence that leaves the replica is generated nowhere, without its prefill. 0: not measured."""

    @property
    def is_measured(self) -> bool:
        """Whether the duration of any step was measured."""
        return bool(self.steps)

    @property
    def largest(self) -> float:
        """The largest number of sequences of a measured step; 0 if none was measured."""
        return self.steps[-1][0] if self.steps else 0.0

    def step_seconds(self, sequences: float) -> float:
        """Return the duration of a step with `sequences` sequences. Raises ValueError if no step was measured.

        Between two measured numbers the duration is interpolated, which is exact for a step that costs a base and an
        amount for each sequence. Outside of them it is the duration at the nearest one.
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
"""The times of a replica of which nothing was measured."""
