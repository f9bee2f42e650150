"""Micro-batches: from samples of a batch to the scores of their response tokens.

    TrainBatch ─► micro_batch ─► ModelInput ─► model ─► scores of the trained tokens ─► tables (n, T)
                     └─ which rows of the input predict which cells of the tables ──────────┘

Tables have one row per sample and one column per response token; rows are padded on the right. Padded and packed model
inputs give the same tables, so the objective is the same for both. The same holds if samples of a group share their
prompt in the packed row (`models/qwen3_5/shared_prompts.py`). A `TokenTable` stores one number for each response
token of a rank's share of the batch, without padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qwen35_trainer.data.expert_choices import NO_CHOICE, replayed
from qwen35_trainer.data.picture_arrays import PictureArrays
from qwen35_trainer.engines.train_batch import TrainBatch, starts_of
from qwen35_trainer.models.qwen3_5 import HFModule
from qwen35_trainer.models.qwen3_5.classes import HFConfig
from qwen35_trainer.models.qwen3_5.head import TokenScores
from qwen35_trainer.models.qwen3_5.inputs import ModelInput
from qwen35_trainer.models.qwen3_5.kept_logits import KeptLogits
from qwen35_trainer.models.qwen3_5.multimodal import multimodal_input
from qwen35_trainer.models.qwen3_5.shared_prompts import SharedPrompts


@dataclass(frozen=True)
class Offsets:
    """The positions at which each of N samples begins in the packed arrays of a batch.

    prompts: (N,) position of the sample's first prompt token in `TrainBatch.prompts`.
    responses: (N,) position of the sample's first response token in `TrainBatch.responses`.

    A share of a batch contains the tokens of only some of the N samples. The position of every other sample is the
    length of the array.
    """

    prompts: NDArray[np.int64]
    responses: NDArray[np.int64]

    @classmethod
    def of(cls, batch: TrainBatch) -> Offsets:
        held = batch.held_samples
        prompts, responses = (np.full(batch.samples, packed.size) for packed in (batch.prompts, batch.responses))
        prompts[held] = starts_of(batch.prompt_lengths[held])
        responses[held] = starts_of(batch.response_lengths[held])
        return cls(prompts, responses)


@dataclass(frozen=True)
class Responses:
    """Loss masks and log-probs of the responses of n samples, as tables (n, T). T is the length of the longest response."""

    mask: Tensor
    """(n, T) bool, true for tokens that enter the loss."""
    log_probs: Tensor | None
    """(n, T) float32 log-probs under the behaviour policy; None for supervised samples."""

    @classmethod
    def of(cls, batch: TrainBatch, offsets: Offsets, samples: NDArray[np.int64]) -> Responses:
        """Copy masks and log-probs of the responses of `samples` into tables in host memory.

        If `samples` is empty, the tables are (1, 1) with one token that does not train.
        """
        lengths = batch.response_lengths[samples]
        mask = np.zeros((max(1, len(samples)), int(lengths.max(initial=1))), dtype=np.bool_)
        log_probs = np.zeros(mask.shape, dtype=np.float32)
        for row, (start, length) in enumerate(zip(offsets.responses[samples], lengths, strict=True)):
            mask[row, :length] = batch.trainable[start : start + length]
            if batch.log_probs is not None:
                log_probs[row, :length] = batch.log_probs[start : start + length]
        return cls(torch.from_numpy(mask), None if batch.log_probs is None else torch.from_numpy(log_probs))

    def to(self, device: torch.device) -> Responses:
        return Responses(self.mask.to(device), None if self.log_probs is None else self.log_probs.to(device))


@dataclass(frozen=True)
class MicroBatch:
    """The n samples of one forward and backward pass, with up to T response tokens each and R trained tokens in all."""

    inputs: ModelInput
    """The tokens of prompts and responses. The last token of each response is left out, because no token
    after it is scored."""
    lengths: Tensor
    """(n,) int64: number of tokens of each sample in the input, with its prompt even if samples share it; 0 for
    the placeholder token of an empty micro-batch."""
    rows: Tensor
    """(R,) int64: indices into the flattened input. At `rows[i]`, the model predicts the i-th trained token."""
    targets: Tensor
    """(R,) int64: ids of the trained tokens."""
    cells: Tensor
    """(R,) int64: indices of the trained tokens in the flattened table (n, T) of the responses."""
    responses: Responses
    kept: KeptLogits | None = None
    """The tokens over which the softmax of each of the R rows is taken; None: the whole vocabulary."""

    def table(self, values: Tensor) -> Tensor:
        """Return a table (n, T) with `values` at the R trained tokens, and 0 at all other tokens.

        values: (R,). n: samples of the micro-batch, T: response tokens.
        """
        shape = self.responses.mask.shape
        return values.new_zeros(shape.numel()).index_copy(0, self.cells, values).view(shape)


def micro_batch(
    batch: TrainBatch,
    offsets: Offsets,
    samples: NDArray[np.int64],
    config: HFConfig,
    *,
    packed: bool,
    share_prompts: bool = False,
    with_patches: bool = True,
    device: torch.device,
) -> MicroBatch:
    """Build the micro-batch of `samples`, in one packed row or in padded rows.

    config: the configuration of the model, used for samples with pictures. share_prompts: whether the samples of a group
    share the tokens of their prompt in the packed row. with_patches: whether the input has the pictures, or only the positions that
    follow from them.

    If `samples` is empty, the input is one placeholder token. If no token of the samples trains, one token is
    still scored. In both cases the mask excludes the token from the loss. The rank then runs the same collectives
    as all other ranks.
    """
    responses, kept = Responses.of(batch, offsets, samples), None
    if len(samples) == 0:
        placeholder = torch.zeros(1, dtype=torch.int64)
        inputs = ModelInput.of_text([placeholder], packed=packed, device=device)
        input_lengths = rows = targets = cells = placeholder
    else:
        shared = _shared_prompts(batch, offsets, samples) if share_prompts else None
        inputs = _replaying(
            _inputs(batch, offsets, samples, config, shared, packed=packed, with_patches=with_patches, device=device),
            batch,
            samples,
        )
        mask = responses.mask.numpy()
        row, column = (mask if mask.any() else np.arange(mask.size).reshape(mask.shape) == 0).nonzero()
        lengths = batch.lengths[samples] - 1
        starts = np.cumsum(lengths) - lengths if packed else np.arange(len(samples)) * inputs.tokens.shape[1]
        rows = torch.from_numpy(starts[row] + batch.prompt_lengths[samples][row] - 1 + column)
        if shared is not None:
            rows = shared.places[rows]
        tokens = offsets.responses[samples][row] + column
        targets = torch.from_numpy(batch.responses[tokens].astype(np.int64))
        kept = None if batch.candidates is None else KeptLogits(batch.candidates.take(tokens), device)
        cells = torch.from_numpy(row * mask.shape[1] + column)
        input_lengths = torch.from_numpy(lengths)
    return MicroBatch(
        inputs,
        lengths=input_lengths.to(device),
        rows=rows.to(device),
        targets=targets.to(device),
        cells=cells.to(device),
        responses=responses.to(device),
        kept=kept,
    )


def _shared_prompts(batch: TrainBatch, offsets: Offsets, samples: NDArray[np.int64]) -> SharedPrompts | None:
    """Return which of the samples share a prompt; None: no samples do. Samples without groups share no prompt."""
    if batch.group is None:
        return None
    first: dict[int, int] = {}
    leaders = [first.setdefault(group, i) for i, group in enumerate(batch.group[samples].tolist())]
    lengths = batch.prompt_lengths[samples]
    prompts = [batch.prompts[start : start + n] for start, n in zip(offsets.prompts[samples], lengths, strict=True)]
    for prompt, leader in zip(prompts, leaders, strict=True):
        assert np.array_equal(prompt, prompts[leader]), "samples of a group have different prompts"
    return SharedPrompts.of(lengths.tolist(), (batch.lengths[samples] - 1).tolist(), leaders)


def _inputs(
    batch: TrainBatch,
    offsets: Offsets,
    samples: NDArray[np.int64],
    config: HFConfig,
    shared: SharedPrompts | None,
    *,
    packed: bool,
    with_patches: bool,
    device: torch.device,
) -> ModelInput:
    sequences, written = [], []
    for sample in samples:
        start, first = offsets.prompts[sample], offsets.responses[sample]
        prompt = batch.prompts[start : start + batch.prompt_lengths[sample]]
        response = slice(first, first + batch.response_lengths[sample] - 1)
        sequences.append(torch.from_numpy(np.concatenate((prompt, batch.responses[response])).astype(np.int64)))
        # A placeholder that the model generated stands for no picture. In supervised samples, later turns of a user may show some.
        learned = batch.trainable[response] if batch.log_probs is None else np.ones_like(batch.trainable[response])
        written.append(torch.from_numpy(np.concatenate((np.zeros(len(prompt), dtype=np.bool_), learned))))
    if batch.pictures is None:
        inputs = ModelInput.of_text(sequences, packed=packed, device=device)
        return inputs if shared is None else inputs.sharing(shared)
    pictures: list[PictureArrays | None] = []
    for i, sample in enumerate(samples):
        source = batch.pictures[sample]
        if shared is not None and shared.repeats_prompt(i):
            pictures.append(pictures[shared.leaders[i]])
        else:
            pictures.append(None if source is None else source.read())
    return multimodal_input(
        sequences,
        pictures,
        config,
        written=written,
        shared=shared,
        packed=packed,
        with_patches=with_patches,
        device=device,
    )


def _replaying(inputs: ModelInput, batch: TrainBatch, samples: NDArray[np.int64]) -> ModelInput:
    """Return `inputs` with the experts to replay, if one of the samples has some."""
    if batch.replayed is None or not (present := [parts for n in samples if (parts := batch.replayed[n]) is not None]):
        return inputs
    shape, rows = present[0][0][0].shape[1:], []
    for sample in samples:
        parts, prompt, response = batch.replayed[sample], batch.prompt_lengths[sample], batch.response_lengths[sample]
        if parts is None:
            rows.append(torch.full((int(prompt + response) - 1, *shape), NO_CHOICE, dtype=torch.int16))
        else:
            rows.append(torch.from_numpy(replayed(parts, prompt=int(prompt), response=int(response))))
    return inputs.replaying(rows)


def response_scores(
    model: HFModule, micro: MicroBatch, temperature: float, *, with_entropy: bool, with_router: bool = False
) -> TokenScores:
    """Compute the log-probability of each trained token at `temperature`, and the entropy of its distribution, in nats.

    Under truncated sampling, log-probability and entropy are those of the distribution over the tokens that the sampler
    could have drawn. This holds for every policy: the current one, the one at the batch's start, and the reference model.
    Log-probabilities and entropies are float32 tables with one row per sample, and 0 for tokens that do not train.

    with_router: whether to compute the losses of the model's routers.
    """
    lengths = micro.lengths if with_router else None
    scores = model(micro.inputs, micro.rows, micro.targets, temperature, with_entropy, lengths, micro.kept)
    entropy = None if scores.entropy is None else micro.table(scores.entropy)
    return TokenScores(micro.table(scores.log_probs), entropy, scores.router_losses)


@dataclass(frozen=True)
class TokenTable:
    """One number for each response token of a rank's share, packed like `TrainBatch.responses`, in host memory.

    A table takes 4 bytes per token of the share. A padded table (N, T) of the whole batch would take 4·N·T bytes on
    every rank, for N samples of up to T tokens.
    """

    values: Tensor
    """(R,) float32: one number for each response token, sample after sample."""
    starts: NDArray[np.int64]
    """(N,) position of each sample's first token in `values`. It has no meaning for samples
    that are not in the share."""
    lengths: NDArray[np.int64]
    """(N,) number of response tokens of each sample."""

    @classmethod
    def zeros(cls, batch: TrainBatch, offsets: Offsets) -> TokenTable:
        return cls(torch.zeros(batch.responses.size), offsets.responses, batch.response_lengths)

    def fill(self, samples: NDArray[np.int64], rows: Tensor) -> None:
        """Set the values of n samples. rows: (n, T), up to T values per sample, padded on the right, on any device."""
        source, target = rows.float().cpu().numpy(), self.values.numpy()
        for row, sample in enumerate(samples):
            start, length = self.starts[sample], self.lengths[sample]
            target[start : start + length] = source[row, :length]

    def rows(self, samples: NDArray[np.int64], like: Tensor) -> Tensor:
        """Return the values of n samples as rows that are padded with 0 on the right.

        like: a tensor (n, response tokens) that has the shape and the device of the result.
        """
        source, target = self.values.numpy(), np.zeros(tuple(like.shape), dtype=np.float32)
        for row, sample in enumerate(samples):
            start, length = self.starts[sample], self.lengths[sample]
            target[row, :length] = source[start : start + length]
        return torch.from_numpy(target).to(like.device)
