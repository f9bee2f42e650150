"""The learning signal of a batch: advantages, and log-probs of the reference and proximal policies, computed once per batch.

    rewards and groups of all samples ─┐
    tokens of this rank's share ───────┴─► advantages of this share's tokens; sums over shares where an estimator needs them

An advantage function of the user is called on every rank with the masks and penalties of the whole batch, as tables
with one row per sample and one column per response token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qwen35_trainer.algorithms.advantages import AdvantageInputs, Shares, TrainedTokens, estimator
from qwen35_trainer.algorithms.aggregation import GlobalCounts
from qwen35_trainer.algorithms.kl import kl
from qwen35_trainer.algorithms.objective import Objective
from qwen35_trainer.algorithms.user import advantage_of, is_user_function, loss_of
from qwen35_trainer.engines.micro_batch import Offsets, TokenTable
from qwen35_trainer.engines.train_batch import TrainBatch, starts_of
from qwen35_trainer.manifest import AlgorithmSpec, TrainingSpec


@dataclass(frozen=True)
class LearningSignal:
    """The inputs that the policy loss needs in addition to the current log-probs, for the
    samples of this rank's share.
    """

    advantages: TokenTable
    reference: TokenTable | None
    """Log-probs under the reference model: the initial weights, or with LoRA the base model. None without a KL term."""
    proximal: TokenTable | None
    """Log-probs under the weights at the batch's start. None if they are not computed separately from
    the current log-probs."""

    @classmethod
    def of(
        cls,
        batch: TrainBatch,
        offsets: Offsets,
        algorithm: AlgorithmSpec,
        shares: Shares,
        *,
        reference: TokenTable | None,
        proximal: TokenTable | None,
    ) -> LearningSignal:
        """Compute the advantages of a rank's share of a batch, and return them together with `reference` and `proximal`.

        Collective: every rank must call this method with its share of the same batch.

        offsets: positions of the samples in the packed batch. shares: computes sums and maxima over all ranks.
        reference: log-probs of the reference model. proximal: log-probs of the weights at the batch's start.
        """
        trained = np.flatnonzero(batch.trainable)
        penalty = None
        if algorithm.kl.in_reward and reference is not None and batch.log_probs is not None:
            behaviour = torch.from_numpy(batch.log_probs[trained])
            coefficient, estimator = algorithm.kl.of_reward
            coefficient = coefficient if batch.kl_coefficient is None else batch.kl_coefficient
            penalty = coefficient * kl(estimator)(behaviour, reference.values[trained])
        compute = _users_advantages if is_user_function(_advantage(algorithm)) else _advantages
        advantages = TokenTable.zeros(batch, offsets)
        advantages.values[trained] = compute(batch, trained, penalty, algorithm, shares)
        return cls(advantages, reference, proximal)


def _advantages(
    batch: TrainBatch, trained: NDArray[np.int64], penalty: Tensor | None, algorithm: AlgorithmSpec, shares: Shares
) -> Tensor:
    """Return the advantages of the share's R trained tokens, (R,).

    trained: (R,) positions of the trained tokens among the share's response tokens. penalty: (R,) KL penalty of each
    trained token; None: no penalty.
    """
    rewards, group, valid = _scores(batch)
    held = batch.held_samples
    sample = torch.from_numpy(np.repeat(held, batch.response_lengths[held])[trained])
    baseline = None if batch.baseline is None else torch.from_numpy(batch.baseline)
    tokens = TrainedTokens(
        rewards,
        group,
        valid,
        _lengths(batch),
        sample,
        penalty,
        gamma=algorithm.gamma,
        lam=algorithm.lambda_,
        baseline=baseline,
    )
    return estimator(algorithm.advantage)(tokens, shares)


def _users_advantages(
    batch: TrainBatch, trained: NDArray[np.int64], penalty: Tensor | None, algorithm: AlgorithmSpec, shares: Shares
) -> Tensor:
    """Call the user's advantage function with the whole batch, and return its result for the share's R
    trained tokens, (R,).

    trained: (R,) positions of the trained tokens among the share's response tokens. penalty: (R,) KL penalty of each
    trained token; None: no penalty. Collective if there is a penalty.
    """
    rewards, group, valid = _scores(batch)
    packed_mask = batch.trainable if batch.whole_mask is None else batch.whole_mask
    starts, lengths = starts_of(batch.response_lengths), batch.response_lengths
    mask = np.zeros((batch.samples, int(lengths.max())), dtype=np.bool_)
    for row, start, length in zip(mask, starts, lengths, strict=True):
        row[:length] = packed_mask[start : start + length]
    held = batch.held_samples
    first = np.repeat(starts_of(lengths[held]), lengths[held])
    rows = torch.from_numpy(np.repeat(held, lengths[held])[trained])
    columns = torch.from_numpy(trained - first[trained])
    penalties = None
    if penalty is not None:
        penalties = torch.zeros(mask.shape)
        penalties[rows, columns] = penalty
        penalties = shares.sum(penalties)
    inputs = AdvantageInputs(
        rewards=rewards,
        group=group,
        mask=torch.from_numpy(mask),
        token_penalty=penalties,
        gamma=algorithm.gamma,
        lam=algorithm.lambda_,
        valid=valid,
        lengths=_lengths(batch),
    )
    return advantage_of(_advantage(algorithm))(inputs)[rows, columns]


def _scores(batch: TrainBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rewards, groups and validity of all N samples, (N,) each."""
    assert batch.rewards is not None
    assert batch.group is not None
    valid = np.ones(batch.samples, dtype=np.bool_) if batch.valid is None else batch.valid
    rewards, group, copied = (torch.from_numpy(np.array(values)) for values in (batch.rewards, batch.group, valid))
    return rewards, group, copied


def _lengths(batch: TrainBatch) -> Tensor:
    """Return the number of response tokens of all N samples, (N,)."""
    return torch.from_numpy(np.array(batch.response_lengths))


def objective(spec: TrainingSpec) -> Objective | None:
    """Return the settings of the policy objective, or None for SFT.

    Also imports the user's functions that the spec names. Raises ValueError, ImportError or AttributeError if a function
    in the spec does not exist.
    """
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
        tau_positive=algorithm.loss.tauPositive,
        tau_negative=algorithm.loss.tauNegative,
        max_divergence=algorithm.loss.maxDivergence,
    )


def _advantage(algorithm: AlgorithmSpec) -> str:
    return algorithm.advantageFunction or algorithm.advantage


def counts(batch: TrainBatch, part: NDArray[np.int64], max_tokens: int) -> GlobalCounts | None:
    """Return the numbers of trained tokens and sequences of one update, over all ranks, or None if no token trains.

    part: indices of the update's samples. max_tokens: the maximum response length,
    which becomes `GlobalCounts.max_tokens`.
    """
    tokens = batch.trained[part]
    if tokens.sum() == 0:
        return None
    return GlobalCounts(int(tokens.sum()), int((tokens > 0).sum()), max_tokens)
