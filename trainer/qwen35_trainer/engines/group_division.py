"""The division of groups whose samples share their prompt: which samples are in one micro-batch, and on which rank.

    group     p r r r r r                     one prompt, five responses
    parts     p r r r │ p r r                 each fits into a micro-batch, and has its own copy of the prompt
    ranks     parts, with nearly equal numbers of tokens
    micro     as many parts as fit; a prompt counts once for each part

A part is computed by one rank in one micro-batch. A group that fits into a micro-batch is one part, unless it has more
tokens than an equal share of a rank: then it is divided further, so that no rank waits for it. Every part computes the prompt
again, so a group whose responses are shorter than its prompt stays whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qwen35_trainer.engines.bin_packing import balance, first_fit


@dataclass(frozen=True)
class GroupParts:
    """The parts of all groups of an update."""

    samples: list[NDArray[np.int64]]
    """Indices of the samples of each part. They have one prompt."""
    tokens: NDArray[np.int64]
    """(parts,) number of tokens of each part: those of its responses, and once those of its prompt."""
    sequences: int
    """Maximum number of samples in a micro-batch. It has no effect if `max_tokens` is set."""
    max_tokens: int | None
    """Maximum number of tokens in a micro-batch. A part of one sample may be longer."""

    @classmethod
    def of(
        cls,
        prompts: NDArray[np.int64],
        responses: NDArray[np.int64],
        group: NDArray[np.int64],
        ranks: int,
        *,
        sequences: int,
        max_tokens: int | None,
    ) -> GroupParts:
        """Divide groups into parts that fit into a micro-batch.

        prompts, responses: number of tokens of the prompt and of the response of each sample. group: number of each
        sample's group, whose samples have one prompt. ranks: number of data-parallel ranks. sequences, max_tokens: as in
        this class.
        """
        _, first, members = np.unique(group, return_index=True, return_inverse=True)
        total = int(prompts[first].sum() + responses.sum())
        samples: list[NDArray[np.int64]] = []
        for number in range(len(first)):
            own = np.flatnonzero(members == number)
            own = own[np.argsort(-responses[own], kind="stable")]
            if max_tokens is None:
                count = -(-len(own) // min(sequences, -(-len(group) // ranks)))
                samples += np.array_split(own, count)
            else:
                prompt = int(prompts[first[number]])
                room = min(max_tokens, max(-(-total // ranks), 2 * prompt)) - prompt
                samples += first_fit(responses, own, max(0, room))
        tokens = [int(prompts[part[0]] + responses[part].sum()) for part in samples]
        return cls(samples, np.array(tokens, dtype=np.int64), sequences, max_tokens)

    def divide(self, ranks: int) -> list[NDArray[np.int64]]:
        """Return the indices of the samples of each rank."""
        return [self._joined(parts) for parts in self._parts_of_ranks(ranks)]

    def micro_batches(self, ranks: int) -> list[list[NDArray[np.int64]]]:
        """Return the micro-batches of each rank, as indices of samples. Ranks may have different numbers of micro-batches."""
        if self.max_tokens is None:
            sizes, limit = np.array([len(part) for part in self.samples], dtype=np.int64), self.sequences
        else:
            sizes, limit = self.tokens, self.max_tokens
        return [
            [self._joined(parts) for parts in first_fit(sizes, of_rank, limit)]
            for of_rank in self._parts_of_ranks(ranks)
        ]

    def _parts_of_ranks(self, ranks: int) -> list[NDArray[np.int64]]:
        return balance(self.tokens, np.argsort(-self.tokens, kind="stable"), ranks)

    def _joined(self, parts: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.concatenate([self.samples[part] for part in parts] or [np.empty(0, dtype=np.int64)])
