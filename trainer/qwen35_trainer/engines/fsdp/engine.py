"""One rank of FSDP2 training.

    batch (same on all ranks) ─► advantages of the whole batch ─► for each update: micro-batches of this rank
                                                                    forward ─► objective ─► backward   (sum of shares)
                                                                  ─► clip ─► AdamW step

The loss divides by counts over all ranks, so one process, two ranks and any micro-batch size make the same step.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qwen35_trainer.algorithms.advantages import AdvantageInputs, advantage
from qwen35_trainer.algorithms.aggregation import GlobalCounts
from qwen35_trainer.algorithms.kl import kl
from qwen35_trainer.algorithms.objective import Objective, needs_proximal, policy_objective, supervised_objective
from qwen35_trainer.engines.base import UpdateMetrics
from qwen35_trainer.engines.batch import TrainBatch
from qwen35_trainer.engines.fsdp import checkpoint
from qwen35_trainer.engines.fsdp.forward import Offsets, Padded, pad, response_log_probs
from qwen35_trainer.engines.fsdp.sharding import shard
from qwen35_trainer.engines.micro_batches import Plan, plan
from qwen35_trainer.models.qwen3_5 import HFModule
from qwen35_trainer.spec import TrainingSpec

PRECISIONS = {"BF16": torch.bfloat16, "FP32": torch.float32}


@dataclass(frozen=True)
class _Signal:
    """What each sample of a whole batch is trained towards, on the host: (N, T) each, T the longest response."""

    advantages: Tensor
    reference: Tensor | None
    proximal: Tensor | None


class FSDPEngine:
    """Needs an initialised process group. `model`: the same whole float32 model on every rank."""

    def __init__(self, model: HFModule, spec: TrainingSpec, device: torch.device) -> None:
        self._spec, self._device = spec, device
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        precision = PRECISIONS[spec.model.precision]
        self._objective = _objective(spec)
        wants_reference = spec.mode != "SFT" and spec.algorithm.kl.placement != "None"
        reference = copy.deepcopy(model).requires_grad_(False).eval() if wants_reference else None
        self._reference = None if reference is None else shard(reference, self._ranks, device, precision, spec.train)
        self._model = shard(model.train(), self._ranks, device, precision, spec.train)
        settings = spec.train.optimizer
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=settings.learningRate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
            weight_decay=settings.weightDecay,
            fused=True,
        )

    def train(self, batch: TrainBatch, learning_rates: Sequence[float]) -> list[UpdateMetrics]:
        offsets = Offsets.of(batch)
        signal = None if batch.rewards is None else self._signal(batch, offsets)
        parts = np.split(np.arange(batch.samples), batch.updates)
        return [
            self._update(batch, offsets, part, signal, rate) for part, rate in zip(parts, learning_rates, strict=True)
        ]

    @torch.no_grad()
    def negative_log_likelihood(self, batch: TrainBatch) -> float:
        offsets = Offsets.of(batch)
        total = torch.zeros((), device=self._device)
        for samples in self._plan(batch, np.arange(batch.samples))[self._rank]:
            padded = pad(batch, offsets, samples, self._device)
            log_probs, _ = response_log_probs(self._model, padded, 1.0, with_entropy=False)
            total -= log_probs.masked_fill(~padded.mask, 0.0).sum()
        dist.all_reduce(total)
        return float(total) / max(1, int(batch.trainable.sum()))

    def weights(self) -> dict[str, Tensor]:
        return {name: _whole(tensor) for name, tensor in self._model.state_dict().items()}

    def save(self, folder: Path) -> None:
        checkpoint.save(folder, self._model, self._optimizer, self._rank)

    def restore(self, folder: Path) -> None:
        checkpoint.restore(folder, self._model, self._optimizer, self._rank)

    def _update(
        self, batch: TrainBatch, offsets: Offsets, part: NDArray[np.int64], signal: _Signal | None, learning_rate: float
    ) -> UpdateMetrics:
        counts = _counts(batch, offsets, part, self._spec.data.maxResponseTokens)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        totals: dict[str, Tensor] = {}
        # Without a single token to train, the step is left out: Adam would still move on its momentum.
        plans = [] if counts is None else self._plan(batch, part)[self._rank]
        for position, samples in enumerate(plans):
            assert counts is not None
            self._model.set_requires_gradient_sync(position == len(plans) - 1)
            loss, metrics = self._loss(pad(batch, offsets, samples, self._device), samples, signal, counts)
            (loss * self._ranks).backward()  # FSDP averages over ranks; the loss is a share of a sum
            for name, value in (metrics | {"loss": loss.detach()}).items():
                totals[name] = totals.get(name, torch.zeros((), device=self._device)) + value
        if not plans:
            return UpdateMetrics(0.0, 0.0, learning_rate, 0, {})
        norm = _whole(nn.utils.clip_grad_norm_(self._model.parameters(), self._spec.train.optimizer.gradientClip))
        self._optimizer.step()
        self._optimizer.zero_grad()
        summed = torch.stack([value.float() for value in totals.values()])
        dist.all_reduce(summed)
        sums = dict(zip(totals, summed.tolist(), strict=True))
        tokens = sums.pop("tokens")
        loss_value = sums.pop("loss")
        means = {name: value / tokens for name, value in sums.items()}
        return UpdateMetrics(loss_value, float(norm), learning_rate, round(tokens), means)

    def _loss(
        self, padded: Padded, samples: NDArray[np.int64], signal: _Signal | None, counts: GlobalCounts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        temperature = self._spec.rollout.temperature if self._spec.rollout and signal else 1.0
        log_probs, entropy = response_log_probs(self._model, padded, temperature, with_entropy=signal is not None)
        if signal is None:
            return supervised_objective(log_probs, padded.mask, counts)
        assert self._objective is not None
        assert padded.log_probs is not None
        proximal = self._rows(signal.proximal, samples, padded)
        if proximal is None and needs_proximal(self._objective.correction):
            proximal = log_probs.detach()  # one step per batch: the weights at its start are the current ones
        advantages = self._rows(signal.advantages, samples, padded)
        assert advantages is not None
        return policy_objective(
            self._objective,
            log_probs=log_probs,
            entropy=entropy,
            behaviour_log_probs=padded.log_probs,
            proximal_log_probs=proximal,
            reference_log_probs=self._rows(signal.reference, samples, padded),
            advantages=advantages,
            mask=padded.mask,
            counts=counts,
        )

    def _rows(self, table: Tensor | None, samples: NDArray[np.int64], padded: Padded) -> Tensor | None:
        """Rows of a whole-batch table, as wide as the micro-batch."""
        if table is None:
            return None
        if len(samples) == 0:
            return torch.zeros_like(padded.targets, dtype=torch.float32)
        return table[torch.from_numpy(samples), : padded.targets.shape[1]].to(self._device)

    def _signal(self, batch: TrainBatch, offsets: Offsets) -> _Signal:
        assert self._objective is not None
        assert batch.rewards is not None
        assert batch.group is not None
        algorithm = self._spec.algorithm
        everything = np.arange(batch.samples)
        whole = pad(batch, offsets, everything, torch.device("cpu"))
        reference = None if self._reference is None else self._table(self._reference, batch, offsets)
        several_steps = batch.updates > 1 and self._objective.correction != "None"
        proximal = self._table(self._model, batch, offsets) if several_steps else None
        penalty = None
        if algorithm.kl.placement == "Reward" and reference is not None and whole.log_probs is not None:
            divergence = kl(algorithm.kl.estimator)(whole.log_probs, reference)
            penalty = algorithm.kl.coefficient * divergence.masked_fill(~whole.mask, 0.0)
        inputs = AdvantageInputs(
            rewards=torch.from_numpy(np.array(batch.rewards)),
            group=torch.from_numpy(np.array(batch.group)),
            mask=whole.mask,
            token_penalty=penalty,
            gamma=algorithm.gamma,
            lam=algorithm.lambda_,
            valid=None if batch.valid is None else torch.from_numpy(np.array(batch.valid)),
        )
        return _Signal(advantage(algorithm.advantage)(inputs), reference, proximal)

    @torch.no_grad()
    def _table(self, model: HFModule, batch: TrainBatch, offsets: Offsets) -> Tensor:
        """Log-probs of all samples under `model`, (N, T) on the host: each rank computes its share."""
        assert self._spec.rollout is not None
        table = torch.zeros(batch.samples, int(batch.response_lengths.max()))
        for samples in self._plan(batch, np.arange(batch.samples))[self._rank]:
            padded = pad(batch, offsets, samples, self._device)
            values, _ = response_log_probs(model, padded, self._spec.rollout.temperature, with_entropy=False)
            if len(samples):
                table[torch.from_numpy(samples), : values.shape[1]] = values.masked_fill(~padded.mask, 0.0).cpu()
        table = table.to(self._device)
        dist.all_reduce(table)
        return table.cpu()

    def _plan(self, batch: TrainBatch, part: NDArray[np.int64]) -> Plan:
        settings = self._spec.train.batch
        lengths = (batch.prompt_lengths + batch.response_lengths)[part]
        shares = plan(
            lengths,
            self._ranks,
            sequences=settings.microBatchPerDevice,
            max_tokens=settings.maxTokensPerDevice if settings.dynamic else None,
        )
        return [[part[samples] for samples in share] for share in shares]


def _objective(spec: TrainingSpec) -> Objective | None:
    if spec.mode == "SFT":
        return None
    algorithm = spec.algorithm
    return Objective(
        loss=algorithm.loss.type,
        clip_low=algorithm.loss.clipLow,
        clip_high=algorithm.loss.clipHigh,
        dual_clip=algorithm.loss.dualClip,
        aggregation=algorithm.loss.aggregation,
        kl_placement=algorithm.kl.placement,
        kl_coefficient=algorithm.kl.coefficient,
        kl_estimator=algorithm.kl.estimator,
        entropy_coefficient=algorithm.entropyCoefficient,
        correction=algorithm.correction.type,
        cap=algorithm.correction.cap,
        floor=algorithm.correction.floor,
    )


def _counts(batch: TrainBatch, offsets: Offsets, part: NDArray[np.int64], max_tokens: int) -> GlobalCounts | None:
    """Counts over all ranks, from the batch that every rank holds; None when no token trains."""
    tokens = np.add.reduceat(batch.trainable.astype(np.int64), offsets.responses)[part]
    if tokens.sum() == 0:
        return None
    return GlobalCounts(int(tokens.sum()), int((tokens > 0).sum()), max_tokens)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
