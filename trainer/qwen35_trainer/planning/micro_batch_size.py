"""The largest micro-batch of a manifest."""

from __future__ import annotations

from dataclasses import dataclass

from qwen35_trainer.manifest.training import TrainingSpec


@dataclass(frozen=True)
class MicroBatchSize:
    """The largest micro-batch that a data-parallel rank computes, if its sequences are as long as the manifest allows."""

    tokens: float
    """Tokens with padding, of all ranks that share the sequences."""
    length: float
    scored: float
    """Tokens whose logits are computed."""
    count: int
    """Micro-batches of an update."""

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
