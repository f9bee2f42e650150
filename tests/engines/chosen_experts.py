"""Choices of experts for tests of router replay, and models of the library whose routers make these choices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from qwen35_trainer.data.expert_choices import NO_CHOICE, ReplayedChoices
from qwen35_trainer.engines.train_batch import TrainBatch


@dataclass(frozen=True)
class Recorded:
    """A source of choices, as replicas report them: the whole sequence in one part. None: they are lost."""

    choices: np.ndarray | None
    tokens: int

    def read(self) -> Sequence[tuple[np.ndarray, int]] | None:
        return None if self.choices is None else [(self.choices, self.tokens)]


def drawn(inputs: int, layers: int, experts: int, top_k: int, random: np.random.Generator) -> np.ndarray:
    """Return random choices of `top_k` different experts, (inputs, layers, top_k)."""
    return random.random((inputs, layers, experts)).argsort(axis=-1)[..., :top_k].astype(np.uint8)


def choices_for(batch: TrainBatch, layers: int, experts: int, *, top_k: int = 2, seed: int = 0) -> list[np.ndarray]:
    """Return random choices for each sample, (inputs, layers, k). Samples of a group with prompts of one length have the same
    choices for their prompts."""
    random, of_prompts, choices = np.random.default_rng(seed), dict[tuple[int, int], np.ndarray](), []
    for sample, (prompt, response) in enumerate(zip(batch.prompt_lengths, batch.response_lengths, strict=True)):
        group = sample if batch.group is None else int(batch.group[sample])
        own = drawn(int(prompt + response) - 1, layers, experts, top_k, random)
        own[:prompt] = of_prompts.setdefault((group, int(prompt)), own[:prompt].copy())
        choices.append(own)
    return choices


def recorded(batch: TrainBatch, choices: Sequence[np.ndarray | None]) -> tuple[Recorded, ...]:
    """Return the sources of a batch's choices."""
    lengths = batch.response_lengths.tolist()
    return tuple(Recorded(own, tokens) for own, tokens in zip(choices, lengths, strict=True))


@contextlib.contextmanager
def choosing(model: Any, choices: ReplayedChoices | np.ndarray | None) -> Iterator[None]:
    """Within the context, routers of one of the library's models choose these experts, (inputs, layers, k), for a single sequence.

    At NO_CHOICE the router chooses, and also for a last input without choices, which scores nothing. None: it chooses for all tokens.
    """
    gates = [] if choices is None else [layer.mlp.gate for layer in model.model.layers]

    def forward_of(gate: Any, number: int) -> Any:
        def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            assert choices is not None
            logits = F.linear(hidden.reshape(-1, hidden.shape[-1]), gate.weight)
            probabilities = logits.softmax(-1, dtype=torch.float32)
            own = probabilities.topk(gate.top_k, dim=-1).indices
            wanted = torch.from_numpy(np.array(choices[:, number], np.int64))
            wanted = F.pad(wanted, (0, 0, 0, len(logits) - len(wanted)), value=NO_CHOICE)
            chosen = torch.where(wanted == NO_CHOICE, own, wanted)
            weights = probabilities.gather(-1, chosen)
            return logits, weights / weights.sum(-1, keepdim=True), chosen

        return forward

    try:
        for number, gate in enumerate(gates):
            gate.forward = forward_of(gate, number)
        yield
    finally:
        for gate in gates:
            del gate.forward


@dataclass(frozen=True)
class LostOn:
    """A source that one rank cannot read."""

    rank: int
    source: Recorded

    def read(self) -> Sequence[tuple[np.ndarray, int]] | None:
        return None if dist.get_rank() == self.rank else self.source.read()
