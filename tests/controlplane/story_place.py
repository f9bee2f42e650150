"""Where a story takes place."""

from dataclasses import dataclass

from tests.controlplane.live_training import Plane
from tests.virtual.operators import Operators


@dataclass(frozen=True)
class StoryPlace:
    """A control plane, real or in memory. operators: makes operators of the one in memory; None on the real one."""

    plane: Plane
    operators: Operators | None = None
