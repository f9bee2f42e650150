"""One rank of FSDP2 training: the hooks of `UpdatingEngine` for a model that FSDP2 shards.

    micro-batches of this rank: forward ─► loss ─► backward ─► reduce-scatter   ─► clip ─► optimizer step

Gradients accumulate over micro-batches. They are reduced into the shards after each micro-batch, because unsharded
gradients would take 4 bytes per parameter on every rank, more than the weights. Only the sum over the copies of the
model (HSDP) waits for the last micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from qwen35_trainer.engines.fsdp import gradient_norm, lora, sharded_checkpoint
from qwen35_trainer.engines.fsdp.freezing import convert_frozen, freeze, without_tower
from qwen35_trainer.engines.fsdp.loading import fill
from qwen35_trainer.engines.fsdp.optimizer import Optimizers
from qwen35_trainer.engines.fsdp.published_shard import published_shard
from qwen35_trainer.engines.fsdp.sharding import Ranks, free_gathered, shard
from qwen35_trainer.engines.micro_batch import MicroBatch, Offsets, TokenTable, micro_batch, response_scores
from qwen35_trainer.engines.origin import Origin
from qwen35_trainer.engines.published_precision import published_precision
from qwen35_trainer.engines.train_batch import TrainBatch
from qwen35_trainer.engines.updating_engine import ScoredPolicy, UpdateStep, UpdatingEngine
from qwen35_trainer.manifest import TrainingSpec
from qwen35_trainer.models.qwen3_5 import HFModule
from qwen35_trainer.models.qwen3_5.adapter import adapt
from qwen35_trainer.models.qwen3_5.family import text_config, text_model
from qwen35_trainer.models.qwen3_5.packing import check_packing
from qwen35_trainer.models.qwen3_5.precision import PRECISIONS, stored_in
from qwen35_trainer.weights.adapters import SCALE
from qwen35_trainer.weights.staging import WeightShard


class FSDPEngine(UpdatingEngine):
    """One rank of FSDP2 training. It needs an initialised process group.

    origin: where the weights come from, the same on every rank. pictures: whether any rank's batches may contain
    pictures; without pictures the vision tower does not train, and runs only for scored batches that have some. Raises
    ValueError if degrees of parallelism, frozen parts, adapters or router losses do not fit the model. Raises
    PackingInexact if packing changes the scores or gradients of sequences.
    """

    _ranks: Ranks

    def __init__(self, origin: Origin, spec: TrainingSpec, device: torch.device, *, pictures: bool = True) -> None:
        timeout = timedelta(seconds=spec.train.collectiveTimeoutSeconds)
        super().__init__(spec, Ranks.of(spec.train.parallelism, device, timeout), device)
        self._pictures = pictures
        self._reference: HFModule | None = None
        if self._uses_kl and spec.train.lora is None:
            self._reference = self._load(origin, trained=False)
        self._model = self._load(origin, trained=True)
        if (self._has_router_losses or self._replays) and not hasattr(text_config(self._model), "num_experts"):
            fields = "its losses" if self._has_router_losses else "replay"
            raise ValueError(f"spec.train.router: {type(self._model).__name__} has no router; remove {fields}")
        if spec.train.batch.removePadding:
            shown = self._pictures and hasattr(self._model.model, "visual")
            check_packing(self._model, pictures=shown, share_prompts=spec.train.batch.sharePrompts)
        parked = spec.train.offload.optimizer and not spec.train.offload.parameters
        self._optimizers = Optimizers.of(self._model, spec.train.optimizer, torch.device("cpu") if parked else None)
        self._storage = dist.new_group(backend="gloo", timeout=timeout)
        self._writing: Future[Any] | None = None

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

        trained: whether this is the model that trains; otherwise it is the frozen reference model.
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
        shard(model, self._ranks, precision, train)
        if origin.files is not None:
            fill(model, origin.files, self._device, offloaded=train.offload.parameters)
        if trained and train.lora is not None:
            lora.initialise(model, self._spec.seed)
        return model

    def _forward_backward(self, update: UpdateStep, shares: Sequence[NDArray[np.int64]]) -> dict[str, Tensor]:
        totals: dict[str, Tensor] = {}
        for position, samples in enumerate(shares):
            self._model.set_requires_all_reduce(position == len(shares) - 1)
            micro = self._micro_batch(update.batch, update.offsets, samples)
            scores = response_scores(
                self._model,
                micro,
                update.temperature,
                with_entropy=update.with_entropy,
                with_router=self._has_router_losses,
            )
            loss, metrics = self._losses(update, samples, micro.responses, scores)
            (loss * self._ranks.world).backward()  # FSDP averages over ranks; the loss is a share of a sum
            for name, value in metrics.items():
                totals[name] = totals.get(name, torch.zeros((), device=self._device)) + value
        return totals

    def _step(self, learning_rate: float) -> float:
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        train = self._spec.train
        norm = gradient_norm.clip(trained, train.optimizer.gradientClip, copies=train.parallelism.copies)
        if math.isfinite(norm):
            self._optimizers.step(learning_rate)
        else:
            self._optimizers.zero_grad()
        return norm

    def _score(self, policy: ScoredPolicy, batch: TrainBatch, offsets: Offsets, temperature: float) -> TokenTable:
        if policy == "Current":
            return self._table(self._model, batch, offsets, temperature)
        if self._reference is not None:
            return self._table(self._reference, batch, offsets, temperature)
        with lora.adapters_disabled(self._model):
            return self._table(self._model, batch, offsets, temperature)

    def _held_tensors(self) -> Iterator[Tensor]:
        for model in (self._model, self._reference):
            if model is not None:
                yield from model.parameters()
                yield from model.buffers()
                yield from (each.grad for each in model.parameters() if each.grad is not None)
        yield from self._optimizers.tensors

    @property
    def _layers(self) -> int:
        return len(text_model(self._model).layers)

    @property
    def _experts(self) -> int:
        return int(text_config(self._model).num_experts)

    @torch.no_grad()
    def _table(self, model: HFModule, batch: TrainBatch, offsets: Offsets, temperature: float) -> TokenTable:
        """Return the log-probs under `model` of the trained tokens of this rank's share. All other tokens have 0.

        Collective: all ranks must call it together.
        """
        table = TokenTable.zeros(batch, offsets)
        for part in batch.parts:
            for samples in self._plan(batch, part):
                micro = self._micro_batch(batch, offsets, samples)
                values = response_scores(model, micro, temperature, with_entropy=False).log_probs
                table.fill(samples, values.masked_fill(~micro.responses.mask, 0.0))
        free_gathered(model)
        return table

    def _micro_batch(self, batch: TrainBatch, offsets: Offsets, samples: NDArray[np.int64]) -> MicroBatch:
        settings = self._spec.train.batch
        micro = micro_batch(
            batch,
            offsets,
            samples,
            self._model.config,
            packed=settings.removePadding,
            share_prompts=settings.sharePrompts,
            device=self._device,
        )
        # All ranks agree: a share of a batch has `pictures` if any sample of the whole batch has some. Examples that are only
        # scored may have pictures in a training without pictures.
        text_only = not self._pictures and batch.pictures is None
        return replace(micro, inputs=replace(micro.inputs, text_only=text_only))
