"""Decides for which versions the train ranks compute the log-probs of a probe.

    a version is copied ─► its publication begins ─► due? ─► the train ranks compute the probe ─► it follows the version to the replicas

The replicas compute their part between steps, at the cost of one prompt. The train ranks gather all their parameters for
it, however few tokens it has, and cannot train meanwhile. So a version has a probe only if the probe costs little of
their time; `probes_skipped` in the metrics counts the others. No publication waits for a probe.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PROBE_SHARE = 0.01
"""Maximum share of the train ranks' time that probes take, unless the train ranks wait for their batches anyway."""


@dataclass
class ProbeSchedule:
    """The tokens of the probes of a run, and the times by which the next probe is due. All times are in seconds."""

    sequences: tuple[NDArray[np.int32], ...]
    """Each (T,) token ids, T ≥ 2. At least one."""
    limit: float
    """Mean difference, in nats, above which a replica is lost (spec.publication.maxLogProbDifference)."""
    _skipped: int = 0
    """Versions without a probe since `take_skipped`."""
    _duration: float = 0.0
    """Of the last probe, on the train ranks."""
    _ended: float = 0.0
    """When the last probe ended."""

    def is_due(self, now: float, waited: float) -> bool:
        """Whether the version that has just been copied gets a probe. The first version does.

        waited: how long the train ranks waited for their last batch. If they wait as long again, a shorter probe delays
        nothing.
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
        """Record that the train ranks computed a probe from `began` to `ended`."""
        self._duration, self._ended = ended - began, ended
