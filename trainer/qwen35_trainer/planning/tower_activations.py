"""Bytes of the activations of a vision tower, at most: if the prompts of a micro-batch consist of pictures.

In supervised training the later turns of a conversation may show pictures too, so all tokens may be theirs.

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
from qwen35_trainer.manifest.training import TrainingSpec
from qwen35_trainer.planning.micro_batch_size import MicroBatchSize


@dataclass(frozen=True)
class TowerActivations:
    """The bytes that the vision tower needs for the pictures of one micro-batch."""

    kept: float = 0.0
    """From its forward pass to its backward pass."""
    computed: float = 0.0
    """In addition while it computes."""
    block_input: float = 0.0
    """The part of `kept` that is the input of one block; 0 if the tower does not train."""

    @classmethod
    def of(cls, shape: ModelSizes, spec: TrainingSpec, micro: MicroBatchSize, *, pictures: bool) -> TowerActivations:
        """Return what the tower of a model needs at most; nothing for a text model or without pictures.

        A tower that does not train, because it is frozen or adapters train, keeps the patches only, which belong to the
        micro-batch. micro: the largest micro-batch of `spec`. pictures: whether the data contain pictures.
        """
        if shape.vision is None or not pictures:
            return cls()
        width, recompute = 2 if spec.model.precision == "BF16" else 4, spec.train.activationCheckpointing
        hidden, inner = shape.vision.hidden, shape.vision.intermediate
        patches = micro.pictured * shape.vision.merged_patches
        block = width * (11 * hidden + 2 * inner) + 16  # the norms' means and deviations
        computed = patches * (width * 2 * (hidden + inner) + (block if recompute else 0))
        if spec.train.lora is not None or "Vision" in spec.train.freeze:
            return cls(patches * 4 * shape.vision.patch_values, computed)
        values = (4 + width) * shape.vision.patch_values  # in float32, and joined with those of videos
        kept_blocks = shape.vision.depth * (width * hidden if recompute else block)
        return cls(patches * (values + kept_blocks + 4 * width * hidden), computed, patches * width * hidden)
