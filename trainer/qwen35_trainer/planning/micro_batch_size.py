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
    pictured: float
    """Maximum number of tokens that may be placeholders of pictures, on all context-parallel ranks together: those of prompts,
    of which a shared one counts once, and all tokens of supervised examples. Micro-batches with a token budget may consist of
    prompts, because responses may be short."""

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
            pictured = tokens if spec.mode == "SFT" else min(tokens, share * data.maxPromptTokens / sharing)
            return cls(tokens, length, scored, max(1, round(share * per_sample / budget)), pictured)
        sequences = min(batch.microBatchSequences, share)
        part = group // -(-group // sequences)  # the smallest part into which micro-batches divide a group
        copies = sequences - -(-sequences // part)
        scored, tokens = sequences * data.maxResponseTokens, sequences * length - copies * data.maxPromptTokens
        pictured = tokens if spec.mode == "SFT" else (sequences - copies) * data.maxPromptTokens
        return cls(tokens, length, scored, -(-share // sequences), pictured)
