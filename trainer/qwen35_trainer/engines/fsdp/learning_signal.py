"""The learning signal of a batch: advantages and log-probs of other policies, computed once for the whole batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qwen35_trainer.algorithms.advantages import AdvantageInputs
from qwen35_trainer.algorithms.aggregation import GlobalCounts
from qwen35_trainer.algorithms.kl import kl
from qwen35_trainer.algorithms.objective import Objective
from qwen35_trainer.algorithms.user import advantage_of, loss_of
from qwen35_trainer.engines.fsdp.micro_batch import Offsets, Responses
from qwen35_trainer.engines.train_batch import TrainBatch
from qwen35_trainer.manifest import AlgorithmSpec, TrainingSpec


@dataclass(frozen=True)
class LearningSignal:
    """The inputs of the policy loss besides the current log-probs.

    Tables (N, T) on the host, where T is the length of the longest response.
    """

    advantages: Tensor
    reference: Tensor | None
    """Log-probs of the reference model of the KL penalty: the initial weights, with LoRA the base model."""
    proximal: Tensor | None
    """Log-probs of the weights at the batch's start."""

    @classmethod
    def of(
        cls,
        batch: TrainBatch,
        offsets: Offsets,
        algorithm: AlgorithmSpec,
        *,
        reference: Tensor | None,
        proximal: Tensor | None,
    ) -> LearningSignal:
        assert batch.rewards is not None
        assert batch.group is not None
        responses = Responses.of(batch, offsets, np.arange(batch.samples))
        penalty = None
        if algorithm.kl.placement == "Reward" and reference is not None and responses.log_probs is not None:
            divergence = kl(algorithm.kl.estimator)(responses.log_probs, reference)
            penalty = algorithm.kl.coefficient * divergence.masked_fill(~responses.mask, 0.0)
        inputs = AdvantageInputs(
            rewards=torch.from_numpy(np.array(batch.rewards)),
            group=torch.from_numpy(np.array(batch.group)),
            mask=responses.mask,
            token_penalty=penalty,
            gamma=algorithm.gamma,
            lam=algorithm.lambda_,
            valid=None if batch.valid is None else torch.from_numpy(np.array(batch.valid)),
        )
        return cls(advantage_of(_advantage(algorithm))(inputs), reference, proximal)


def rows(table: Tensor | None, samples: NDArray[np.int64], like: Tensor) -> Tensor | None:
    """Select the rows of `samples` from the table of a batch.

    like: (n, T), a table of the micro-batch. The result has the width and the device of `like`.
    """
    if table is None:
        return None
    if len(samples) == 0:
        return torch.zeros_like(like, dtype=torch.float32)
    return table[torch.from_numpy(samples), : like.shape[1]].to(like.device)


def objective(spec: TrainingSpec) -> Objective | None:
    """Return the settings of the policy objective; None for SFT."""
    if spec.mode == "SFT":
        return None
    algorithm = spec.algorithm
    loss = algorithm.loss.function or algorithm.loss.type
    for find, name in ((loss_of, loss), (advantage_of, _advantage(algorithm))):
        find(name)  # imports functions of the user now, so that an error ends the run before it generates anything
    return Objective(
        loss=loss,
        clip_low=algorithm.loss.clipLow,
        clip_high=algorithm.loss.clipHigh,
        dual_clip=algorithm.loss.dualClip,
        aggregation=algorithm.loss.aggregation,
        kl_placement=algorithm.kl.placement,
        kl_coefficient=algorithm.kl.coefficient,
        kl_estimator=algorithm.kl.estimator,
        entropy_coefficient=algorithm.entropyCoefficient,
        correction=algorithm.correction.type,
        cap=algorithm.correction.cap,
        floor=algorithm.correction.floor,
    )


def _advantage(algorithm: AlgorithmSpec) -> str:
    return algorithm.advantageFunction or algorithm.advantage


def counts(batch: TrainBatch, offsets: Offsets, part: NDArray[np.int64], max_tokens: int) -> GlobalCounts | None:
    """Count the trained tokens and sequences of one update over all ranks. Returns None if no token trains.

    part: indices of the update's samples. Every rank holds the whole batch, so counting needs no communication.
    """
    tokens = np.add.reduceat(batch.trainable.astype(np.int64), offsets.responses)[part]
    if tokens.sum() == 0:
        return None
    return GlobalCounts(int(tokens.sum()), int((tokens > 0).sum()), max_tokens)
