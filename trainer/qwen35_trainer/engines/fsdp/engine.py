"""One rank of FSDP2 training.

    batch (this rank's share) ─► advantages of its tokens ─► for each update: micro-batches of this rank
                                                                    forward ─► objective ─► backward ─► reduce-scatter
                                                                  ─► clip ─► optimizer step (skipped if not finite)

Losses are divided by counts over all ranks, so the step depends neither on the number of ranks nor on the micro-batch
size. Gradients accumulate over micro-batches. They are reduced into the shards after each micro-batch, because
unsharded gradients would take 4 bytes per parameter on every rank, more than the weights. Only the sum over copies of
the model (HSDP) waits for the last micro-batch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qwen35_trainer.algorithms.aggregation import GlobalCounts
from qwen35_trainer.algorithms.objective import needs_proximal, policy_objective, supervised_objective
from qwen35_trainer.engines.batch_division import BatchDivision
from qwen35_trainer.engines.fsdp import lora, sharded_checkpoint
from qwen35_trainer.engines.fsdp.freezing import convert_frozen, freeze, without_tower
from qwen35_trainer.engines.fsdp.learning_signal import LearningSignal, counts, objective
from qwen35_trainer.engines.fsdp.loading import Origin, fill
from qwen35_trainer.engines.fsdp.micro_batch import (
    MicroBatch,
    Offsets,
    Responses,
    TokenTable,
    micro_batch,
    response_scores,
)
from qwen35_trainer.engines.fsdp.optimizer import Optimizers
from qwen35_trainer.engines.fsdp.published_shard import published_precision, published_shard
from qwen35_trainer.engines.fsdp.sharding import Ranks, shard
from qwen35_trainer.engines.train_batch import TrainBatch, starts_of
from qwen35_trainer.engines.train_engine import UpdateMetrics
from qwen35_trainer.failure_reasons import FailureReason
from qwen35_trainer.manifest import TrainingSpec
from qwen35_trainer.models.qwen3_5 import HFModule
from qwen35_trainer.models.qwen3_5.adapter import adapt
from qwen35_trainer.models.qwen3_5.family import text_config, text_model
from qwen35_trainer.models.qwen3_5.head import TokenScores
from qwen35_trainer.models.qwen3_5.packing import check_packing
from qwen35_trainer.models.qwen3_5.precision import PRECISIONS, stored_in
from qwen35_trainer.weights.adapters import SCALE
from qwen35_trainer.weights.staging import WeightShard

logger = logging.getLogger(__name__)

MAX_SKIPPED_UPDATES = 5
"""Number of consecutive updates with an infinite or NaN gradient after which the run ends, because it would never learn
again."""


class NotFinite(RuntimeError):
    """Gradients were infinite or NaN for `MAX_SKIPPED_UPDATES` consecutive updates."""

    failure = FailureReason.NOT_FINITE


class NotFiniteInSFT(NotFinite):
    """Gradients of SFT were infinite or NaN for `MAX_SKIPPED_UPDATES` consecutive updates.

    The run is not restarted after this error, because another attempt would train on the same examples.
    """

    failure = FailureReason.NOT_FINITE_IN_SFT


@dataclass(frozen=True)
class _Update:
    """Data of one optimizer step that all of its micro-batches need."""

    batch: TrainBatch
    offsets: Offsets
    counts: GlobalCounts
    inputs: int
    """Number of tokens that the model reads in the step, over all ranks."""
    signal: LearningSignal | None


class FSDPEngine:
    """One rank of FSDP2 training. It needs an initialised process group.

    origin: where the weights come from, the same on every rank. pictures: whether any rank's batches may contain
    pictures; without pictures the vision tower does not train. Raises ValueError if degrees of parallelism, frozen
    parts, adapters or router losses do not fit the model. Raises PackingInexact if packing changes the scores or gradients
    of sequences.
    """

    def __init__(self, origin: Origin, spec: TrainingSpec, device: torch.device, *, pictures: bool = True) -> None:
        self._spec, self._device, self._pictures = spec, device, pictures
        timeout = timedelta(seconds=spec.train.collectiveTimeoutSeconds)
        self._ranks = Ranks.of(spec.train.parallelism, device, timeout)
        self._division = BatchDivision.of(spec, self._ranks.data_shares)
        self._objective = objective(spec)
        self._reference: HFModule | None = None
        self._uses_kl = spec.mode != "SFT" and spec.algorithm.kl.placement != "None"
        if self._uses_kl and spec.train.lora is None:
            self._reference = self._load(origin, trained=False)
        self._model = self._load(origin, trained=True)
        self._trains_router = spec.train.router.loadBalancingLoss > 0 or spec.train.router.zLoss > 0
        if self._trains_router and not hasattr(text_config(self._model), "num_experts"):
            raise ValueError(f"spec.train.router: {type(self._model).__name__} has no router; remove its losses")
        if spec.train.batch.removePadding:
            check_packing(self._model)
        parked = spec.train.offload.optimizer and not spec.train.offload.parameters
        self._optimizers = Optimizers.of(self._model, spec.train.optimizer, torch.device("cpu") if parked else None)
        self._storage = dist.new_group(backend="gloo", timeout=timeout)
        self._writing: Future[Any] | None = None
        self._skipped_updates = 0

    def train(self, batch: TrainBatch, learning_rates: Sequence[float]) -> list[UpdateMetrics]:
        self._check_share(batch)
        offsets = Offsets.of(batch)
        signal = None if batch.rewards is None else self._signal(batch, offsets)
        return [
            self._update(batch, offsets, part, signal, rate)
            for part, rate in zip(batch.parts, learning_rates, strict=True)
        ]

    def negative_log_likelihood(self, batch: TrainBatch) -> float:
        self._check_share(batch)
        table = self._table(self._model, batch, Offsets.of(batch), temperature=1.0)
        return -float(self._ranks.sum(table.values.double().sum())) / max(1, int(batch.trained.sum()))

    def log_probs(self, batch: TrainBatch) -> NDArray[np.float32]:
        self._check_share(batch)
        table = self._table(self._model, batch, Offsets.of(batch), temperature=1.0)
        lengths, held = batch.response_lengths, batch.held_samples
        whole = torch.zeros(int(lengths.sum()))
        for start, sample in zip(starts_of(lengths)[held], held, strict=True):
            of_share = int(table.starts[sample])
            whole[start : start + lengths[sample]] = table.values[of_share : of_share + lengths[sample]]
        summed: NDArray[np.float32] = self._ranks.sum(whole).numpy()
        return summed

    def shards(self) -> list[WeightShard]:
        settings, precision = self._spec.train.lora, published_precision(self._spec)
        parameters = [
            (name, parameter)
            for name, parameter in self._model.named_parameters()
            if settings is None or lora.is_adapter(name)
        ]
        shards = [
            published_shard(name, parameter, stored_in(name, precision), number)
            for number, (name, parameter) in enumerate(parameters)
        ]
        if settings is not None:
            scale = torch.tensor(settings.alpha / settings.rank, dtype=torch.float64)
            shards.append(published_shard(SCALE, scale, torch.float64, 0))
        return shards

    def save(self, folder: Path) -> None:
        self.saved(wait=True)
        optimizers, rank = self._optimizers.parts, self._ranks.rank
        self._writing = sharded_checkpoint.begin(folder, self._model, optimizers, rank, self._storage)

    def saved(self, *, wait: bool = False) -> bool:
        if self._writing is None:
            return True
        if not wait and not self._writing.done():
            return False
        writing = self._writing
        try:
            writing.result()
        finally:  # forgotten only now: a `save` that is called while another thread waits here has to wait, too
            if self._writing is writing:
                self._writing = None
        return True

    def restore(self, folder: Path) -> None:
        sharded_checkpoint.restore(folder, self._model, self._optimizers.parts, self._ranks.rank)
        self._optimizers.park_state()

    def _load(self, origin: Origin, *, trained: bool) -> HFModule:
        """Build the model of `origin`, shard it, and load its weights.

        trained: true for the model that trains, false for the frozen reference model.
        """
        train, precision = self._spec.train, PRECISIONS[self._spec.model.precision]
        model = adapt(origin.construct(), self._ranks.context_group, float32_logits=train.headPrecision == "FP32")
        model.train(trained)
        if trained:
            if train.lora is not None:
                lora.add(model, train.lora)
            freeze(model, train.freeze if self._pictures else without_tower(model, train.freeze))
        else:
            model.requires_grad_(False)
        convert_frozen(model, precision)
        shard(model, self._ranks.mesh, precision, train)
        if origin.files is not None:
            fill(model, origin.files, self._device, offloaded=train.offload.parameters)
        if trained and train.lora is not None:
            lora.initialise(model, self._spec.seed)
        return model

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
        update = _Update(batch, offsets, divisors, int((batch.lengths[part] - 1).sum()), signal)
        totals: dict[str, Tensor] = {}
        shares = self._plan(batch, part)
        for position, samples in enumerate(shares):
            self._model.set_requires_all_reduce(position == len(shares) - 1)
            loss, metrics = self._losses(update, samples)
            (loss * self._ranks.world).backward()  # FSDP averages over ranks; the loss is a share of a sum
            for name, value in (metrics | {"loss": loss.detach()}).items():
                totals[name] = totals.get(name, torch.zeros((), device=self._device)) + value
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        norm = float(_whole(nn.utils.clip_grad_norm_(trained, self._spec.train.optimizer.gradientClip)))
        self._step(norm, learning_rate)
        summed = torch.stack([value.float() for value in totals.values()]) * self._ranks.adds_to_sums
        dist.all_reduce(summed)
        sums = dict(zip(totals, summed.tolist(), strict=True))
        tokens = sums.pop("tokens")
        loss_value = sums.pop("loss")
        means = {name: value / tokens for name, value in sums.items()}
        return UpdateMetrics(loss_value, norm, learning_rate, round(tokens), means)

    def _step(self, norm: float, learning_rate: float) -> None:
        """Update the parameters if the gradient's norm is finite; otherwise skip this step.

        A step with an infinite or NaN gradient would make every weight NaN. All ranks have the same norm and decide alike. Raises
        NotFinite after `MAX_SKIPPED_UPDATES` skipped steps in a row.
        """
        if math.isfinite(norm):
            self._skipped_updates = 0
            self._optimizers.step(learning_rate)
            return
        self._skipped_updates += 1
        self._optimizers.zero_grad()
        logger.warning("update skipped: the gradient's norm is %s (%d in a row)", norm, self._skipped_updates)
        if self._skipped_updates == MAX_SKIPPED_UPDATES:
            raise (NotFiniteInSFT if self._spec.mode == "SFT" else NotFinite)(
                f"the gradient's norm is {norm} for the {MAX_SKIPPED_UPDATES}th step in a row, and all of them were skipped: lower "
                "spec.train.optimizer.learningRate, or compute in more precision (spec.model.precision FP32)"
            )

    def _losses(self, update: _Update, samples: NDArray[np.int64]) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute a micro-batch's share of the loss, including the losses of routers, and its share of the metrics."""
        signal, micro = update.signal, self._micro_batch(update.batch, update.offsets, samples)
        temperature = self._spec.rollout.temperature if self._spec.rollout and signal else 1.0
        algorithm = self._spec.algorithm
        with_entropy = signal is not None and (algorithm.reportEntropy or algorithm.entropyCoefficient != 0)
        scores = response_scores(
            self._model, micro, temperature, with_entropy=with_entropy, with_router=self._trains_router
        )
        loss, metrics = self._objective_of(update, samples, micro.responses, scores)
        if scores.router_losses is not None:
            means, router = scores.router_losses / update.inputs, self._spec.train.router
            loss = loss + router.loadBalancingLoss * means[0] + router.zLoss * means[1]
            # Per layer; multiplied by the number of tokens, because metrics are divided by it.
            balance, z = means.detach() * update.counts.tokens / len(text_model(self._model).layers)
            metrics |= {"router_load_balancing": balance, "router_z": z}
        return loss, metrics

    def _objective_of(
        self, update: _Update, samples: NDArray[np.int64], responses: Responses, scores: TokenScores
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
            self._objective,
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
        if self._reference is not None:
            reference = self._table(self._reference, batch, offsets, temperature)
        elif self._uses_kl:
            with lora.adapters_disabled(self._model):
                reference = self._table(self._model, batch, offsets, temperature)
        if batch.updates > 1 and self._objective.correction != "None":
            proximal = self._table(self._model, batch, offsets, temperature)
        algorithm = self._spec.algorithm
        return LearningSignal.of(batch, offsets, algorithm, self._ranks, reference=reference, proximal=proximal)

    @torch.no_grad()
    def _table(self, model: HFModule, batch: TrainBatch, offsets: Offsets, temperature: float) -> TokenTable:
        """Return the log-probs under `model` of the trained tokens of this rank's share; the table has 0 for all other tokens.

        Collective: all ranks must call it together.
        """
        table = TokenTable.zeros(batch, offsets)
        for part in batch.parts:
            for samples in self._plan(batch, part):
                micro = self._micro_batch(batch, offsets, samples)
                values = response_scores(model, micro, temperature, with_entropy=False).log_probs
                table.fill(samples, values.masked_fill(~micro.responses.mask, 0.0))
        model.reshard()  # a backward pass would have done that for the outermost parameters
        return table

    def _micro_batch(self, batch: TrainBatch, offsets: Offsets, samples: NDArray[np.int64]) -> MicroBatch:
        packed = self._spec.train.batch.removePadding
        return micro_batch(batch, offsets, samples, self._model.config, packed=packed, device=self._device)

    def _plan(self, batch: TrainBatch, part: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Return the micro-batches of this rank for one update. part: indices of the update's samples."""
        return self._division.micro_batches(batch, part)[self._ranks.data_share]

    def _check_share(self, batch: TrainBatch) -> None:
        """Raise ValueError for a batch that is not this rank's share, because sums over all shares would then be
        wrong.
        """
        if self._ranks.data_shares == 1:
            expected = np.arange(batch.samples)
        else:
            expected = self._division.samples(batch)[self._ranks.data_share]
        if not np.array_equal(batch.held_samples, expected):
            share = f"share {self._ranks.data_share} of {self._ranks.data_shares}"
            raise ValueError(f"rank {self._ranks.rank} got other samples than those of {share}")


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
