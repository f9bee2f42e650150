"""Checks that devices and batches divide evenly.

The fix in a problem is computed, so that following it gives a valid manifest.
"""

import math
from collections.abc import Iterator, Sequence

from qwen35_trainer.formatting import counted
from qwen35_trainer.manifest.accelerator import MAX_NODES
from qwen35_trainer.manifest.problems import Problem, either
from qwen35_trainer.manifest.rollout import RolloutSpec
from qwen35_trainer.manifest.train import ParallelismSpec
from qwen35_trainer.manifest.training import TrainingSpec

PARALLELISM = "spec.train.parallelism"


def dense(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that the train pool holds whole copies of the dense layers.

    tensor × pipeline × context must divide the number of devices.
    """
    yield from _divides(spec, ("tensor", "pipeline", "context"))


def expert(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that the train pool holds whole copies of the experts.

    With expert parallelism, copies × expert must divide the number of devices, and with Megatron expertTensor × expert ×
    pipeline.
    """
    if spec.train.parallelism.expert > 1:
        megatron = spec.train.engine == "Megatron"
        yield from _divides(spec, ("expertTensor", "expert", "pipeline") if megatron else ("copies", "expert"))


def whole_experts(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that the devices of `parallelism.expert` can divide the experts of a layer evenly.

    A manifest contains the number of experts only for a random model. For others, `planning/model_limits.py` checks it.
    """
    if (random := spec.model.source.random) is not None:
        problem = expert_problem(spec.train.parallelism.expert, random.experts)
        yield from () if problem is None else (problem,)


def expert_problem(devices: int, experts: int) -> Problem | None:
    """Return the problem of `devices` devices that cannot divide the experts of a layer evenly; None if they can.

    experts: number of experts of a layer; 0 for a dense model.
    """
    path = f"{PARALLELISM}.expert"
    if devices == 1 or (experts and experts % devices == 0):
        return None
    if not experts:
        return Problem(
            path, f"{devices} devices divide the experts of a layer, and the model is dense.", "Set it to 1."
        )
    fitting = _around(devices, [size for size in range(1, experts + 1) if experts % size == 0])
    return Problem(
        path, f"{devices} devices do not divide the {experts} experts of a layer.", f"Use {either(fitting)}."
    )


def virtual_stages(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that pipeline stages can be divided into virtual stages with equal numbers of layers.

    Also check that there are at least two pipeline stages if there are virtual stages. A manifest contains the number of
    layers only for a random model. For others, `planning/model_limits.py` checks the division.
    """
    cut, random = spec.train.parallelism, spec.model.source.random
    if cut.virtualPipeline > 1 and cut.pipeline == 1:
        message = f"{cut.virtualPipeline} virtual stages need pipeline stages, and pipeline is 1."
        yield Problem(f"{PARALLELISM}.virtualPipeline", message, "Set it to 1, or pipeline to at least 2.")
    elif random is not None and (problem := virtual_problem(cut, random.layers)) is not None:
        yield problem


def virtual_problem(cut: ParallelismSpec, layers: int) -> Problem | None:
    """Return the problem of virtual stages that do not divide a model of `layers` layers evenly; None if they do."""
    if cut.virtualPipeline == 1 or (layers % cut.virtualPipeline == 0 and layers >= cut.virtualPipeline * cut.pipeline):
        return None
    divisors = [part for part in range(1, layers // cut.pipeline + 1) if layers % part == 0]
    return Problem(
        f"{PARALLELISM}.virtualPipeline",
        f"{cut.virtualPipeline} virtual stages of each of {cut.pipeline} pipeline stages cannot divide {layers} layers evenly.",
        f"Use {either(_around(cut.virtualPipeline, divisors)) if divisors else 1}.",
    )


def copies(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that FSDP's copies of the model (HSDP) have equal numbers of devices, and that a
    context-parallel group is within one copy.

    With any other engine, parallelism.copies must be 1.
    """
    train = spec.train
    if train.parallelism.copies == 1:
        return
    if train.engine == "FSDP":
        yield from _divides(spec, ("copies", "context"))
    else:
        yield Problem(
            f"{PARALLELISM}.copies",
            f"{train.parallelism.copies} has no effect with {train.engine}, whose copies follow from the other degrees.",
            "Remove it, or use engine FSDP.",
        )


def heads(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that the number of context-parallel ranks divides the numbers of query heads and of Gated DeltaNet heads.

    A manifest contains these numbers only for a random model. For a checkpoint, the engine checks them when it loads
    the checkpoint.
    """
    shape, ranks = spec.model.source.random, spec.train.parallelism.context
    if shape is None:
        return
    head_counts = {name: getattr(shape, name) for name in ("attentionHeads", "linearKeyHeads", "linearValueHeads")}
    if uneven := [f"{name} {count}" for name, count in head_counts.items() if count % ranks]:
        fitting = [size for size in range(1, ranks) if all(count % size == 0 for count in head_counts.values())]
        yield Problem(
            f"{PARALLELISM}.context",
            f"{ranks} does not divide {', '.join(uneven)}: each device takes whole heads.",
            f"Use {fitting[-1]}.",
        )


def offload(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that the FSDP engine offloads gradients only together with parameters, because FSDP keeps gradients where
    the parameters are.

    Also check that only the FSDP engine offloads activations, and only those that recomputation starts from.
    """
    offloaded = spec.train.offload
    if spec.train.engine == "FSDP" and offloaded.gradients and not offloaded.parameters:
        yield Problem(
            "spec.train.offload.gradients",
            "true without parameters: FSDP keeps gradients where the parameters are.",
            "Set parameters to true, or gradients to false.",
        )
    if offloaded.activations and spec.train.engine != "FSDP":
        yield Problem(
            "spec.train.offload.activations",
            f"true with {spec.train.engine}, which keeps activations on the devices.",
            "Set it to false, or use engine FSDP.",
        )
    if offloaded.activations and not spec.train.activationCheckpointing:
        yield Problem(
            "spec.train.offload.activations",
            "true without train.activationCheckpointing: only the inputs of layers that are computed again are offloaded.",
            "Set activationCheckpointing to true, or activations to false.",
        )


def resharding(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that reshardAfterForward is switched off only with the FSDP engine, the only one that gathers layers."""
    if not spec.train.reshardAfterForward and spec.train.engine != "FSDP":
        yield Problem(
            "spec.train.reshardAfterForward",
            f"false with {spec.train.engine}, which gathers no parameters of layers.",
            "Remove it, or use engine FSDP.",
        )


def batch(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that the samples of an update divide evenly over data-parallel ranks and micro-batches.

    There is no such rule with dynamicMicroBatches.
    """
    size, cut = spec.train.batch, spec.train.parallelism
    if size.dynamicMicroBatches or spec.world_size % (cut.tensor * cut.pipeline * cut.context):
        return
    ranks, micro = spec.data_parallel, size.microBatchSequences
    if spec.samples_per_update % (ranks * micro) == 0:
        return
    group = spec.samples_per_update // size.promptsPerUpdate
    step = ranks * micro // math.gcd(ranks * micro, group)
    prompts = _around(size.promptsPerUpdate, range(step, size.promptsPerUpdate + step + 1, step))
    samples = f"promptsPerUpdate {size.promptsPerUpdate}"
    if spec.mode != "SFT":
        samples += f" × groupSize {group} = {spec.samples_per_update}"
    yield Problem(
        "spec.train.batch",
        f"{samples} does not divide over {ranks} data-parallel ranks × microBatchSequences {micro} = {ranks * micro}.",
        f"Use promptsPerUpdate {either(prompts)}.",
    )


def shared_prompts(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that samples can share their prompt if `train.batch.sharePrompts` is set.

    This needs the FSDP engine, groups, packed rows, and micro-batches that can hold several samples.
    """
    path, size = "spec.train.batch.sharePrompts", spec.train.batch
    if not size.sharePrompts:
        return
    if spec.train.engine != "FSDP":
        yield Problem(
            path,
            f"true with {spec.train.engine}, which computes each sample with its own prompt.",
            "Set it to false, or use engine FSDP.",
        )
        return
    if spec.mode == "SFT":
        yield Problem(path, "true in mode SFT, whose samples have no groups.", "Set it to false.")
        return
    if not size.removePadding:
        yield Problem(
            path,
            "true without removePadding: samples share a prompt only in a packed row.",
            "Set train.batch.removePadding to true, or sharePrompts to false.",
        )
    if size.microBatchSequences == 1 and not size.dynamicMicroBatches:
        yield Problem(
            path,
            "true with microBatchSequences 1: a micro-batch of one sample shares no prompt.",
            "Set microBatchSequences to at least 2, or dynamicMicroBatches to true, or sharePrompts to false.",
        )


def token_budget(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that a micro-batch of dynamicMicroBatches holds the longest possible sequence."""
    size = spec.train.batch
    if not size.dynamicMicroBatches:
        return
    longest = spec.data.maxPromptTokens + spec.data.maxResponseTokens
    ranks = spec.train.parallelism.context
    if longest > size.maxTokensPerDevice * ranks:
        yield Problem(
            "spec.train.batch.maxTokensPerDevice",
            f"{size.maxTokensPerDevice} × context {ranks} is less than one sequence: maxPromptTokens "
            f"{spec.data.maxPromptTokens} + maxResponseTokens {spec.data.maxResponseTokens} = {longest}.",
            f"Use at least {-(-longest // ranks)}.",
        )


def replicas(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that the replicas of the straggler lane fit the lane's nodes, and that all other replicas fit the other nodes.

    The nodes of the straggler lane are reserved for long sequences. Replicas that fit into a node must divide its
    devices evenly. A larger replica must take whole nodes, and the number of its nodes must divide the number of
    available nodes, also in the smallest and the largest pool.
    """
    if (pool := spec.rollout) is None:
        return
    set_aside = pool.stragglerLane.nodes if pool.stragglerLane and pool.stragglerLane.nodes < pool.nodes else 0
    yield from _fits(spec, "spec.rollout", pool.tensorParallel, pool.nodes - set_aside)
    yield from _whole_replicas(spec, pool, set_aside)
    if pool.stragglerLane is not None:
        yield from _fits(
            spec, "spec.rollout.stragglerLane", pool.stragglerLane.tensorParallel, pool.stragglerLane.nodes
        )


def _divides(spec: TrainingSpec, axes: tuple[str, ...]) -> Iterator[Problem]:
    sizes = {axis: getattr(spec.train.parallelism, axis) for axis in axes}
    product, nodes, devices = math.prod(sizes.values()), spec.train.nodes, spec.accelerator.devicesPerNode
    world = nodes * devices
    if world % product == 0:
        return
    options = []
    # Propose the first axis whose change alone suffices, in the order of their cost in performance.
    for axis in ("pipeline", "copies", "context", "expert", "tensor", "expertTensor"):
        if sizes.get(axis, 1) > 1 and world % (product // sizes[axis]) == 0:
            room = world // (product // sizes[axis])
            mended = _around(sizes[axis], [size for size in range(1, room + 1) if room % size == 0])
            options.append(f"{axis} {either(mended)}")
            break
    enough = product // math.gcd(product, devices)
    if (more := -(-nodes // enough) * enough) <= MAX_NODES:
        options.append(f"{more} nodes")
    yield Problem(
        PARALLELISM,
        f"{' × '.join(f'{axis} {size}' for axis, size in sizes.items())} = {product} does not divide "
        f"{counted(nodes, 'node')} × {devices} devices = {world}.",
        f"Use {', or '.join(options) or 'smaller sizes'}.",
    )


def _fits(spec: TrainingSpec, path: str, size: int, nodes: int) -> Iterator[Problem]:
    devices = spec.accelerator.devicesPerNode
    if _whole(size, nodes, devices):
        return
    fitting = _around(size, [other for other in range(1, nodes * devices + 1) if _whole(other, nodes, devices)])
    yield Problem(
        f"{path}.tensorParallel",
        f"{size} does not fit {counted(nodes, 'node')} × {devices} devices: a replica is an equal part of a node, or several whole nodes.",
        f"Use {either(fitting)}.",
    )


def _whole_replicas(spec: TrainingSpec, pool: RolloutSpec, set_aside: int) -> Iterator[Problem]:
    """Check that replicas of several nodes use all nodes of the smallest and the largest pool.

    set_aside: number of nodes of the straggler lane.
    """
    size = spec.nodes_of_replica(lane=False)
    for name in ("minNodes", "maxNodes"):
        nodes = getattr(pool, name)
        if nodes is None or nodes <= set_aside or (nodes - set_aside) % size == 0:
            continue
        fitting = _around(nodes, [other + set_aside for other in range(size, MAX_NODES - set_aside + 1, size)])
        yield Problem(
            f"spec.rollout.{name}",
            f"{nodes} leaves a part of a replica: with rollout.tensorParallel {pool.tensorParallel}, each has {size} nodes.",
            f"Use {either(fitting)}.",
        )


def _whole(size: int, nodes: int, devices: int) -> bool:
    if size <= devices:
        return devices % size == 0
    return size % devices == 0 and nodes % (size // devices) == 0


def _around(value: int, options: Sequence[int]) -> list[int]:
    """Return the nearest option below and the nearest above `value`, or only the one that exists.

    options: in ascending order.
    """
    below = [option for option in options if option < value]
    above = [option for option in options if option > value]
    return [*below[-1:], *above[:1]]
