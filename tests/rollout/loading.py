"""Loads a version into an engine that no thread drives."""

from collections.abc import Mapping
from typing import Any

from qwen35_trainer.rollout.rollout_engine import RolloutEngine


def load(engine: RolloutEngine, weights: Mapping[str, Any], version: int) -> None:
    """Receive and commit a version."""
    engine.receive(weights, version)
    engine.commit(version)
