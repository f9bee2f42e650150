"""The probe of a publication: the trainer and each replica compute the log-probs of the same tokens with the same version.

    first prompts of the data ─► probe_sequences ─► trainer: log-probs ─► Probe ──with the version──► replica: log-probs ─► ProbeResult

A replica computes them with its own kernels, after it has put the version in service. Checksums prove that the bytes arrived; the
probe proves that the replica computes with them what the trainer computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qwen35_trainer.failure_reasons import FailureReason

PROBE_SEQUENCES, PROBE_TOKENS = 4, 256
"""Number of sequences of a probe, and their maximum number of tokens: together about as long as the prompts of one engine step."""
MIN_PROBE_TOKENS = 2
"""Minimum length of a sequence of a probe: the first token has no log-prob."""


class LogProbsDiffer(RuntimeError):
    """A replica, or all of them, compute other log-probs than the trainer with the same version of the weights."""

    failure = FailureReason.LOG_PROBS_DIFFER


@dataclass(frozen=True)
class ProbeResult:
    """The absolute differences between a replica's and the trainer's log-probs, in nats, over all tokens of a probe."""

    version: int
    mean: float
    """Mean of the differences; infinite if one of them is not a number."""
    maximum: float


@dataclass(frozen=True)
class Probe:
    """Token sequences, and their log-probs under the trainer's weights of a version, at temperature 1."""

    sequences: tuple[NDArray[np.int32], ...]
    """Each (T,) token ids, T ≥ MIN_PROBE_TOKENS."""
    log_probs: NDArray[np.float32]
    """Log-prob of each token given those before it, without the first token of each sequence, for one sequence after another."""
    limit: float
    """Mean difference, in nats, above which a replica is lost (spec.publication.maxLogProbDifference)."""

    def failure(self, result: ProbeResult, cause: str) -> LogProbsDiffer:
        """Return the error of a replica whose result is above the limit. cause: which parameters are wrong, as text."""
        return LogProbsDiffer(
            f"with the weights of version {result.version}, its log-probs differ from the trainer's by {result.mean:.3g} nats "
            f"in the mean, and the limit is {self.limit:g} (spec.publication.maxLogProbDifference); {cause}"
        )

    def result(self, log_probs: Sequence[NDArray[np.float32]], version: int) -> ProbeResult:
        """Compare the log-probs of a replica, (T - 1,) for each sequence, with those of the trainer."""
        own = np.concatenate(list(log_probs)).astype(np.float64)
        apart = np.nan_to_num(np.abs(own - self.log_probs), nan=np.inf)
        return ProbeResult(version, float(apart.mean()), float(apart.max()))


def probe_sequences(prompts: Iterable[NDArray[np.int32]], max_length: int) -> tuple[NDArray[np.int32], ...]:
    """Return the beginnings of the first prompts that are long enough; empty if none is.

    Prompts are text that the model knows. Log-probs of random tokens are low, and rounding changes low log-probs more.
    prompts: without pictures. max_length: maximum length of a prompt and its response together, in tokens.
    """
    # One token less than the maximum: vLLM generates a token after each prompt.
    length = min(PROBE_TOKENS, max_length - 1)
    chosen: list[NDArray[np.int32]] = []
    for prompt in prompts:
        if len(chosen) == PROBE_SEQUENCES:
            break
        if min(len(prompt), length) >= MIN_PROBE_TOKENS:
            chosen.append(prompt[:length].copy())
    return tuple(chosen)
