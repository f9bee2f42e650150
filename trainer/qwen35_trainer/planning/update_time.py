"""Seconds of an update by part, and the part that is the bottleneck.

FullyAsync   three activities run at the same time, and the longest determines the time of an update: (1) training and the copies
             of publications; (2) generation and the loading of versions; (3) the transfer of versions
Colocated    the sum of training, generation and publications, which follow each other
SFT          training alone
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qwen35_trainer.manifest.training import TrainingSpec
from qwen35_trainer.planning.generation_time import GenerationTime
from qwen35_trainer.planning.publication_time import PublicationTime
from qwen35_trainer.planning.train_time import TrainTime

Bottleneck = Literal["training", "generation", "publication"]


@dataclass(frozen=True)
class UpdateTime:
    """The time of one update, and the times of its parts."""

    training: TrainTime
    generation: GenerationTime | None
    """The time to generate the responses of the update; None in SFT."""
    publication: PublicationTime | None
    """The time of one publication, which may serve several updates. None in SFT."""
    seconds: float
    """Seconds from one update to the next."""
    bottleneck: Bottleneck
    """The part that takes longest."""


def update_time(
    spec: TrainingSpec, training: TrainTime, generation: GenerationTime | None, publication: PublicationTime | None
) -> UpdateTime:
    """Return the time of an update from the times of its parts.

    generation, publication: None in SFT. The time of a publication is divided by the number of updates between two
    publications.
    """
    if generation is None or publication is None:
        return UpdateTime(training, None, None, training.seconds, "training")
    updates = spec.async_.updatesPerBatch * spec.batches_per_version
    blocked = publication.copy / updates
    if spec.mode == "Colocated":
        exchange = (publication.copy + publication.transfer + publication.load) / updates
        parts: dict[Bottleneck, float] = {
            "training": training.seconds,
            "generation": generation.seconds,
            "publication": exchange,
        }
        return UpdateTime(
            training, generation, publication, sum(parts.values()), max(parts, key=lambda part: parts[part])
        )
    # A replica generates while it receives a version, and stops only to load it.
    sides: dict[Bottleneck, float] = {
        "training": training.seconds + blocked,
        "generation": generation.seconds + publication.load / updates,
        "publication": publication.transfer / updates,
    }
    bottleneck = max(sides, key=lambda part: sides[part])
    return UpdateTime(training, generation, publication, sides[bottleneck], bottleneck)
