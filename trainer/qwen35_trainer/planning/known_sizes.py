"""Finds the sizes of a manifest's model without reading the model's files."""

from __future__ import annotations

from qwen35_trainer.catalog.model_sizes import ModelSizes
from qwen35_trainer.catalog.models import find
from qwen35_trainer.manifest.model import ModelSpec


def known_sizes(model: ModelSpec) -> ModelSizes | None:
    """Return the sizes of a model, or None if they are not known.

    The sizes of a model with random weights are in the manifest. Any other model is looked up in the catalog by name.
    """
    if (random := model.source.random) is None:
        return find(model.name)
    # One token for each character, three for the chat template, and four for pictures (data/tokenizer.py).
    special = 3 if random.vision is None else 7
    return ModelSizes.of_random(random, len(random.characters) + special)
