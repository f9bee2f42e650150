"""Engines that fail and come back, and pools that change their size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from qwen35_trainer.simulate.problems import above, at_least, refuse


@dataclass(frozen=True)
class Faults:
    """Losses of engines. A lost engine is back, empty, after `mttr`."""

    times: tuple[tuple[float, int], ...] = ()
    """(second, number of the engine): it fails then, unless it is gone at that time. The lane's follow the pool's."""
    mtbf: float | None = None
    """Mean seconds between two losses of one engine, exponentially distributed, besides `times`. None: no such losses."""
    mttr: float = 0.0
    """Seconds until it is back."""
    keep: bool = True
    """The tokens that it had generated are at hand elsewhere: with partial rollout they are not generated again."""

    def __post_init__(self) -> None:
        refuse(
            *(problem for second, _ in self.times for problem in at_least(0, **{"faults.times": second})),
            *([] if self.mtbf is None else above(0, **{"faults.mtbf": self.mtbf})),
            *at_least(0, **{"faults.mttr": self.mttr}),
        )

    def gaps(self, seed: int, engine: int) -> Iterator[float]:
        """Seconds from an engine's start to its next loss, time after time."""
        draw = np.random.default_rng((seed, 1, engine))
        while self.mtbf is not None:
            yield float(draw.exponential(self.mtbf))
