"""Batches of supervised fine-tuning: straight from the data, in epoch order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qwen35_trainer.data.prompts import PromptOrder
from qwen35_trainer.data.sft import SupervisedExample
from qwen35_trainer.engines.batch import TrainBatch
from qwen35_trainer.runtime.assembly import assemble_supervised


@dataclass(frozen=True)
class Supervised:
    """Examples to train on. Batch b is positions b·size … of the epoch order: resuming needs its number alone."""

    examples: Sequence[SupervisedExample]
    held_out: Sequence[SupervisedExample]
    order: PromptOrder
    size: int
    """Examples in a batch."""
    updates: int
    """Optimizer steps in a batch."""

    def batch(self, number: int) -> TrainBatch:
        positions = range(number * self.size, (number + 1) * self.size)
        return assemble_supervised([self.examples[self.order.prompt_index(at)] for at in positions], self.updates)

    @property
    def validation(self) -> TrainBatch | None:
        return assemble_supervised(self.held_out, updates=1) if self.held_out else None
