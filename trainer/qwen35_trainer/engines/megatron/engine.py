"""One rank of training with megatron-core: the hooks of `UpdatingEngine` for a model that tensor, pipeline and expert ranks share.

    micro-batches of this rank's share ─► megatron-core's pipeline schedule
        each stage: forward ─► next stage …          last stage: scores ─► loss ─► backward ─► previous stage …
    losses of its routers ─► all stages                        metrics ─► all stages
    ─► gradients summed over data-parallel ranks ─► clip ─► distributed optimizer

Sequences are padded. Packed rows would need an attention kernel that respects the boundaries of sequences. megatron-core has
such a kernel only with Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from numpy.typing import NDArray
from torch import Tensor, nn

from qwen35_trainer.algorithms.objective import supervised_objective
from qwen35_trainer.engines import accelerator_libraries
from qwen35_trainer.engines.megatron import checkpoint, installed_settings, model_problems, offload
from qwen35_trainer.engines.megatron import layout as layouts
from qwen35_trainer.engines.megatron.config import transformer_config
from qwen35_trainer.engines.megatron.layout import Layout
from qwen35_trainer.engines.megatron.model import StageModel, build_stages
from qwen35_trainer.engines.megatron.offload import GRADIENTS, REFERENCE, TRAINED, WEIGHTS, Offload
from qwen35_trainer.engines.megatron.optimizer import WEIGHT, MegatronOptimizer, gradients_of, with_gradient_buffers
from qwen35_trainer.engines.megatron.pictures import average_gradients
from qwen35_trainer.engines.megatron.published_model import PublishedModel, Read
from qwen35_trainer.engines.megatron.ranks import MegatronRanks
from qwen35_trainer.engines.megatron.router_losses import RouterLosses
from qwen35_trainer.engines.megatron.weight_table import TEXT, TOWER, ModelShape, text_prefix
from qwen35_trainer.engines.micro_batch import MicroBatch, Offsets, TokenTable, micro_batch
from qwen35_trainer.engines.origin import Origin
from qwen35_trainer.engines.published_precision import published_precision
from qwen35_trainer.engines.train_batch import TrainBatch
from qwen35_trainer.engines.updating_engine import ScoredPolicy, UpdateStep, UpdatingEngine, part_of_routers
from qwen35_trainer.manifest import TrainingSpec
from qwen35_trainer.manifest.megatron import FIELD
from qwen35_trainer.models.qwen3_5 import HFModule, prediction_head
from qwen35_trainer.models.qwen3_5.checkpoint_files import check_finite
from qwen35_trainer.models.qwen3_5.classes import HFConfig, text_part
from qwen35_trainer.models.qwen3_5.precision import PRECISIONS, stored_in
from qwen35_trainer.weights.parked_tensors import ParkedTensors
from qwen35_trainer.weights.staging import WeightShard


class MegatronEngine(UpdatingEngine):
    """One rank of training with megatron-core. It needs an initialised process group.

    origin: where the weights come from, the same on every rank. layout: degrees of parallelism; None: the
    manifest's degrees. pictures: whether any rank's batches may contain pictures; without pictures the vision tower does not
    train. Raises ValueError naming every setting of the model that this engine cannot compute. If the
    engine can compute the model, the error names every degree that does not fit the model or the number of ranks.
    """

    _ranks: MegatronRanks

    def __init__(
        self,
        origin: Origin,
        spec: TrainingSpec,
        device: torch.device,
        *,
        layout: Layout | None = None,
        pictures: bool = True,
    ) -> None:
        model = origin.construct()
        self._model_config, self._layout = model.config, layout or Layout.of(spec.train.parallelism)
        self._text, self._pictures = text_part(model.config), pictures and hasattr(model.model, "visual")
        _check(self._text, self._layout, spec, pictures=self._pictures)
        accelerator_libraries.require_mindspeed(spec)
        _check_settings(self._text, self._layout, spec)
        self._shapes = _shapes(model, origin, with_head=spec.train.multiTokenPrediction is not None)
        timeout = timedelta(seconds=spec.train.collectiveTimeoutSeconds)
        super().__init__(spec, MegatronRanks.of(self._layout, timeout, spec.seed), device)
        read = _reader(origin, model)
        fields, self._offload = spec.train.offload, Offload(device, self._host_blocks)
        self._reference: list[StageModel] | None = None
        if self._uses_kl:
            self._reference = self._build(model, None)
            self._published(self._reference).load(read)
            if fields.parameters:
                self._offload.add(REFERENCE, partial(_tensors_of, self._reference))
                self._offload.need()
        self._router_losses = RouterLosses(device) if self._has_router_losses else None
        self._stages = self._build(model, self._router_losses)
        self._weights = self._published(self._stages)
        self._trained_shapes = {
            name: shape for name, shape in self._shapes.items() if self._pictures or not name.startswith(TOWER)
        }
        self._saved_weights = self._published(self._stages, only_trained=True)
        self._stages[0].config.finalize_model_grads_func = _sum_gradients
        self._trained = [with_gradient_buffers(stage) for stage in self._stages]
        if fields.gradients:
            self._offload.add(GRADIENTS, partial(gradients_of, self._trained))
            self._offload.need()
        bfloat16 = spec.model.precision == "BF16"
        self._optimizer = MegatronOptimizer(self._trained, spec.train.optimizer, bfloat16=bfloat16)
        self._weights.load(read, lambda parameter, values: self._optimizer.put(parameter, WEIGHT, values))
        if fields.parameters and self._reference is not None:  # without it, every step needs all parameters
            self._offload.add(TRAINED, partial(_tensors_of, self._stages))
        self._moments = [offload.moments(group) for group in range(self._optimizer.groups)]
        if fields.optimizer:
            self._offload_optimizer()
        self._offload.need(TRAINED)

    def _offload_optimizer(self) -> None:
        self._offload.add(WEIGHTS, lambda: self._optimizer.weights)
        for group, name in enumerate(self._moments):
            self._offload.add(name, partial(self._optimizer.moments, group))
        self._optimizer.step_by_groups(
            lambda group: self._offload.need(TRAINED, GRADIENTS, WEIGHTS, self._moments[group])
        )

    def _build(self, model: HFModule, router_losses: RouterLosses | None) -> list[StageModel]:
        """Build this rank's part of a model, without its values.

        model: the model in transformers. router_losses: where the routers add their losses; None: they have none.
        """
        return build_stages(
            model,
            self._layout,
            PRECISIONS[self._spec.model.precision],
            recompute=self._spec.train.activationCheckpointing,
            router_losses=router_losses,
            head=self._spec.train.multiTokenPrediction,
            overrides=self._spec.train.overrideTransformerConfig,
            reads_pictures=self._pictures,
        )

    def _published(self, stages: Sequence[StageModel], *, only_trained: bool = False) -> PublishedModel:
        """Return the parameters of this rank's part of a model as parts of published tensors: all, or those that train."""
        shapes = self._trained_shapes if only_trained else self._shapes
        layers = self._text.num_hidden_layers
        return PublishedModel(stages, ModelShape.of(self._text), shapes, layers, only_trained=only_trained)

    def shards(self) -> list[WeightShard]:
        self._offload.need(TRAINED)
        precision = published_precision(self._spec)
        shards = []
        for part in self._weights.publish(nn.Parameter.detach):
            values = torch.empty(0) if part.values is None else part.values
            dtype = stored_in(part.name, precision)
            shards.append(WeightShard(part.name, self._shapes[part.name], dtype, part.start, values))
        return shards

    def save(self, folder: Path) -> None:
        with self._without_gradients():
            checkpoint.save(folder, self._saved_weights, self._optimizer, self._trained_shapes)

    def saved(self, *, wait: bool = False) -> bool:
        return True  # `save` returns when all ranks have written

    def restore(self, folder: Path) -> None:
        with self._without_gradients():
            checkpoint.restore(folder, self._saved_weights, self._optimizer, self._trained_shapes)

    @contextmanager
    def _without_gradients(self) -> Iterator[None]:
        """Context manager: the body has all tensors on the device but the gradients, which have values only within an update.

        The gradients leave before the optimizer state comes and return after it has left, because the device may not
        hold both. Without them there is room for what a checkpoint gathers.
        """
        self._offload.need(TRAINED)
        gradients = ParkedTensors(self._optimizer.gradients, self._device, keep_values=False, for_others=False)
        try:
            self._offload.need(TRAINED, WEIGHTS, *self._moments)
            yield
        finally:
            self._offload.need(TRAINED)
            gradients.restore()

    def _forward_backward(self, update: UpdateStep, shares: Sequence[NDArray[np.int64]]) -> dict[str, Tensor]:
        self._offload.need(TRAINED, GRADIENTS)
        self._optimizer.zero_grad()

        def losses(stage: StageModel, micro: MicroBatch, samples: NDArray[np.int64], hidden: Tensor) -> Any:  # noqa: ANN401
            float32_logits = self._spec.train.headPrecision == "FP32"
            of_model, of_head = stage.of_model_and_head(hidden)
            scores = stage.scores(
                of_model, micro, update.temperature, with_entropy=update.with_entropy, float32_logits=float32_logits
            )
            loss, metrics = self._losses(update, samples, micro.responses, scores)
            if of_head is not None:
                log_probs = stage.log_probs_of_head(of_head, micro, float32_logits=float32_logits)
                part, of_part = self._loss_of_head(update, micro, log_probs)
                loss, metrics = loss + part, metrics | of_part | {"loss": metrics["loss"] + part.detach()}
            return loss, torch.ones((), dtype=torch.int), metrics

        if self._router_losses is not None:
            self._router_losses.begin(partial(part_of_routers, self._spec.train.router, update.inputs))
        results = self._run(self._stages, update.batch, update.offsets, shares, losses)
        totals: dict[str, Tensor] = {}
        for metrics in results:
            for name, value in metrics.items():
                totals[name] = totals.get(name, torch.zeros((), device=self._device)) + value
        totals = self._from_last_stage(totals)
        return totals if self._router_losses is None else self._with_router_losses(totals, update, self._router_losses)

    def _loss_of_head(
        self, update: UpdateStep, micro: MicroBatch, log_probs: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return what the head for multi-token prediction adds to the loss, and its metric: the sum over trained tokens in nats.

        The mean is over all trained tokens of the update, like that of the model's own loss.
        """
        settings = self._spec.train.multiTokenPrediction
        assert settings is not None
        mean, metrics = supervised_objective(log_probs, micro.responses.mask, update.counts)
        return settings.lossWeight * mean, {"mtp_nll": metrics["nll"]}

    def _with_router_losses(
        self, totals: dict[str, Tensor], update: UpdateStep, routers: RouterLosses
    ) -> dict[str, Tensor]:
        """Add the losses of the routers of all stages. Collective over the ranks that compute a share."""
        dist.all_reduce(routers.sums, group=parallel_state.get_model_parallel_group())
        loss = totals["loss"] + part_of_routers(self._spec.train.router, update.inputs, routers.sums)
        return totals | self._router_metrics(update, routers.sums) | {"loss": loss}

    def _run(
        self,
        stages: Sequence[StageModel],
        batch: TrainBatch,
        offsets: Offsets,
        shares: Sequence[NDArray[np.int64]],
        results: Callable[..., Any],
        *,
        forward_only: bool = False,
    ) -> list[Any]:
        """Run the pipeline schedule over micro-batches. Collective over the ranks of a share.

        results: called on the last stage with the stage, the micro-batch, its samples and its hidden states; returns loss, a number and
        the result of the micro-batch. Returns the results on the last stage, and nothing on other stages.
        """
        if self._layout.virtual > 1:
            # The interleaved schedule takes as many micro-batches at a time as there are stages.
            empty = np.empty(0, dtype=np.int64)
            shares = [*shares, *[empty] * (-len(shares) % self._layout.pipeline)]

        def forward(batches: Iterator[NDArray[np.int64]], called: nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
            samples = next(batches)
            stage = cast("StageModel", getattr(called, "module", called))  # without its gradient buffers
            micro = micro_batch(
                batch,
                offsets,
                samples,
                self._model_config,
                packed=False,
                with_patches=stage.embeds_pictures,
                device=self._device,
            )
            return called(**stage.inputs(micro)), lambda output: results(stage, micro, samples, output)

        schedule = get_forward_backward_func()
        models = list(stages) if forward_only else self._trained
        outputs: list[Any] = schedule(
            forward_step_func=forward,
            data_iterator=[iter(shares) for _ in models],
            model=models,
            num_microbatches=len(shares),
            seq_length=1,  # the stages exchange the shapes of their tensors: `variable_seq_lengths`
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return outputs if self._ranks.is_last_stage else []

    def _from_last_stage(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the values of the last pipeline stage on every stage. Collective over the stages."""
        if self._layout.pipeline == 1:
            return values
        group = parallel_state.get_pipeline_model_parallel_group()
        source = parallel_state.get_pipeline_model_parallel_last_rank()
        numbers: list[Any] = [{name: float(value) for name, value in values.items()}]
        dist.broadcast_object_list(numbers, source, group=group, device=self._device)
        return {name: torch.tensor(value, device=self._device) for name, value in numbers[0].items()}

    def _step(self, learning_rate: float) -> float:
        self._offload.need(TRAINED, GRADIENTS, WEIGHTS)  # the optimizer's step brings the moments
        norm = self._optimizer.step(learning_rate)
        self._offload.need(TRAINED)
        return norm

    @torch.no_grad()
    def _score(self, policy: ScoredPolicy, batch: TrainBatch, offsets: Offsets, temperature: float) -> TokenTable:
        stages = self._stages
        if policy == "Reference" and self._reference is not None:
            stages = self._reference
        self._offload.need(REFERENCE if stages is self._reference else TRAINED)
        table = TokenTable.zeros(batch, offsets)

        def fill(stage: StageModel, micro: MicroBatch, samples: NDArray[np.int64], hidden: Tensor) -> Any:  # noqa: ANN401
            scores = stage.scores(
                hidden,
                micro,
                temperature,
                with_entropy=False,
                float32_logits=self._spec.train.headPrecision == "FP32",
            )
            table.fill(samples, scores.log_probs.masked_fill(~micro.responses.mask, 0.0))
            return hidden.sum(), torch.ones((), dtype=torch.int), None

        shares = [samples for part in batch.parts for samples in self._plan(batch, part)]
        self._run(stages, batch, offsets, shares, fill, forward_only=True)
        if self._layout.pipeline > 1:
            values = table.values.to(self._device)
            source = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast(values, source, group=parallel_state.get_pipeline_model_parallel_group())
            table.values.copy_(values)
        return table

    def _held_tensors(self) -> Iterator[Tensor]:
        yield from _tensors_of([*self._stages, *(self._reference or ())])
        yield from self._optimizer.gradients
        yield from self._optimizer.weights
        for group in range(self._optimizer.groups):
            yield from self._optimizer.moments(group)

    def _scratch_tensors(self) -> Iterator[Tensor]:
        return self._optimizer.gradients

    @property
    def _layers(self) -> int:
        return int(self._text.num_hidden_layers)

    @property
    def _experts(self) -> int:
        return int(self._text.num_experts)


def _tensors_of(stages: Sequence[StageModel]) -> Iterator[Tensor]:
    for stage in stages:
        yield from stage.parameters()
        yield from stage.buffers()


def _shapes(model: HFModule, origin: Origin, *, with_head: bool) -> dict[str, tuple[int, ...]]:
    """Return name of a published tensor → its shape, including the head for multi-token prediction if `with_head`.

    Raises ValueError naming the tensors of the head that the folder lacks, or has in another shape.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if not with_head:
        return shapes
    text = text_prefix(shapes)
    of_text = {name.replace(text, TEXT, 1): shape for name, shape in shapes.items()}
    head = prediction_head.shapes(list(text_part(model.config).layer_types), of_text)
    stored = {} if origin.files is None else origin.files.head
    if lacking := [name for name, shape in head.items() if name not in stored or stored[name].shape != shape]:
        raise ValueError(
            f"spec.train.multiTokenPrediction: the model's folder lacks {', '.join(lacking[:5])}"
            f"{f' and {len(lacking) - 5} more' if len(lacking) > 5 else ''}, or has them in another shape than the layers of the "
            "model; use a folder with the head, as published, or remove the field"
        )
    return shapes | head


def _sum_gradients(stages: list[nn.Module], _tokens: object, **options: Any) -> None:  # noqa: ANN401  # megatron-core's
    """Sum the gradients over ranks at the end of a step. megatron-core would divide them by its count of tokens."""
    finalize_model_grads(stages, None, **options)
    parts = [cast("StageModel", stage.module) for stage in stages]
    towers = [part.visual for part in parts if part.reads_pictures and part.visual is not None]
    average_gradients(towers, parallel_state.get_tensor_model_parallel_group())


def _reader(origin: Origin, model: HFModule) -> Read:
    """Return a function that reads published tensors: from files, or from a model that was built with its values.

    The function raises CheckpointUnusable if a tensor in the files holds NaN or infinity.
    """
    if (files := origin.files) is not None:

        def read_file(name: str, *slices: slice) -> Tensor:
            values = files.read(name, *slices)
            check_finite(files.folder, [(name, values)])
            return values

        return read_file
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def read(name: str, *slices: slice) -> Tensor:
        return weights[name][slices]

    return read


def _check(model: HFConfig, layout: Layout, spec: TrainingSpec, *, pictures: bool) -> None:
    """Raise ValueError naming every setting of the model, the layout, the routers, the prediction head or megatron-core that
    this engine cannot compute, if there is one.

    model: the configuration of the text model. pictures: whether the model reads pictures of the data.
    """
    problems = list(model_problems.problems(model))
    if not problems:
        problems += layouts.problems(layout, model, dist.get_world_size())
        problems += model_problems.router_problems(model, spec.train.router, spec.train.overrideTransformerConfig)
        if spec.train.multiTokenPrediction is not None:
            problems += model_problems.head_problems(model, pictures=pictures)
    for each in installed_settings.problems(spec.train.overrideTransformerConfig, version("megatron-core")):
        problems.append(f"{each.path}: {each.message} {each.fix}")
    if problems:
        raise ValueError("; ".join(problems))


def _check_settings(model: HFConfig, layout: Layout, spec: TrainingSpec) -> None:
    """Raise ValueError with megatron-core's reason if it refuses `overrideTransformerConfig` of the manifest.

    It checks, for example, which settings exclude each other, and whether the packages for a setting are installed.
    """
    if not (settings := spec.train.overrideTransformerConfig):
        return
    try:
        transformer_config(
            model,
            layout,
            PRECISIONS[spec.model.precision],
            recompute=spec.train.activationCheckpointing,
            with_head=spec.train.multiTokenPrediction is not None,
            overrides=settings,
        )
    except (ValueError, AssertionError, ImportError, RuntimeError) as error:
        listed = ", ".join(f"{name}: {value}" for name, value in settings.items())
        raise ValueError(
            f"{FIELD}: megatron-core refuses the settings {listed}: {error} Remove or correct the one it names."
        ) from error
