"""The probe of a publication: the trainer and each replica compute the log-probs of the same tokens with the same version.

    first prompts of the data ─► probe_sequences ─► trainer: log-probs ─► Probe ──with the version──► replica: log-probs ─► ProbeResult

A replica computes the log-probs with its own kernels, after it has put the version in service. Checksums prove that the
bytes arrived; the probe measures the train-inference mismatch, and so proves that the replica computes with these bytes what
the trainer computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qwen35_trainer.failure_reasons import FailureReason

PROBE_SEQUENCES, PROBE_TOKENS = 4, 256
"""Number of sequences of a probe, and maximum number of tokens of each sequence.

Together, the sequences are about as long as the prompts of one engine step.
"""
MIN_PROBE_TOKENS = 2
"""Minimum length of a sequence of a probe, in tokens.

A shorter one has no log-probs, because the first token has none.
"""


class LogProbsDiffer(RuntimeError):
    """The log-probs of one replica, or of all replicas, differ too much from the trainer's with the same weights."""

    failure = FailureReason.LOG_PROBS_DIFFER


@dataclass(frozen=True)
class ProbeResult:
    """The mean and the maximum absolute difference between a replica's and the trainer's log-probs, in nats.

    The mean and the maximum are taken over all tokens of a probe.
    """

    version: int
    mean: float
    """Mean of the absolute differences; infinite if one of them is not a number (NaN)."""
    maximum: float


@dataclass(frozen=True)
class Probe:
    """Token sequences, and the log-probs of their tokens that the trainer computed with one version, at temperature 1."""

    sequences: tuple[NDArray[np.int32], ...]
    """Token ids of each sequence, (T,), where T is the length of the sequence, at least MIN_PROBE_TOKENS."""
    log_probs: NDArray[np.float32]
    """Log-prob of each token given the tokens before it, (N,), for all sequences one after another.

    The first token of each sequence has no log-prob, so N is the sum of T - 1.
    """
    limit: float
    """Maximum mean difference, in nats. A replica with a higher one is lost (spec.publication.maxLogProbDifference)."""

    def failure(self, result: ProbeResult, cause: str) -> LogProbsDiffer:
        """Return the exception for a replica whose result is above the limit.

        cause: what is known of the cause, as text, such as which parameters differ from the published ones.
        """
        return LogProbsDiffer(
            f"with the weights of version {result.version}, its log-probs differ from the trainer's by {result.mean:.3g} nats "
            f"in the mean, and the limit is {self.limit:g} (spec.publication.maxLogProbDifference); {cause}"
        )

    def result(self, log_probs: Sequence[NDArray[np.float32]], version: int) -> ProbeResult:
        """Compare a replica's log-probs with the trainer's, and return the differences.

        log_probs: (T - 1,) for each sequence of T tokens, in the order of `sequences`. version: the version with which
        the replica has computed them.
        """
        own = np.concatenate(list(log_probs)).astype(np.float64)
        apart = np.nan_to_num(np.abs(own - self.log_probs), nan=np.inf)
        return ProbeResult(version, float(apart.mean()), float(apart.max()))


def probe_sequences(prompts: Iterable[NDArray[np.int32]], max_length: int) -> tuple[NDArray[np.int32], ...]:
    """Return the sequences of a probe: the first tokens of some prompts, at most PROBE_TOKENS of each.

    These are the first PROBE_SEQUENCES prompts with at least MIN_PROBE_TOKENS tokens, or fewer if the data has fewer
    such prompts. A probe uses prompts because the model knows such text. Log-probs of random tokens are low, and
    rounding changes low log-probs more. prompts: token ids of prompts without pictures. max_length: maximum length of a
    prompt and its response together, in tokens; each sequence is shorter.
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
