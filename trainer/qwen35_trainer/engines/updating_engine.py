"""The part of training that all engines share: learning signal, loss, metrics, skipped steps. An engine implements the hooks.

    batch (this rank's share) ─► signal: advantages; log-probs of other policies ◄── `_score`
                              ─► for each update: micro-batches of this rank ─► `_forward_backward` ─► sums of metrics
                                    scores of each ─► `_losses` ─► loss ─► backward   (the engine calls `_losses`)
                                                  ─► `_step`: clip, optimizer step (skipped if not finite)

Losses are divided by counts over all ranks, so the step depends neither on the number of ranks nor on the micro-batch
size. The loss of the update is the sum of all ranks' losses. Each engine sums gradients over ranks in its own way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from qwen35_trainer.algorithms.aggregation import GlobalCounts
from qwen35_trainer.algorithms.objective import needs_proximal, policy_objective, supervised_objective
from qwen35_trainer.data.expert_choices import ChoiceSource, RecordedParts
from qwen35_trainer.engines.batch_division import BatchDivision
from qwen35_trainer.engines.batch_ranks import BatchRanks
from qwen35_trainer.engines.learning_signal import LearningSignal, counts, objective
from qwen35_trainer.engines.micro_batch import Offsets, Responses, TokenTable
from qwen35_trainer.engines.skipped_updates import SkippedUpdates
from qwen35_trainer.engines.train_batch import TrainBatch, starts_of
from qwen35_trainer.engines.train_engine import UpdateMetrics
from qwen35_trainer.manifest import TrainingSpec
from qwen35_trainer.manifest.train import RouterSpec
from qwen35_trainer.models.qwen3_5.head import TokenScores
from qwen35_trainer.weights.host_blocks import HostBlocks
from qwen35_trainer.weights.memory_change import MemoryChange
from qwen35_trainer.weights.parked_tensors import ParkedTensors, bytes_on

type ScoredPolicy = Literal["Current", "Reference"]
"""The policy whose log-probs are computed: the weights that train, or the reference model of the KL term."""


@dataclass(frozen=True)
class UpdateStep:
    """The data of one optimizer step that all of its micro-batches need."""

    batch: TrainBatch
    offsets: Offsets
    counts: GlobalCounts
    inputs: int
    """Number of input tokens of the model in this step, over all ranks."""
    signal: LearningSignal | None
    """Advantages and log-probs of other policies; None for SFT."""
    temperature: float
    """Temperature by which logits are divided before log-probs and entropies are computed."""
    with_entropy: bool
    """Whether `_losses` needs the entropies of the scored tokens."""


class UpdatingEngine(ABC):
    """One rank of training. It needs an initialised process group.

    ranks: the number of this rank and its share of batches. device: device of the tensors that this class sums.
    """

    def __init__(self, spec: TrainingSpec, ranks: BatchRanks, device: torch.device) -> None:
        self._spec, self._device = spec, device
        self._ranks = ranks
        self._division = BatchDivision.of(spec, ranks.data_shares)
        self._objective = objective(spec)
        self._replays = spec.mode != "SFT" and spec.train.router.replay
        self._uses_kl = spec.mode != "SFT" and spec.algorithm.kl.placement != "None"
        self._has_router_losses = spec.train.router.loadBalancingLoss > 0 or spec.train.router.zLoss > 0
        self._skipped_updates = SkippedUpdates(sft=spec.mode == "SFT")
        self._host_blocks = HostBlocks.of(device)
        self._parked: list[ParkedTensors] = []  # while the engine sleeps

    @abstractmethod
    def _forward_backward(self, update: UpdateStep, shares: Sequence[NDArray[np.int64]]) -> dict[str, Tensor]:
        """Add up the gradients of this rank's micro-batches, and return the sums of their metrics, including the loss.

        shares: the samples of each micro-batch. An entry may be empty. Every rank has the same number of entries. The
        hook computes the loss and the metrics of each micro-batch by `_losses`. The next `_step` must use the gradient
        of the sum of the losses of all ranks' micro-batches.

        Returns 0-dimensional tensors; all ranks return the same names in the same order. With pipeline stages, only the
        last stage computes the sums, and sends them to the other stages.
        """

    @abstractmethod
    def _step(self, learning_rate: float) -> float:
        """Clip the gradient, update the parameters if the gradient's norm is finite, and drop the gradient.

        Returns the norm before clipping, the same on every rank. If the norm is infinite or NaN, parameters and
        optimizer state do not change: a step would make every weight NaN.
        """

    @abstractmethod
    def _score(self, policy: ScoredPolicy, batch: TrainBatch, offsets: Offsets, temperature: float) -> TokenTable:
        """Return the log-probs of the trained tokens of this rank's share. All other tokens have 0.

        Collective. All ranks that compute the share get the table.
        """

    @abstractmethod
    def _held_tensors(self) -> Iterable[Tensor]:
        """Return all tensors that this rank holds between two calls: of models, gradients and optimizers."""

    def _scratch_tensors(self) -> Iterable[Tensor]:
        """Return those of the held tensors whose values no later call uses."""
        return ()

    @property
    @abstractmethod
    def _layers(self) -> int:
        """Number of decoder layers of the whole model."""

    @property
    @abstractmethod
    def _experts(self) -> int:
        """Number of experts of a layer. The model must be a mixture of experts."""

    def train(self, batch: TrainBatch, learning_rates: Sequence[float]) -> list[UpdateMetrics]:
        self._check_share(batch)
        batch = self._with_choices(batch)
        offsets = Offsets.of(batch)
        signal = None if batch.rewards is None else self._signal(batch, offsets)
        return [
            self._update(batch, offsets, part, signal, rate)
            for part, rate in zip(batch.parts, learning_rates, strict=True)
        ]

    def negative_log_likelihood(self, batch: TrainBatch) -> float:
        self._check_share(batch)
        table = self._score("Current", batch, Offsets.of(batch), 1.0)
        return -float(self._ranks.sum(table.values.double().sum())) / max(1, int(batch.trained.sum()))

    def log_probs(self, batch: TrainBatch) -> NDArray[np.float32]:
        self._check_share(batch)
        table = self._score("Current", batch, Offsets.of(batch), 1.0)
        lengths, held = batch.response_lengths, batch.held_samples
        whole = torch.zeros(int(lengths.sum()))
        for start, sample in zip(starts_of(lengths)[held], held, strict=True):
            of_share = int(table.starts[sample])
            whole[start : start + lengths[sample]] = table.values[of_share : of_share + lengths[sample]]
        summed: NDArray[np.float32] = self._ranks.sum(whole).numpy()
        return summed

    def sleep(self) -> MemoryChange:
        held = list(self._held_tensors())
        before = bytes_on(held, self._device)
        self._parked = [
            ParkedTensors(self._scratch_tensors(), self._device, keep_values=False),
            ParkedTensors(held, self._device, blocks=self._host_blocks),
        ]
        return MemoryChange(before, bytes_on(held, self._device))

    def wake(self) -> None:
        for parked in self._parked:
            parked.restore()
        self._parked = []

    def _with_choices(self, batch: TrainBatch) -> TrainBatch:
        """Read the experts to replay for this rank's share, and return the batch with them. Collective with router replay.

        Of ranks that compute a share together, each reads the choices. If one of them cannot read those of a sample, all
        of them let their routers choose for the sample.
        """
        if not self._replays:
            return batch
        sources = batch.choices or (None,) * batch.samples
        held, parts = set(batch.held_samples.tolist()), [self._choices_of(source) for source in sources]
        lacks = [float(sample in held and own is None) for sample, own in enumerate(parts)]
        agreed = zip(parts, self._ranks.max(torch.tensor(lacks)).tolist(), strict=True)
        return replace(batch, choices=None, replayed=tuple(None if lacking else own for own, lacking in agreed))

    def _choices_of(self, source: ChoiceSource | None) -> RecordedParts | None:
        """Read the experts to replay for a sample. None if it has none, they cannot be read, or one of them does not exist."""
        parts = None if source is None else source.read()
        if not parts or any(table.size and int(table.max()) >= self._experts for table, _ in parts):
            return None
        return parts

    def _replayed_tokens(self, batch: TrainBatch, part: NDArray[np.int64]) -> int:
        """Return for how many input tokens of this rank's samples of an update the rollout has recorded the experts."""
        assert batch.replayed is not None
        of_samples = (batch.replayed[sample] for sample in np.intersect1d(part, batch.held_samples))
        return sum(len(table) for parts in of_samples if parts is not None for table, _ in parts)

    def _update(
        self,
        batch: TrainBatch,
        offsets: Offsets,
        part: NDArray[np.int64],
        signal: LearningSignal | None,
        learning_rate: float,
    ) -> UpdateMetrics:
        divisors = counts(batch, part, self._spec.data.maxResponseTokens)
        if divisors is None:
            # Without a token to train the step is skipped: Adam would still move the weights by its momentum.
            return UpdateMetrics(0.0, 0.0, learning_rate, 0, {})
        algorithm = self._spec.algorithm
        update = UpdateStep(
            batch,
            offsets,
            divisors,
            int((batch.lengths[part] - 1).sum()),
            signal,
            self._spec.rollout.temperature if self._spec.rollout and signal else 1.0,
            signal is not None and (algorithm.reportEntropy or algorithm.entropyCoefficient != 0),
        )
        totals = self._forward_backward(update, self._plan(batch, part))
        if self._replays:  # multiplied by the number of trained tokens, because metrics are divided by it
            share = self._replayed_tokens(batch, part) / update.inputs * divisors.tokens
            totals["replayed_token_share"] = torch.tensor(share, device=self._device)
        norm = self._step(learning_rate)
        self._skipped_updates.add(norm)
        metrics = self._metrics(totals, norm, learning_rate)
        if self._division.share_prompts:
            saved = self._division.saved_tokens(batch, part) / update.inputs
            metrics = replace(metrics, means={**metrics.means, "saved_token_share": saved})
        return metrics

    def _metrics(self, totals: Mapping[str, Tensor], norm: float, learning_rate: float) -> UpdateMetrics:
        """Sum the metrics of this rank over all shares, and return them. Collective; every rank
        gets the same result.
        """
        summed = torch.stack([value.float() for value in totals.values()]) * self._ranks.adds_to_sums
        dist.all_reduce(summed)
        sums = dict(zip(totals, summed.tolist(), strict=True))
        tokens, loss = sums.pop("tokens"), sums.pop("loss")
        means = {name: value / tokens for name, value in sums.items()}
        return UpdateMetrics(loss, norm, learning_rate, round(tokens), means)

    def _losses(
        self, update: UpdateStep, samples: NDArray[np.int64], responses: Responses, scores: TokenScores
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a micro-batch's part of the loss, including the losses of routers that `scores` has, and its part of the metrics.

        scores: tables with one row per sample, like those in `responses`. The metrics contain the loss, detached.
        """
        loss, metrics = self._objective_of(update, samples, responses, scores)
        if scores.router_losses is not None:
            loss = loss + part_of_routers(self._spec.train.router, update.inputs, scores.router_losses)
            metrics |= self._router_metrics(update, scores.router_losses)
        return loss, metrics | {"loss": loss.detach()}

    def _router_metrics(self, update: UpdateStep, losses: Tensor) -> dict[str, Tensor]:
        """Return the part that `losses`, as in `part_of_routers`, have in the update's metrics."""
        # Per layer; multiplied by the number of tokens, because metrics are divided by it.
        balance, z = losses.detach() / update.inputs * update.counts.tokens / self._layers
        return {"router_load_balancing": balance, "router_z": z}

    def _objective_of(
        self, update: UpdateStep, samples: NDArray[np.int64], responses: Responses, scores: TokenScores
    ) -> tuple[Tensor, dict[str, Tensor]]:
        signal, mask, log_probs = update.signal, responses.mask, scores.log_probs
        if signal is None:
            return supervised_objective(log_probs, mask, update.counts)
        assert self._objective is not None
        assert responses.log_probs is not None
        proximal = None if signal.proximal is None else signal.proximal.rows(samples, mask)
        if proximal is None and needs_proximal(self._objective.correction):
            proximal = log_probs.detach()  # one step per batch: the weights at its start are the current ones
        return policy_objective(
            self._objective.adapted(update.batch.kl_coefficient),
            log_probs=log_probs,
            entropy=scores.entropy,
            behaviour_log_probs=responses.log_probs,
            proximal_log_probs=proximal,
            reference_log_probs=None if signal.reference is None else signal.reference.rows(samples, mask),
            advantages=signal.advantages.rows(samples, mask),
            mask=mask,
            counts=update.counts,
        )

    def _signal(self, batch: TrainBatch, offsets: Offsets) -> LearningSignal:
        assert self._objective is not None
        assert self._spec.rollout is not None
        temperature, reference, proximal = self._spec.rollout.temperature, None, None
        if self._uses_kl:
            # Its routers choose: its weights are not those with which the rollout chose.
            reference = self._score("Reference", replace(batch, replayed=None), offsets, temperature)
        if batch.updates > 1 and self._objective.correction != "None":
            proximal = self._score("Current", batch, offsets, temperature)
        algorithm = self._spec.algorithm
        return LearningSignal.of(batch, offsets, algorithm, self._ranks, reference=reference, proximal=proximal)

    def _plan(self, batch: TrainBatch, part: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Return the micro-batches of this rank for one update, as indices of samples. part: indices of
        the update's samples.
        """
        return self._division.micro_batches(batch, part)[self._ranks.data_share]

    def _check_share(self, batch: TrainBatch) -> None:
        """Raise ValueError if `batch` is not this rank's share, because sums over all shares would then be wrong."""
        if self._ranks.data_shares == 1:
            expected = np.arange(batch.samples)
        else:
            expected = self._division.samples(batch)[self._ranks.data_share]
        if not np.array_equal(batch.held_samples, expected):
            share = f"share {self._ranks.data_share} of {self._ranks.data_shares}"
            raise ValueError(f"rank {self._ranks.rank} got other samples than those of {share}")


def part_of_routers(router: RouterSpec, inputs: int, losses: Tensor) -> Tensor:
    """Return what the losses of routers add to the loss of an update.

    router: their weights. inputs: number of input tokens of the update, over all ranks. losses: (2,) load-balancing loss and z loss,
    summed over tokens and layers (`models/qwen3_5/router.py`).
    """
    means = losses / inputs
    return router.loadBalancingLoss * means[0] + router.zLoss * means[1]
