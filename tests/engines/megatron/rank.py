"""One process of a group that trains with megatron-core: python -m tests.engines.megatron.rank RANK RANKS FOLDER PIPE.

Not the processes of `tests.distributed.rank`: on a CPU the engine changes torch for the whole process.
"""

import copy
import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

# isort: split
import tests.engines.megatron.on_cpu  # noqa: F401  # before megatron-core

# isort: split
from megatron.core import parallel_state
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from qwen35_trainer.engines import checkpoint_writer
from qwen35_trainer.engines.fsdp.engine import FSDPEngine
from qwen35_trainer.engines.megatron import engine as engines
from qwen35_trainer.engines.megatron import grouped_step, layers, vocabulary_parallel
from qwen35_trainer.engines.megatron.checkpoint import CheckpointDiffers
from qwen35_trainer.engines.megatron.config import transformer_config
from qwen35_trainer.engines.megatron.engine import MegatronEngine
from qwen35_trainer.engines.megatron.layout import Layout
from qwen35_trainer.engines.megatron.optimizer import WEIGHT, MegatronOptimizer, copies_of, gradients_of
from qwen35_trainer.engines.megatron.ranks import MegatronRanks
from qwen35_trainer.engines.megatron.router_losses import RouterLosses, RouterWithLosses
from qwen35_trainer.engines.micro_batch import Offsets
from qwen35_trainer.engines.origin import Origin, origin
from qwen35_trainer.engines.train_batch import TrainBatch
from qwen35_trainer.engines.train_engine import UpdateMetrics
from qwen35_trainer.manifest import TrainingSpec, parse_spec
from qwen35_trainer.models.qwen3_5 import products
from qwen35_trainer.models.qwen3_5.build_model import ModelSettings, build
from qwen35_trainer.models.qwen3_5.checkpoint_files import CheckpointUnusable
from qwen35_trainer.weights.parked_tensors import ParkedTensors, bytes_on
from tests.distributed.rank import CPU, LONGEST, VOCABULARY, main, remembering
from tests.distributed.rank import gradients_of as clipped_gradients_of
from tests.distributed.samples import spec_of
from tests.engines.megatron.fused_adam import installed
from tests.live_bytes import LiveBytes
from tests.models.scenes import vision_language
from tests.publications import published_by


def train(
    spec: dict[str, Any],
    batches: list[TrainBatch],
    *,
    rate: float = 1e-3,
    folder: Path | None = None,
    layout: dict[str, Any] | None = None,
    restore: Path | None = None,
    save: Path | None = None,
    spoilt: bool = False,
    fused: bool = False,
    sleeps: bool = False,
    group_numbers: int = grouped_step.GROUP_NUMBERS,
    file_bytes: int = checkpoint_writer.FILE_BYTES,
    pictured: dict[str, Any] | None = None,
    pictures: bool = False,
) -> dict[str, Any]:
    """Log-probs of the first batch's trained tokens (samples, longest response), metrics of each update, the gradient of the first
    update before clipping, what is published before and after, the bytes that each sleep gave back, and what was on the device
    while the model computed.

    The model is the spec's random one, what a `folder` holds, or a `pictured` vision-language one, whose batches have `pictures` or
    not. layout: degrees, if not those of the spec. spoilt: whether
    the loss is NaN. fused: whether the optimizer is the stand-in for FusedAdam. sleeps: whether the engine sleeps after each batch.
    group_numbers: maximum number of values of a group of parameters that step together. file_bytes: `FILE_BYTES` of the save.
    """
    parsed, source = _parsed(spec, folder, pictured)
    degrees = None if layout is None else Layout(**layout)
    with installed() if fused else nullcontext(), patch.object(grouped_step, "GROUP_NUMBERS", group_numbers):
        engine = MegatronEngine(source, parsed, CPU, layout=degrees, pictures=pictures)
    if restore is not None:
        engine.restore(restore)
    first = published_by(engine)
    gradients = _gradients_of(engine)
    if spoilt:
        losses = engine._losses
        engine._losses = lambda *each: (losses(*each)[0] * torch.nan, losses(*each)[1])  # type: ignore[method-assign]
    scores = [_scores_of(engine, batch) for batch in batches[:1]]
    passes, moments, metrics, changes = _passes_of(engine), _moments_of(engine), [], []
    for batch in batches:
        engine.wake()
        metrics += engine.train(_share_of(engine, batch), [rate] * batch.updates)
        if sleeps:
            changes.append(engine.sleep())
    engine.wake()
    passes, moments = list(passes), list(moments)
    if save is not None:
        with patch.object(checkpoint_writer, "FILE_BYTES", file_bytes):
            engine.save(save)
        assert engine.saved(wait=True)
    return {
        "first": first,
        "scores": scores,
        "metrics": metrics,
        "gradients": gradients,
        "published": published_by(engine),
        "changes": changes,
        "passes": passes,
        "moments": moments,
        "likelihood": [engine.negative_log_likelihood(_share_of(engine, batch)) for batch in batches[:1]],
    }


def towers(
    spec: dict[str, Any], batches: list[TrainBatch], *, layout: dict[str, Any], pictured: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """This rank's copy of the vision tower after the batches. After each backward pass, the copies get different gradients."""
    parsed, source = _parsed(spec, None, pictured)
    engine = MegatronEngine(source, parsed, CPU, layout=Layout(**layout), pictures=True)
    own = {name: each for name, each in engine._stages[0].named_parameters() if name.startswith("visual.")}
    for parameter in own.values():
        parameter.register_hook(lambda gradient: gradient * (1 + 0.1 * torch.distributed.get_rank()))
    for batch in batches:
        engine.train(_share_of(engine, batch), [1e-3])
    return {name: each.detach().clone() for name, each in own.items()}


def predictions(spec: dict[str, Any], batch: TrainBatch, *, folder: Path) -> list[torch.Tensor]:
    """Log-probs of the response tokens of each sample under the prediction head, 0 for tokens that do not train. One process."""
    parsed, source = _parsed(spec, folder)
    engine = MegatronEngine(source, parsed, CPU, pictures=False)
    losses, of_head = engine._losses, engine._loss_of_head
    samples: list[Any] = []
    tables: dict[int, torch.Tensor] = {}

    def remember(update: Any, of_micro: Any, *rest: Any) -> Any:
        samples[:] = of_micro
        return losses(update, of_micro, *rest)

    def keep(update: Any, micro: Any, log_probs: torch.Tensor) -> Any:
        rows = log_probs.detach().where(micro.responses.mask, 0.0)
        tables.update({n: row[: batch.response_lengths[n]] for n, row in zip(samples, rows, strict=True)})
        return of_head(update, micro, log_probs)

    engine._losses, engine._loss_of_head = remember, keep  # type: ignore[method-assign]
    engine.train(batch, [1e-3])
    return [tables[sample] for sample in range(batch.samples)]


def memory(spec: dict[str, Any], batch: TrainBatch, *, vocabulary: int, pictures: bool = False) -> dict[str, int]:
    """Bytes of this rank's tensors between two batches, and at most during the second one."""
    with _after_a_batch(spec, batch, vocabulary, pictures=pictures) as (engine, live):
        state = live.now
        engine.train(_share_of(engine, batch), [1e-3])
    return {"state": state, "peak": live.maximum}


def memory_of_start(spec: dict[str, Any]) -> list[dict[str, int]]:
    """Bytes on the device of reference model and gradients before the gradients of the trained model are allocated, and before
    the optimizer is built; of all parts when the engine is built.
    """
    parsed, source = _parsed(spec, None)
    counted: list[dict[str, int]] = []
    with_buffers, optimizer = engines.with_gradient_buffers, engines.MegatronOptimizer

    def count(engine: MegatronEngine, gradients: Iterable[torch.Tensor]) -> None:
        reference = [each for stage in engine._reference or () for each in stage.parameters()]
        counted.append({"Reference": bytes_on(reference, CPU), "Gradients": bytes_on(gradients, CPU)})

    engine = MegatronEngine.__new__(MegatronEngine)

    def allocate(stage: Any) -> Any:
        count(engine, ())
        return with_buffers(stage)

    def build_optimizer(stages: Any, *settings: Any, **options: Any) -> Any:
        count(engine, gradients_of(stages))
        return optimizer(stages, *settings, **options)

    with (
        patch.object(engines, "with_gradient_buffers", allocate),
        patch.object(engines, "MegatronOptimizer", build_optimizer),
    ):
        engine.__init__(source, parsed, CPU)  # type: ignore[misc]
    count(engine, engine._optimizer.gradients)
    counted[-1]["Optimizer"] = bytes_on(_state_of(engine), CPU)
    return counted


def head(*, vocabulary: int, hidden: int, rows: int, chunk: int, precision: torch.dtype, float32_logits: bool) -> Any:
    """Bytes that the backward pass of the head takes in addition to its inputs; its log-probs, entropies and gradients, and the
    exact ones of the same numbers.
    """
    random = torch.Generator().manual_seed(0)
    states, weight = (torch.randn(size, hidden, generator=random).to(precision) for size in (rows, vocabulary))
    targets = torch.randint(0, vocabulary, (rows,), generator=random)
    weights = torch.randn(2, rows, generator=random)

    def results(states: torch.Tensor, weight: torch.Tensor, compute: Any) -> tuple[list[torch.Tensor], int]:
        states, weight = states.clone().requires_grad_(), weight.clone().requires_grad_()
        gc.collect()
        with LiveBytes() as live:
            scores = compute(states, weight)
            live.restart()
            before = live.now
            torch.stack(scores).mul(weights).sum().backward()
        assert states.grad is not None
        assert weight.grad is not None
        return [each.detach().double() for each in (*scores, states.grad, weight.grad)], live.maximum - before

    def ours(states: torch.Tensor, weight: torch.Tensor) -> Any:
        return vocabulary_parallel.token_scores(
            states,
            weight,
            targets,
            0.8,
            torch.distributed.group.WORLD,
            vocabulary=vocabulary,
            with_entropy=True,
            float32_logits=float32_logits,
            kept=None,
            chunk=chunk,
        )[:2]

    def exact(states: torch.Tensor, weight: torch.Tensor) -> Any:
        log_probs = (states @ weight.T / 0.8).log_softmax(-1)
        return log_probs.gather(1, targets.unsqueeze(1)).squeeze(1), -(log_probs.exp() * log_probs).sum(-1)

    with patch.object(products, "BLOCK_ELEMENTS", 1024):  # negligible, as for real models
        computed, taken = results(states, weight, ours)
    expected, _ = results(states.double(), weight.double(), exact)
    return {"bytes": taken, "computed": computed, "exact": expected}


def memory_of_step(spec: dict[str, Any], batch: TrainBatch, *, vocabulary: int) -> int:
    """Bytes that an optimizer step takes in addition to the rank's tensors."""
    with _after_a_batch(spec, batch, vocabulary) as (engine, live):
        before = live.now
        engine._optimizer.step(1e-3)
    return live.maximum - before


@contextmanager
def _after_a_batch(
    spec: dict[str, Any], batch: TrainBatch, vocabulary: int, *, pictures: bool = False
) -> Iterator[tuple[MegatronEngine, LiveBytes]]:
    """An engine that has trained a batch, and what counts its tensors from then on."""
    parsed, problems = parse_spec(spec)
    assert parsed is not None, problems
    settings = ModelSettings(parsed.model, seed=0, vocabulary=vocabulary, max_length=4096, base=Path())
    gc.collect()
    with LiveBytes() as live:
        engine = MegatronEngine(Origin(lambda: build(settings)), parsed, CPU, pictures=pictures)
        engine.train(_share_of(engine, batch), [1e-3])
        gc.collect()
        live.restart()
        yield engine, live


def memory_of_save(
    spec: dict[str, Any], batch: TrainBatch, *, vocabulary: int, folder: Path, window: int
) -> dict[str, Any]:
    """Bytes of this rank's tensors before a save, and at most while it saves; the windows, as numbers of parameters.

    window: `FILE_BYTES`.
    """
    parsed, problems = parse_spec(spec)
    assert parsed is not None, problems
    settings = ModelSettings(parsed.model, seed=0, vocabulary=vocabulary, max_length=4096, base=Path())
    gc.collect()
    with LiveBytes() as live, patch.object(checkpoint_writer, "FILE_BYTES", window):
        engine = MegatronEngine(Origin(lambda: build(settings)), parsed, CPU)
        engine.train(_share_of(engine, batch), [1e-3])
        gc.collect()
        live.restart()
        before = live.now
        engine.save(folder)
        windows = [len(each) for each in engine._weights.windows(window // 4)]
    return {"before": before, "peak": live.maximum, "windows": windows}


def checkpointed(spec: dict[str, Any], batch: TrainBatch, *, vocabulary: int, folder: Path) -> dict[str, int]:
    """Save and restore. The most bytes that gradients and moments had on the device together whenever something came there, how
    often something came, and how many moments were read of which this rank holds nothing."""
    together, unused = [], 0
    with _after_a_batch(spec, batch, vocabulary) as (engine, _):
        optimizer, put = engine._optimizer, engine._optimizer.put

        def then_counted(call: Callable[..., None]) -> Callable[..., None]:
            def counted(*arguments: Any) -> None:
                call(*arguments)
                moments = (each for group in range(optimizer.groups) for each in optimizer.moments(group))
                together.append(min(bytes_on(optimizer.gradients, CPU), bytes_on(moments, CPU)))

            return counted

        def recorded(parameter: torch.nn.Parameter, name: str, values: torch.Tensor) -> None:
            nonlocal unused
            unused += name != WEIGHT and not optimizer.holds_state_of(parameter)
            put(parameter, name, values)

        with (
            patch.object(ParkedTensors, "restore", then_counted(ParkedTensors.restore)),
            patch.object(MegatronOptimizer, "prepare_state", then_counted(MegatronOptimizer.prepare_state)),
            patch.object(optimizer, "put", recorded),
        ):
            engine.save(folder)
            engine.restore(folder)
    return {"together": max(together), "came": len(together), "unused": unused}


def train_with_fsdp(
    spec: dict[str, Any],
    batches: list[TrainBatch],
    *,
    rate: float = 1e-3,
    restore: Path | None = None,
    save: Path | None = None,
    pictured: dict[str, Any] | None = None,
    pictures: bool = False,
) -> dict[str, Any]:
    """The same by the FSDP engine, whose degrees are all 1: metrics, the clipped gradient of each update, and what is published after."""
    parsed, source = _parsed(spec, None, pictured)
    engine = FSDPEngine(source, parsed, CPU, pictures=pictures)
    if restore is not None:
        engine.restore(restore)
    gradients = clipped_gradients_of(engine)
    metrics: list[UpdateMetrics] = []
    for batch in batches:
        share = engine._division.share(batch, engine._ranks.data_share)
        metrics += engine.train(share, [rate] * batch.updates)
    if save is not None:
        engine.save(save)
        assert engine.saved(wait=True)
    return {"metrics": metrics, "gradients": gradients, "published": published_by(engine)}


def refusal_of(folder: Path, spec: dict[str, Any]) -> tuple[str, bool]:
    """The text of the refusal of a checkpoint, and whether the weights are what they were."""
    parsed, source = _parsed(spec, None)
    engine = MegatronEngine(source, parsed, CPU)
    before = {name: values.clone() for name, values in published_by(engine).items()}
    try:
        engine.restore(folder)
    except CheckpointDiffers as error:
        now = published_by(engine)
        return str(error), all(torch.equal(now[name], each) for name, each in before.items())
    return "it was restored", False


def settings_of(spec: dict[str, Any], names: list[str]) -> list[dict[str, str]]:
    """Settings of megatron-core in the configurations of the trained and the reference model, by name."""
    parsed, source = _parsed(spec, None)
    engine = MegatronEngine(source, parsed, CPU)
    stages = [*engine._stages, *(engine._reference or ())]
    return [{name: str(getattr(stage.config, name)) for name in names} for stage in stages]


def refusal_of_settings(
    spec: dict[str, Any],
    *,
    folder: Path | None = None,
    layout: dict[str, Any] | None = None,
    pictured: dict[str, Any] | None = None,
) -> tuple[str, bool]:
    """The text of the refusal of an engine, and whether there were model-parallel groups at that time."""
    try:
        parsed, source = _parsed(spec, folder, pictured)
        MegatronEngine(source, parsed, CPU, layout=None if layout is None else Layout(**layout))
    except (ValueError, CheckpointUnusable) as error:
        return str(error), parallel_state.is_initialized()
    return "it was accepted", True


def classes_of_linear_layers() -> list[str]:
    """Names of the classes of the linear layers after norms, with a stand-in for Transformer Engine, which joins both."""

    class Joining(LocalSpecProvider):
        def fuse_layernorm_and_linear(self) -> bool:
            return True

        def column_parallel_layer_norm_linear(self) -> type:
            return type("Joined", (), {})

    names = []
    with patch.object(layers, "HAVE_TE", True), patch.object(layers, "TESpecProvider", Joining):
        for experts in (None, 4):
            config = SimpleNamespace(num_moe_experts=experts)
            for kind, name in ((layers.FULL_ATTENTION, "linear_qkv"), ("linear_attention", "in_proj")):
                parts = layers._layer(config, kind).submodules
                names.append(getattr(parts.self_attention.submodules, name).__name__)
            if experts is None:
                names.append(parts.mlp.keywords["submodules"].linear_fc1.__name__)
    return names


def attention(*, positions: int, sequences: int) -> dict[str, Any]:
    """Output and gradients of query, key and value of the attention of a layer, and of megatron-core's; the bytes that forward and
    backward pass take; the output for the same sequences with another last position.
    """
    parsed, _ = parse_spec(spec_of(1, random={}))
    assert parsed is not None
    MegatronRanks.of(Layout(), timedelta(seconds=600), seed=0)
    config = transformer_config(remembering(parsed, 0).config, Layout(), torch.float32)
    heads, key_heads, channels = config.num_attention_heads, config.num_query_groups, config.kv_channels
    assert key_heads is not None
    random = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(positions, sequences, count, channels, generator=random) for count in (heads, key_heads, key_heads)
    ]
    weights = torch.randn(positions, sequences, heads * channels, generator=random)
    results: dict[str, Any] = {"scores": 4 * sequences * heads * positions**2}
    for name, build_attention in (("ours", layers._backend().core_attention()), ("theirs", DotProductAttention)):
        core = build_attention(config=config, layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self")
        leaves = [each.clone().requires_grad_() for each in inputs]
        gc.collect()
        with LiveBytes() as live:
            output = core(*leaves, None)
            output.mul(weights).sum().backward()
        results[name] = [output.detach(), *(each.grad for each in leaves)]
        results[f"bytes of {name}"] = live.maximum
        changed = [torch.cat((each[:-1], -each[-1:])) for each in inputs]
        results[f"other padding of {name}"] = core(*changed, None)
    return results


def gradients_of_routers(weights: tuple[float, float]) -> list[list[torch.Tensor]]:
    """Gradients of weight and input of our router, and of megatron-core's: those of the losses per token of three
    sequences of five tokens, and of the first column of the experts' weights.
    """
    parsed, _ = parse_spec(spec_of(1, random={"experts": 4}))
    assert parsed is not None
    positions, sequences, (balance, z) = 5, 3, weights
    tokens = positions * sequences
    MegatronRanks.of(Layout(), timedelta(seconds=600), seed=0)
    config = transformer_config(remembering(parsed, 0).config, Layout(), torch.float32)
    own = copy.copy(config)
    own.moe_router_load_balancing_type, own.moe_aux_loss_coeff, own.moe_z_loss_coeff = "seq_aux_loss", balance, z
    losses, groups = RouterLosses(CPU), ProcessGroupCollection.use_mpu_process_groups()
    losses.begin(lambda sums: balance * sums[0] + z * sums[1])
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1))
    random, gradients = torch.Generator().manual_seed(0), []
    weight, values = (torch.randn(size, generator=random) for size in ((4, 32), (positions, sequences, 32)))
    for router in (
        RouterWithLosses(config=config, pg_collection=groups, losses=losses),
        TopKRouter(config=own, pg_collection=groups),
    ):
        router.set_layer_number(1)
        router.weight.data.copy_(weight)
        hidden = values.clone().requires_grad_()
        chosen, _ = router(hidden, torch.zeros(positions, sequences, dtype=torch.bool))
        chosen[:, 0].sum().backward()
        gradients.append([router.weight.grad / tokens, hidden.grad / tokens])
    return gradients


def forget() -> None:
    """Let go of the groups of a job's engines: those in globals of megatron-core, those of rotary embeddings, whose cache holds the
    last 32 with the groups of all their ranks, and those of experts: their dispatcher keeps the weights of the last choice with
    their graph, whose hooks hold the model, which the garbage collector cannot see."""
    parallel_state.destroy_model_parallel()
    RotaryEmbedding.forward.cache_clear()
    for each in gc.get_objects():
        if type(each) is MoEAlltoAllTokenDispatcher:
            each.probs = None


def _parsed(
    spec: dict[str, Any], folder: Path | None, pictured: dict[str, Any] | None = None
) -> tuple[TrainingSpec, Origin]:
    parsed, problems = parse_spec(spec)
    assert parsed is not None, problems
    if pictured is not None:
        return parsed, Origin(lambda: vision_language(**pictured))
    if folder is None:
        return parsed, Origin(partial(remembering, parsed, 0))
    return parsed, origin(parsed.model, seed=0, vocabulary=VOCABULARY, max_length=LONGEST, base=folder)


def _share_of(engine: MegatronEngine, batch: TrainBatch) -> TrainBatch:
    """The part of a batch that the driver sends to this rank."""
    number = engine._division.share_of(engine._ranks.rank, torch.distributed.get_world_size())
    assert number == engine._ranks.data_share
    return engine._division.share(batch, number)


def _scores_of(engine: MegatronEngine, batch: TrainBatch) -> torch.Tensor:
    """Collective."""
    share = _share_of(engine, batch)
    table, held = engine._score("Current", share, Offsets.of(share), 1.0), share.held_samples
    scores = torch.zeros(batch.samples, int(batch.response_lengths.max()))
    scores[held] = table.rows(held, scores[held])
    return engine._ranks.sum(scores)


def _passes_of(engine: MegatronEngine) -> list[dict[str, Any]]:
    """Will hold the bytes on the device of each part of the engine, each time when micro-batches begin to pass through the model."""
    passes: list[dict[str, Any]] = []
    run, optimizer = engine._run, engine._optimizer

    def recorded(*arguments: Any, forward_only: bool = False) -> list[Any]:
        tensors = {
            "Trained": [each for stage in engine._stages for each in stage.parameters()],
            "Reference": [each for stage in engine._reference or () for each in stage.parameters()],
            "Gradients": list(optimizer.gradients),
            "Optimizer": _state_of(engine),
        }
        passes.append({"scored": forward_only} | {part: bytes_on(each, CPU) for part, each in tensors.items()})
        return run(*arguments, forward_only=forward_only)

    engine._run = recorded  # type: ignore[method-assign]
    return passes


def _state_of(engine: MegatronEngine) -> list[torch.Tensor]:
    """Float32 weights and moments."""
    optimizer = engine._optimizer
    return [*optimizer.weights, *(each for group in range(optimizer.groups) for each in optimizer.moments(group))]


def _moments_of(engine: MegatronEngine) -> list[int]:
    """Will hold the bytes of moments on the device, each time when the engine needs other parts there."""
    counted: list[int] = []
    need = engine._offload.need

    def recorded(*parts: str) -> None:
        need(*parts)
        counted.append(bytes_on(_state_of(engine), CPU) - bytes_on(engine._optimizer.weights, CPU))

    engine._offload.need = recorded  # type: ignore[method-assign]
    return counted


def _gradients_of(engine: MegatronEngine) -> list[tuple[str, int, torch.Tensor]]:
    """Will hold the parts of the first update's gradients that this rank would publish: name, first value, values."""
    parts: list[tuple[str, int, torch.Tensor]] = []
    step = engine._optimizer.step

    def summed(parameter: torch.nn.Parameter) -> torch.Tensor:
        """Its gradient, of which each rank has the sum over ranks in its own range only."""
        values = torch.zeros_like(parameter)
        if (own := engine._optimizer._own(parameter)) is not None:
            values.view(-1)[own[0]] = parameter.main_grad.view(-1)[own[0]]
        torch.distributed.all_reduce(values, group=copies_of(parameter))
        return values

    def keep(rate: float) -> float:
        if not parts:
            published = engine._weights.publish(summed)
            parts.extend((part.name, part.start, part.values.clone()) for part in published if part.values is not None)
        return step(rate)

    engine._optimizer.step = keep  # type: ignore[method-assign]
    return parts


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), globals(), forget)
