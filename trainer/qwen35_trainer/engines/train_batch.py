"""A training batch: N samples packed one after another, every per-token field aligned with the responses.

prompts    p p p │ p p │ …        prompt_lengths (N,)
responses  r r   │ r r r r │ …    response_lengths (N,)     log_probs, versions, trainable: one value per r
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qwen35_trainer.data.picture_arrays import PictureArrays


@dataclass(frozen=True)
class TrainBatch:
    """The samples of one batch, for any number of ranks. All ranks get the same object."""

    prompts: NDArray[np.int32]
    prompt_lengths: NDArray[np.int64]
    responses: NDArray[np.int32]
    response_lengths: NDArray[np.int64]
    trainable: NDArray[np.bool_]
    """Response tokens that enter the loss."""
    log_probs: NDArray[np.float32] | None = None
    """Log-probs of the behaviour policy; None for supervised samples."""
    rewards: NDArray[np.float32] | None = None
    """(N,); None for supervised samples."""
    valid: NDArray[np.bool_] | None = None
    """(N,) false for samples that could not be scored; None: all were."""
    group: NDArray[np.int64] | None = None
    """(N,) equal for the samples of one prompt; samples of a group are adjacent."""
    updates: int = 1
    """Optimizer steps: the samples are trained in this many equal parts, in order."""
    pictures: tuple[PictureArrays | None, ...] | None = None
    """Images and videos of each sample; None: text only."""

    def __post_init__(self) -> None:
        assert self.prompts.size == self.prompt_lengths.sum(), "prompts do not fit their lengths"
        assert self.responses.size == self.trainable.size == self.response_lengths.sum(), "responses do not fit"
        assert self.samples % self.updates == 0, f"{self.samples} samples do not make {self.updates} equal updates"
        assert self.pictures is None or len(self.pictures) == self.samples, "pictures are not one entry per sample"

    @property
    def samples(self) -> int:
        """Number of samples, N."""
        return len(self.response_lengths)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of prompt and response together, (N,)."""
        return self.prompt_lengths + self.response_lengths
