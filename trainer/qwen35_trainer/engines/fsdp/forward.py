"""From packed samples to log-probabilities of their response tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qwen35_trainer.engines.batch import TrainBatch
from qwen35_trainer.models.qwen3_5 import HFModule


@dataclass(frozen=True)
class Padded:
    """n samples side by side: L input positions, T response positions; padding is to the right."""

    tokens: Tensor
    """(n, L) int64, prompt and response without its last token, which predicts nothing."""
    targets: Tensor
    """(n, T) int64 response tokens."""
    positions: Tensor
    """(n, T) int64: the input position whose logits predict each target."""
    mask: Tensor
    """(n, T) bool, tokens that enter the loss."""
    log_probs: Tensor | None
    """(n, T) float32 of the behaviour policy."""


@dataclass(frozen=True)
class Offsets:
    """Where each sample starts in the packed arrays."""

    prompts: NDArray[np.int64]
    responses: NDArray[np.int64]

    @classmethod
    def of(cls, batch: TrainBatch) -> Offsets:
        prompts, responses = (np.cumsum(n) - n for n in (batch.prompt_lengths, batch.response_lengths))
        return cls(prompts, responses)


def pad(batch: TrainBatch, offsets: Offsets, samples: NDArray[np.int64], device: torch.device) -> Padded:
    """Unpack `samples` of a batch side by side. No samples give one empty row, which trains nothing."""
    if len(samples) == 0:
        zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
        return Padded(zero, zero, zero, zero.bool(), None if batch.log_probs is None else zero.float())
    prompt, response = batch.prompt_lengths[samples], batch.response_lengths[samples]
    total, width = int((prompt + response).max()), int(response.max())
    tokens = np.zeros((len(samples), total), dtype=np.int64)
    targets = np.zeros((len(samples), width), dtype=np.int64)
    mask = np.zeros((len(samples), width), dtype=np.bool_)
    behaviour = np.zeros((len(samples), width), dtype=np.float32)
    for row, sample in enumerate(samples):
        p, r = int(prompt[row]), int(response[row])
        words = slice(offsets.responses[sample], offsets.responses[sample] + r)
        tokens[row, :p] = batch.prompts[offsets.prompts[sample] : offsets.prompts[sample] + p]
        tokens[row, p : p + r] = targets[row, :r] = batch.responses[words]
        mask[row, :r] = batch.trainable[words]
        if batch.log_probs is not None:
            behaviour[row, :r] = batch.log_probs[words]
    positions = np.minimum(prompt[:, None] - 1 + np.arange(width), total - 2)

    def on_device(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return Padded(
        tokens=on_device(tokens[:, : total - 1]),
        targets=on_device(targets),
        positions=on_device(positions),
        mask=on_device(mask),
        log_probs=None if batch.log_probs is None else on_device(behaviour),
    )


def response_log_probs(
    model: HFModule, padded: Padded, temperature: float, *, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each target under the tempered model, and the entropy of its distribution (nats), (n, T)."""
    first = int(padded.positions.min())
    length = padded.tokens.shape[1]
    logits = model(input_ids=padded.tokens, use_cache=False, logits_to_keep=length - first).logits
    index = (padded.positions - first).unsqueeze(-1).expand(-1, -1, logits.shape[-1])
    log_softmax = (logits.gather(1, index).float() / temperature).log_softmax(-1)
    chosen = log_softmax.gather(-1, padded.targets.unsqueeze(-1)).squeeze(-1)
    return chosen, -(log_softmax.exp() * log_softmax).sum(-1) if with_entropy else None
