"""The size of the largest micro-batch of a manifest."""

from __future__ import annotations

from dataclasses import dataclass

from qwen35_trainer.manifest.training import TrainingSpec


@dataclass(frozen=True)
class MicroBatchSize:
    """The largest micro-batch of a data-parallel rank, if all sequences have the maximum length of the manifest."""

    tokens: float
    """Number of tokens, with padding, on all context-parallel ranks together. A shared prompt counts once."""
    length: float
    """Number of tokens of one sequence."""
    scored: float
    """Number of tokens whose logits are computed: those of responses."""
    count: int
    """Number of micro-batches that the rank computes in an update."""
    prompts: float
    """Number of tokens of prompts, with padding, on all context-parallel ranks together. A shared prompt counts once."""

    @classmethod
    def of(cls, spec: TrainingSpec) -> MicroBatchSize:
        batch, data = spec.train.batch, spec.data
        # The last token of a response is not an input: nothing is predicted after it.
        length = data.maxPromptTokens + data.maxResponseTokens - 1
        share = -(-spec.samples_per_update // spec.data_parallel)
        group = spec.algorithm.groupSize if batch.sharePrompts else 1
        if batch.dynamicMicroBatches:
            budget = batch.maxTokensPerDevice * spec.train.parallelism.context
            sharing = max(1, min(group, (budget - data.maxPromptTokens) // data.maxResponseTokens))
            per_sample = length - data.maxPromptTokens * (sharing - 1) / sharing
            tokens = min(budget, per_sample * share)
            scored = tokens * data.maxResponseTokens / per_sample
            prompts = tokens * data.maxPromptTokens / sharing / per_sample
            return cls(tokens, length, scored, max(1, round(share * per_sample / budget)), prompts)
        sequences = min(batch.microBatchSequences, share)
        copies = sequences - -(-sequences // group)
        scored, prompts = sequences * data.maxResponseTokens, (sequences - copies) * data.maxPromptTokens
        tokens = sequences * length - copies * data.maxPromptTokens
        return cls(tokens, length, scored, -(-share // sequences), prompts)
