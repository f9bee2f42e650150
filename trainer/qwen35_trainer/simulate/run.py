"""Play a load."""

from __future__ import annotations

from qwen35_trainer.pipeline.coordinator import NothingToTrain
from qwen35_trainer.simulate.load import Load
from qwen35_trainer.simulate.result import Result
from qwen35_trainer.simulate.world import World


def simulate(load: Load) -> Result:
    """What comes of `load`. Deterministic: equal loads give equal results.

    Raises ValueError when its settings keep it from ever ending.
    """
    try:
        return World(load).run()
    except NothingToTrain as error:
        raise ValueError(f"signal {load.signal} is too rare for dynamic_sampling: {error}") from error
