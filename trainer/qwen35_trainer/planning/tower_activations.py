"""Bytes of the activations of a vision tower, at most: if the prompts of a micro-batch consist of pictures.

A block is that of transformers' `Qwen3_5VisionBlock`. For each patch it keeps, in numbers of h channels or I channels of its MLP:

    attention    inputs of the norm and of the joint projection 2 h; queries, keys and values 3 h, and queries and keys again after
                 their rotation 2 h; the output for each picture, and for all pictures together 2 h
    MLP          inputs of the norm and of the first matrix 2 h; both sides of the activation function 2 I

The merger keeps the inputs of its norm and of its first matrix and both sides of its activation function, 4 h. The backward pass
of the tower begins when that of the layers of text has ended. No context-parallel or tensor-parallel rank divides the tower.
"""

from __future__ import annotations

from dataclasses import dataclass

from qwen35_trainer.catalog.model_sizes import ModelSizes
from qwen35_trainer.planning.micro_batch_size import MicroBatchSize


@dataclass(frozen=True)
class TowerActivations:
    """The bytes that the vision tower needs for the pictures of one micro-batch."""

    kept: float = 0.0
    """From its forward pass to its backward pass."""
    computed: float = 0.0
    """In addition during its own backward pass."""

    @classmethod
    def of(
        cls, shape: ModelSizes, micro: MicroBatchSize, width: int, *, pictures: bool, recompute: bool
    ) -> TowerActivations:
        """Return what the tower of a model needs at most; nothing for a text model or without pictures.

        width: bytes of a number in the model's precision. recompute: whether the backward pass computes the activations of each
        block again from the block's input.
        """
        if shape.vision is None or not pictures:
            return cls()
        hidden, inner = shape.vision.hidden, shape.vision.intermediate
        patches = micro.prompts * shape.vision.merged_patches
        block = width * (11 * hidden + 2 * inner) + 16  # the norms' means and deviations
        values = (4 + (width if width < 4 else 0)) * shape.vision.patch_values
        kept_blocks = shape.vision.depth * (width * hidden if recompute else block)
        kept = values + kept_blocks + 4 * width * hidden
        computed = width * 2 * (hidden + inner) + (block if recompute else 0)
        return cls(patches * kept, patches * computed)
