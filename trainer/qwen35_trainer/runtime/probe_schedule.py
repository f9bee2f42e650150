"""Decides for which versions the train ranks compute a probe, which finds a train-inference mismatch.

    a version is copied ─► its publication begins ─► due? ─► the train ranks compute the probe ─► it follows the version to the replicas

A probe compares the log-probs that a replica and the trainer compute for the same tokens with the same version. A
replica computes its part between two steps, which costs as much as one prompt. The train ranks gather all parameters of
the model for a probe, however few tokens it has, and cannot train meanwhile. A version has a probe if the probe takes a
small share of the train ranks' time, or no longer than the ranks waited for their last batch. `probes_skipped` in the
metrics counts the versions without a probe. Publications do not wait for probes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PROBE_SHARE = 0.01
"""Maximum share of the train ranks' time that probes take, unless the ranks would wait for their batches during
that time anyway."""


@dataclass
class ProbeSchedule:
    """The token sequences of a run's probes, and the decision when the next probe is due. All times are in seconds.

    A probe compares the log-probs of a replica with the trainer's.
    """

    sequences: tuple[NDArray[np.int32], ...]
    """Token ids of each sequence of a probe, as an array (T,) with T ≥ 2 tokens. There is at least one sequence."""
    limit: float
    """Mean absolute difference of log-probs, in nats, above which a replica counts as lost
    (`publication.maxLogProbDifference`)."""
    _skipped: int = 0
    """Number of versions without a probe since the last call of `take_skipped`."""
    _duration: float = 0.0
    """Seconds that the last probe took on the train ranks."""
    _ended: float = 0.0
    """Time at which the last probe ended."""

    def is_due(self, now: float, waited: float) -> bool:
        """Return whether the version that was just copied gets a probe. True for the first version.

        A probe is due if the last probe took at most `waited` seconds: the ranks would probably be idle for that time
        anyway. A probe is also due if the last probe took at most the share PROBE_SHARE of the time that has passed
        since its end.

        now: present time, on the same clock as the arguments of `computed`. waited: seconds that the train ranks waited
        for their last batch.
        """
        return self._duration <= max(waited, PROBE_SHARE * (now - self._ended))

    def skip(self) -> None:
        """Record that a version gets no probe."""
        self._skipped += 1

    def take_skipped(self) -> int:
        """Return the number of versions that got no probe since the previous call."""
        skipped, self._skipped = self._skipped, 0
        return skipped

    def computed(self, began: float, ended: float) -> None:
        """Record that the train ranks computed a probe from time `began` to time `ended`, in seconds."""
        self._duration, self._ended = ended - began, ended
