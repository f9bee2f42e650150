"""Finds the parts of a valid manifest that this release cannot run.

`qwen35 validate`, `render`, `plan` and `run` report them. The operator does not accept such a training, so that
no resources are allocated for it.
"""

from collections.abc import Iterator

from qwen35_trainer.manifest.problems import Problem
from qwen35_trainer.manifest.rollout import RolloutSpec
from qwen35_trainer.manifest.training import TrainingSpec
from qwen35_trainer.manifest.vllm_split import DividedSizes, split_problems

VLLM_CPU_HEADS = {
    "headDim": (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512),
    "linearHeadDim": (64, 128),
}
"""Field of spec.model.source.random → the numbers of channels per head for which vLLM 0.32 has CPU kernels."""

VLLM_ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM 0.32 can reserve memory for an adapter (LoRA).

An adapter of another rank takes the memory of the next larger rank.
"""


_BF16_CACHES = {"CPU": "on the CPU", "Ascend": "on NPUs"}
"""Accelerator profile with which keys and values cannot be FP8 → its devices in a message."""
_VLLM_CONNECTORS = frozenset({"kv_offloading_size", "kv_transfer_config"})
"""Arguments with which vLLM fills its cache with keys and values that no step of the replica has computed."""


def cannot_run(spec: TrainingSpec) -> list[Problem]:
    """Return a problem, with a fix, for every part of a valid spec that this release cannot run."""
    return [*_rollout(spec), *_train(spec), *_advantage(spec)]


def _rollout(spec: TrainingSpec) -> Iterator[Problem]:
    rollout = spec.rollout
    if rollout is None:
        return
    if rollout.engine == "Torch" and rollout.tensorParallel != 1:
        message = f"a Torch replica is one process, not {rollout.tensorParallel}."
        yield Problem("spec.rollout.tensorParallel", message, "Set it to 1, or set rollout.engine to VLLM.")
    if rollout.engine == "VLLM":
        yield from _vllm(spec, rollout)
    if spec.mode == "Colocated":
        yield from _shared_devices(spec, rollout)


def _shared_devices(spec: TrainingSpec, rollout: RolloutSpec) -> Iterator[Problem]:
    """Yield a problem if replicas cannot divide the devices of a node, which they share with the train workers."""
    devices = spec.accelerator.devicesPerNode
    for path, part in (("spec.rollout", rollout), ("spec.rollout.stragglerLane", rollout.stragglerLane)):
        if part is not None and part.tensorParallel <= devices and devices % part.tensorParallel:
            message = (
                f"in mode Colocated, replicas of {part.tensorParallel} devices do not divide the {devices} of a node."
            )
            fix = "Use a divisor of accelerator.devicesPerNode, or mode FullyAsync."
            yield Problem(f"{path}.tensorParallel", message, fix)


def _vllm(spec: TrainingSpec, rollout: RolloutSpec) -> Iterator[Problem]:
    for path, part in (("spec.rollout", rollout), ("spec.rollout.stragglerLane", rollout.stragglerLane)):
        if part is not None and part.tensorParallel > spec.accelerator.devicesPerNode:
            yield from _several_nodes(spec, f"{path}.tensorParallel")
    if (random := spec.model.source.random) is not None:
        yield from split_problems(spec, DividedSizes.of_random(random))
    if spec.accelerator.profile == "CPU":
        yield from _vllm_heads(spec)
    if spec.accelerator.profile == "Ascend" and random is not None:
        message = "vllm-ascend needs the field mrope_section of published models, which random models lack."
        yield Problem("spec.model.source.random", message, "Use a published model, or set rollout.engine to Torch.")
    devices = _BF16_CACHES.get(spec.accelerator.profile)
    if devices is not None and rollout.vllm is not None and rollout.vllm.kvCachePrecision != "BF16":
        message = f"{devices}, this release stores keys and values in BF16 only."
        yield Problem("spec.rollout.vllm.kvCachePrecision", message, "Set it to BF16.")
    yield from _vllm_adapters(spec)
    if spec.train.router.replay:
        yield from _vllm_replay(spec, rollout)


def _several_nodes(spec: TrainingSpec, path: str) -> Iterator[Problem]:
    """Yield the reasons for which this release cannot run replicas that are larger than a node. path: of their size."""
    devices = spec.accelerator.devicesPerNode
    one_node = f"Set it to at most {devices} (accelerator.devicesPerNode)"
    if spec.mode == "Colocated":
        yield Problem(
            path, "in mode Colocated, a replica uses the devices of one node.", f"{one_node}, or use mode FullyAsync."
        )
    if spec.train.lora is not None:
        message = "a replica of several nodes cannot serve adapters: base weights would reach its other nodes through the first one."
        yield Problem(path, message, f"{one_node}, or remove train.lora.")
    if spec.accelerator.profile == "CPU" and devices > 1:
        message = "on the CPU, vLLM starts replicas of several nodes only with one device for each node."
        yield Problem(path, message, f"{one_node}, or set accelerator.devicesPerNode to 1.")


def _vllm_replay(spec: TrainingSpec, rollout: RolloutSpec) -> Iterator[Problem]:
    """Yield the settings with which this release cannot record the experts that vLLM chooses."""
    if spec.accelerator.profile == "Ascend":
        message = "vllm-ascend chooses experts by functions of its own, which this release does not record."
        yield Problem("spec.train.router.replay", message, "Remove it, or set rollout.engine to Torch.")
    for name in sorted(_VLLM_CONNECTORS & (rollout.vllm.extraArguments.keys() if rollout.vllm is not None else set())):
        path = f"spec.rollout.vllm.extraArguments.{name}"
        message = "keys and values that it brings back have no record of their experts (train.router.replay)."
        yield Problem(path, message, "Remove it, or train.router.replay.")


def _vllm_adapters(spec: TrainingSpec) -> Iterator[Problem]:
    if (lora := spec.train.lora) is None:
        return
    if lora.rank > VLLM_ADAPTER_RANKS[-1]:
        message = f"vLLM has places for adapters of rank {VLLM_ADAPTER_RANKS[-1]} at most."
        yield Problem("spec.train.lora.rank", message, f"Set it to at most {VLLM_ADAPTER_RANKS[-1]}.")
    random = spec.model.source.random
    if spec.accelerator.profile == "CPU" and random is not None and random.experts > 0:
        yield experts_with_adapters()


def experts_with_adapters() -> Problem:
    """Return the problem of a mixture of experts that trains adapters (LoRA) and generates with vLLM on the CPU."""
    message = "with adapters, vLLM computes experts by Triton's kernels, which do not run on CPUs."
    return Problem("spec.train.lora", message, "Remove it, or set rollout.engine to Torch.")


def _vllm_heads(spec: TrainingSpec) -> Iterator[Problem]:
    """Yield a problem for each head size of a random model for which vLLM has no CPU kernels.

    vLLM has CPU kernels for the head sizes of all published models, so these are not checked.
    """
    if (random := spec.model.source.random) is None:
        return
    for name, sizes in VLLM_CPU_HEADS.items():
        if (size := getattr(random, name)) not in sizes:
            message = f"the VLLM engine has no CPU kernels for heads of {size} channels."
            yield Problem(f"spec.model.source.random.{name}", message, f"Use one of {', '.join(map(str, sizes))}.")


def _train(spec: TrainingSpec) -> Iterator[Problem]:
    train = spec.train
    if train.multiTokenPrediction is not None:
        yield from _prediction_head(spec)
    if train.engine == "Megatron":
        yield from _megatron(spec)
        return
    for name in ("tensor", "pipeline", "virtualPipeline", "expertTensor"):
        if (degree := getattr(train.parallelism, name)) != 1:
            path = f"spec.train.parallelism.{name}"
            message = f"the FSDP engine has no {name} parallelism, so the degree cannot be {degree}."
            yield Problem(path, message, "Set it to 1, since FSDP shards all weights, or set train.engine to Megatron.")


def _prediction_head(spec: TrainingSpec) -> Iterator[Problem]:
    """Yield a problem for each setting with which this release cannot train the head for multi-token prediction."""
    path = "spec.train.multiTokenPrediction"
    if spec.train.engine != "Megatron":
        message = f"the {spec.train.engine} engine has no prediction head."
        yield Problem(path, message, "Remove it, or set train.engine to Megatron.")
    if spec.mode != "SFT":
        message = f"mode {spec.mode} does not train the prediction head, and vLLM gets no new values of it."
        yield Problem(path, message, "Remove it: exports then have the head of the model's folder, unchanged.")
    if spec.model.source.random is not None:
        message = "random models have no prediction head."
        yield Problem(path, message, "Remove it, or name a published model in model.source.")


def _megatron(spec: TrainingSpec) -> Iterator[Problem]:
    """Yield the settings that the Megatron engine of this release does not have."""
    train, engine = spec.train, "the Megatron engine of this release"
    random = spec.model.source.random
    if random is not None and random.experts > 0 and random.expertsPerToken == 1:
        path = "spec.model.source.random.expertsPerToken"
        message = f"{engine} routes each token to at least 2 experts (num_experts_per_tok)."
        yield Problem(path, message, "Set it to at least 2, or set train.engine to FSDP.")
    if train.parallelism.context != 1:
        path = "spec.train.parallelism.context"
        yield Problem(path, f"{engine} has no context parallelism.", "Set it to 1, or set train.engine to FSDP.")
    without = {
        "batch.removePadding": (train.batch.removePadding, "pads sequences", "Set it to false"),
        "optimizer.type": (train.optimizer.type != "AdamW", f"has no {train.optimizer.type}", "Set it to AdamW"),
        "freeze": (bool(train.freeze), "trains all parameters", "Remove it"),
        "lora": (train.lora is not None, "has no adapters", "Remove it"),
    }
    for name, (is_set, lack, fix) in without.items():
        if is_set:
            yield Problem(f"spec.train.{name}", f"{engine} {lack}.", f"{fix}, or set train.engine to FSDP.")


def _advantage(spec: TrainingSpec) -> Iterator[Problem]:
    if spec.mode != "SFT" and spec.algorithm.advantage == "GAE":
        message = "GAE needs a value model, which this release cannot train."
        yield Problem("spec.algorithm.advantage", message, "Use GRPO or RLOO.")
