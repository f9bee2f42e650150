"""Checks of the arithmetic of devices and batches. Each fix is computed, and valid."""

import math
from collections.abc import Iterator, Sequence

from qwen35_trainer.spec.accelerator import MAX_NODES
from qwen35_trainer.spec.problems import Problem, counted, either
from qwen35_trainer.spec.training import TrainingSpec

CUT = "spec.train.parallelism"


def dense(spec: TrainingSpec) -> Iterator[Problem]:
    """The train pool holds whole copies of the dense layers: world / (TP·PP·CP) is whole."""
    yield from _divides(spec, ("tensor", "pipeline", "context"))


def expert(spec: TrainingSpec) -> Iterator[Problem]:
    """The train pool holds whole copies of the experts: world / (ETP·EP·PP) is whole. Only with experts cut."""
    if spec.train.parallelism.expert > 1:
        yield from _divides(spec, ("expertTensor", "expert", "pipeline"))


def copies(spec: TrainingSpec) -> Iterator[Problem]:
    """FSDP's copies of the model are of equal size, and no copy cuts a sequence's devices apart."""
    train = spec.train
    if train.parallelism.replicas == 1:
        return
    if train.engine == "FSDP":
        yield from _divides(spec, ("replicas", "context"))
    else:
        yield Problem(
            f"{CUT}.replicas",
            f"{train.parallelism.replicas} means nothing to {train.engine}, whose copies follow from the other degrees.",
            "Remove it, or use engine FSDP.",
        )


def heads(spec: TrainingSpec) -> Iterator[Problem]:
    """Devices that share a sequence share the heads of each layer. Of a checkpoint's heads only the engine knows."""
    shape, ranks = spec.model.source.random, spec.train.parallelism.context
    if shape is None:
        return
    found = {name: getattr(shape, name) for name in ("attentionHeads", "linearKeyHeads", "linearValueHeads")}
    if uneven := [f"{name} {count}" for name, count in found.items() if count % ranks]:
        fitting = [size for size in range(1, ranks) if all(count % size == 0 for count in found.values())]
        yield Problem(
            f"{CUT}.context",
            f"{ranks} does not divide {', '.join(uneven)}: each device takes whole heads.",
            f"Use {fitting[-1]}.",
        )


def offload(spec: TrainingSpec) -> Iterator[Problem]:
    """FSDP keeps gradients where the parameters are."""
    rests = spec.train.offload
    if spec.train.engine == "FSDP" and rests.gradients and not rests.parameters:
        yield Problem(
            "spec.train.offload.gradients",
            "true without parameters: FSDP keeps gradients where the parameters are.",
            "Set parameters to true, or gradients to false.",
        )


def batch(spec: TrainingSpec) -> Iterator[Problem]:
    """Samples of an update divide over data-parallel ranks and their micro-batches, unless tokens fill those."""
    size, cut = spec.train.batch, spec.train.parallelism
    if size.dynamic or spec.world_size % (cut.tensor * cut.pipeline * cut.context):
        return
    ranks, micro = spec.data_parallel, size.microBatchPerDevice
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
        f"{samples} does not divide over {ranks} data-parallel ranks × microBatchPerDevice {micro} = {ranks * micro}.",
        f"Use promptsPerUpdate {either(prompts)}.",
    )


def token_budget(spec: TrainingSpec) -> Iterator[Problem]:
    """One sequence always fits the token budget."""
    size = spec.train.batch
    if not size.dynamic:
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
    """A replica is a whole part of a node, or a whole number of nodes that divides its pool."""
    if (pool := spec.rollout) is None:
        return
    set_aside = pool.lane.nodes if pool.lane and pool.lane.nodes < pool.nodes else 0
    yield from _fits(spec, "spec.rollout", pool.tensorParallel, pool.nodes - set_aside)
    if pool.lane is not None:
        yield from _fits(spec, "spec.rollout.lane", pool.lane.tensorParallel, pool.lane.nodes)


def _divides(spec: TrainingSpec, axes: tuple[str, ...]) -> Iterator[Problem]:
    sizes = {axis: getattr(spec.train.parallelism, axis) for axis in axes}
    product, nodes, devices = math.prod(sizes.values()), spec.train.nodes, spec.accelerator.perNode
    world = nodes * devices
    if world % product == 0:
        return
    options = []
    # The first axis that alone can mend it, the one that hurts least to change first.
    for axis in ("pipeline", "replicas", "context", "expert", "tensor", "expertTensor"):
        if sizes.get(axis, 1) > 1 and world % (product // sizes[axis]) == 0:
            room = world // (product // sizes[axis])
            mended = _around(sizes[axis], [size for size in range(1, room + 1) if room % size == 0])
            options.append(f"{axis} {either(mended)}")
            break
    enough = product // math.gcd(product, devices)
    if (more := -(-nodes // enough) * enough) <= MAX_NODES:
        options.append(counted(more, "node"))
    yield Problem(
        CUT,
        f"{' × '.join(f'{axis} {size}' for axis, size in sizes.items())} = {product} does not divide "
        f"{counted(nodes, 'node')} × {devices} devices = {world}.",
        f"Use {', or '.join(options) or 'smaller sizes'}.",
    )


def _fits(spec: TrainingSpec, path: str, size: int, nodes: int) -> Iterator[Problem]:
    devices = spec.accelerator.perNode
    if _whole(size, nodes, devices):
        return
    fitting = _around(size, [other for other in range(1, nodes * devices + 1) if _whole(other, nodes, devices)])
    yield Problem(
        f"{path}.tensorParallel",
        f"{size} does not fit {counted(nodes, 'node')} × {devices} devices: a replica is a whole part of a node, or whole nodes.",
        f"Use {either(fitting)}.",
    )


def _whole(size: int, nodes: int, devices: int) -> bool:
    if size <= devices:
        return devices % size == 0
    return size % devices == 0 and nodes % (size // devices) == 0


def _around(value: int, options: Sequence[int]) -> list[int]:
    """The nearest of the rising options below and above."""
    below = [option for option in options if option < value]
    above = [option for option in options if option > value]
    return [*below[-1:], *above[:1]]
