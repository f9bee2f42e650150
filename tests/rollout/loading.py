"""Loads a version into an engine that no thread drives."""

from collections.abc import Mapping
from typing import Any

from qwen35_trainer.rollout.rollout_engine import RolloutEngine


def load(engine: RolloutEngine, weights: Mapping[str, Any], version: int) -> None:
    """Receive and commit a version. Between two steps: what a step in flight has computed is lost."""
    engine.receive(weights, version)
    engine.settle()
    engine.commit(version)
