"""The size of the largest micro-batch of a manifest."""

from __future__ import annotations

from dataclasses import dataclass

from qwen35_trainer.manifest.training import TrainingSpec


@dataclass(frozen=True)
class MicroBatchSize:
    """The largest micro-batch of a data-parallel rank, if all sequences have the maximum length of the manifest."""

    tokens: float
    """Number of tokens, with padding, on all context-parallel ranks together."""
    length: float
    """Number of tokens of one sequence."""
    scored: float
    """Number of tokens whose logits are computed: those of responses."""
    count: int
    """Number of micro-batches that the rank computes in an update."""

    @classmethod
    def of(cls, spec: TrainingSpec) -> MicroBatchSize:
        batch, data = spec.train.batch, spec.data
        # The last token of a response is not an input: nothing is predicted after it.
        length = data.maxPromptTokens + data.maxResponseTokens - 1
        share = -(-spec.samples_per_update // spec.data_parallel)
        if batch.dynamicMicroBatches:
            budget = batch.maxTokensPerDevice * spec.train.parallelism.context
            tokens = min(budget, length * share)
            scored = tokens * data.maxResponseTokens / length
            return cls(tokens, length, scored, max(1, round(share * length / budget)))
        sequences = min(batch.microBatchSequences, share)
        scored = sequences * data.maxResponseTokens
        return cls(sequences * length, length, scored, -(-share // sequences))
