"""Finds degrees and lengths that the sizes of the model do not allow.

    rollout.tensorParallel      the rules of `manifest/vllm_split.py`
    train.parallelism           heads, channels, experts and layers, as the engines check them when they load the model
    prompt and response         at most the positions of the model, beyond which vLLM refuses to start

A manifest alone has the sizes of a random model only. Here they come from the catalog or from config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from qwen35_trainer.catalog.model_sizes import ModelSizes
from qwen35_trainer.manifest.layout import PARALLELISM, expert_problem, virtual_problem
from qwen35_trainer.manifest.problems import Problem
from qwen35_trainer.manifest.train import ParallelismSpec
from qwen35_trainer.manifest.training import TrainingSpec
from qwen35_trainer.manifest.vllm_split import DividedSizes, split_problems

LONGER_ANYWAY = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
"""Environment variable with which vLLM accepts a context longer than the positions of the model."""


def limit_problems(shape: ModelSizes, spec: TrainingSpec) -> Iterator[Problem]:
    """Yield a problem, with a fix, for each degree that does not divide the model, and for a context that is too long."""
    yield from split_problems(spec, _divided(shape, spec))
    yield from degree_problems(shape, spec)
    yield from context_problems(spec, shape.positions)


def context_problems(spec: TrainingSpec, positions: int | None) -> Iterator[Problem]:
    """Yield a problem if a prompt and its response can be longer than the model's positions, so that vLLM would not start.

    positions: maximum number of tokens that the model's config.json allows; None: not known. A manifest that makes vLLM
    accept such a context, by an environment variable of its pods or by `hf_overrides`, has no such problem.
    """
    rollout, data = spec.rollout, spec.data
    if positions is None or rollout is None or rollout.engine != "VLLM":
        return
    overridden = rollout.vllm is not None and "hf_overrides" in rollout.vllm.extraArguments
    if overridden or LONGER_ANYWAY in str(spec.pods) or data.maxPromptTokens + data.maxResponseTokens <= positions:
        return
    message = (
        f"{data.maxResponseTokens} and maxPromptTokens {data.maxPromptTokens} together are above the {positions} "
        "positions of the model, and vLLM would not start."
    )
    room = positions - data.maxPromptTokens
    fix = f"Lower it to at most {room}." if room > 0 else f"Lower maxPromptTokens below {positions}, and this field."
    yield Problem("spec.data.maxResponseTokens", message, fix)


def larger_replica(shape: ModelSizes, spec: TrainingSpec) -> int | None:
    """Return the next larger rollout.tensorParallel that vLLM can divide the model by; None if there is none.

    A replica is an equal part of a node, or several whole nodes.
    """
    rollout, devices = spec.rollout, spec.accelerator.devicesPerNode
    if rollout is None or rollout.engine != "VLLM":
        return None
    sizes, whole = _divided(shape, spec), rollout.vllm is not None and rollout.vllm.expert_parallel
    largest = devices if spec.mode == "Colocated" else devices * rollout.nodes
    for degree in range(rollout.tensorParallel + 1, largest + 1):
        fits = devices % degree == 0 or degree % devices == 0
        if fits and not sizes.indivisible(degree, expert_parallel=whole):
            return degree
    return None


def larger_degrees(shape: ModelSizes, spec: TrainingSpec) -> list[str]:
    """Return the names of the degrees of the Megatron engine that can be raised for this model, of tensor, pipeline and expert."""
    cut, ranks = spec.train.parallelism, spec.world_size
    sizes = [*_tensor_sizes(shape).values()]
    divides: dict[str, Callable[[int], bool]] = {
        "tensor": lambda degree: all(size % degree == 0 for size in sizes),
        "pipeline": lambda degree: degree <= shape.layers and not shape.tied,
        "expert": lambda degree: shape.experts > 0 and shape.experts % degree == 0,
    }
    return [
        name
        for name, allowed in divides.items()
        if any(ranks % degree == 0 and allowed(degree) for degree in range(getattr(cut, name) + 1, ranks + 1))
    ]


def _divided(shape: ModelSizes, spec: TrainingSpec) -> DividedSizes:
    if (random := spec.model.source.random) is not None:
        return DividedSizes.of_random(random)
    layers = {"intermediate_size": shape.intermediate}
    if shape.experts:
        layers = {
            "num_experts": shape.experts,
            "moe_intermediate_size": shape.expert_intermediate,
            "shared_expert_intermediate_size": shape.shared_intermediate,
        }
    return DividedSizes.of_configuration(_heads(shape) | layers | {"vocab_size": shape.vocabulary})


def _heads(shape: ModelSizes) -> dict[str, int]:
    """Return the numbers of heads, under their names in config.json."""
    heads = {"num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads}
    if shape.linear_layers:
        heads |= {
            "linear_num_key_heads": shape.linear_key_heads,
            "linear_num_value_heads": shape.linear_value_heads,
        }
    return heads


def _tensor_sizes(shape: ModelSizes) -> dict[str, int]:
    """Return what the tensor-parallel ranks of the Megatron engine divide (`engines/megatron/layout.py`)."""
    if not shape.experts:
        return _heads(shape) | {"intermediate_size": shape.intermediate}
    shared = {"shared_expert_intermediate_size": shape.shared_intermediate} if shape.shared_intermediate else {}
    return _heads(shape) | shared


def degree_problems(shape: ModelSizes, spec: TrainingSpec) -> Iterator[Problem]:
    """Yield a problem, with a fix, for each degree of train.parallelism by which the engine cannot divide the model."""
    cut = spec.train.parallelism
    if (problem := expert_problem(cut.expert, shape.experts)) is not None:
        yield problem
    if spec.train.engine == "Megatron":
        yield from _stage_problems(shape, cut)
        yield from _undivided("tensor", cut.tensor, _tensor_sizes(shape))
        if shape.experts:
            yield from _undivided(
                "expertTensor", cut.expertTensor, {"moe_intermediate_size": shape.expert_intermediate}
            )
    else:  # context-parallel ranks of FSDP take whole heads, and several may have the same key and value heads
        heads = {name: size for name, size in _heads(shape).items() if name != "num_key_value_heads"}
        yield from _undivided("context", cut.context, heads)


def _stage_problems(shape: ModelSizes, cut: ParallelismSpec) -> Iterator[Problem]:
    field = f"{PARALLELISM}.pipeline"
    if shape.tied and cut.pipeline > 1:
        message = (
            f"{cut.pipeline} stages, and the output layer of this model is its embedding, which one stage must have."
        )
        yield Problem(field, message, "Set it to 1.")
    elif cut.pipeline > shape.layers:
        yield Problem(field, f"{cut.pipeline} stages, and the model has {shape.layers} layers.", "Use at most as many.")
    elif (problem := virtual_problem(cut, shape.layers)) is not None:
        yield problem


def _undivided(field: str, degree: int, sizes: Mapping[str, int]) -> Iterator[Problem]:
    if uneven := [f"{name} {size}" for name, size in sizes.items() if size % degree]:
        fitting = max(less for less in range(1, degree) if all(size % less == 0 for size in sizes.values()))
        message = f"{degree} does not divide {', '.join(uneven)} of this model."
        yield Problem(f"{PARALLELISM}.{field}", message, f"Use {fitting}, or a model with other sizes.")
