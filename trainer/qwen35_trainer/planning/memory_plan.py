"""Plans the memory of a training, and reports what its devices cannot hold.

The module is pure. The operator computes a plan for each training, so plans must be fast: one takes less than a
millisecond.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qwen35_trainer.catalog.devices import DEVICES, DeviceName
from qwen35_trainer.catalog.model_sizes import ModelSizes
from qwen35_trainer.formatting import counted
from qwen35_trainer.manifest.problems import Problem
from qwen35_trainer.manifest.training import TrainingSpec
from qwen35_trainer.planning import fsdp_memory, megatron_memory
from qwen35_trainer.planning.activations import Kernels
from qwen35_trainer.planning.host_memory import PodMemory, colocated_pod, rollout_pod, train_pod
from qwen35_trainer.planning.model_limits import larger_degrees, larger_replica
from qwen35_trainer.planning.rollout_memory import GRAPH_BYTES, ReplicaMemory, replica_memory
from qwen35_trainer.planning.train_memory import RankMemory

DEVICE_RESERVE = 0.08
"""Share of a device's memory that a plan leaves free for libraries, communication buffers, and memory that the
allocator cannot use. An assumption."""
GIB = float(1 << 30)


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of a train rank, of a replica, and of a pod of each pool."""

    shape: ModelSizes
    """The sizes of the model."""
    device: DeviceName | None
    """The kind of device. None: a CPU, whose tensors are in the pod's memory."""
    device_memory: float
    """Bytes that a device has; infinity for a CPU."""
    train: RankMemory
    replica: ReplicaMemory | None
    """The memory of one device of a replica; None in mode SFT."""
    pods: tuple[PodMemory, ...]
    """One pod of each pool. In mode Colocated, a single pod with ranks and replicas.

    Their memory is enough for data with pictures, because the operator does not know the data.
    """


def memory_plan(
    shape: ModelSizes, spec: TrainingSpec, device: DeviceName | None, *, pictures: bool = False
) -> MemoryPlan:
    """Return the memory that a training needs.

    device: the kind of device; None: a CPU. pictures: whether the data contain pictures, so that the vision tower trains.
    It changes the plan of the devices only.
    """
    on_cpu = device is None
    memory = float("inf") if device is None else DEVICES[device].memory
    train = _rank_memory(shape, spec, device, pictures=pictures)
    possible = (train, _rank_memory(shape, spec, device, pictures=True))
    replica = None if spec.rollout is None else replica_memory(shape, spec, memory)
    of_rank = max(rank.host + (rank.device.total if on_cpu else 0.0) for rank in possible)
    parked = 0.0 if on_cpu else max(rank.parked for rank in possible)
    of_replica = replica.total if replica is not None and on_cpu else 0.0
    of_train, of_rollout = train_pod(shape, spec, of_rank), rollout_pod(shape, spec, of_replica)
    pods = (of_train,) if of_rollout is None else (of_train, of_rollout)
    if of_rollout is not None and spec.mode == "Colocated":
        pods = (colocated_pod(shape, spec, of_train, of_rollout, parked),)
    return MemoryPlan(shape, device, memory, train, replica, pods)


def _rank_memory(shape: ModelSizes, spec: TrainingSpec, device: DeviceName | None, *, pictures: bool) -> RankMemory:
    kernels: Kernels = "Fused" if device is not None and DEVICES[device].profile == "NVIDIA" else "Torch"
    if spec.train.engine == "Megatron":
        return megatron_memory.rank_memory(shape, spec, kernels, on_cpu=device is None, pictures=pictures)
    return fsdp_memory.rank_memory(shape, spec, kernels, pictures=pictures)


def device_misfits(plan: MemoryPlan, spec: TrainingSpec) -> Iterator[Problem]:
    """Yield what the devices cannot hold, each as a problem with a fix.

    There is a problem if a train rank does not fit, and one if a replica cannot hold a
    single sequence of the maximum length, or vLLM would not start with its number of slots.
    """
    limit = plan.device_memory * (1 - DEVICE_RESERVE)
    needed = plan.train.device.total
    if needed > limit:
        yield Problem(
            "spec.train",
            f"with {counted(spec.train.nodes, 'node')} × {counted(spec.accelerator.devicesPerNode, 'device')}, a rank needs {gib(needed)} at its peak "
            f"({plan.train.peak}), and {plan.device} has {gib(limit)} free.",
            _train_fix(spec, plan),
        )
    if (replica := plan.replica) is not None and replica.fitting < 1:
        yield Problem(
            "spec.rollout",
            f"weights and workspace take {gib(replica.weights + replica.workspace)} of {gib(replica.available)}, "
            f"and a sequence of the maximum length needs {gib(replica.per_sequence)}.",
            _replica_fix(spec, plan.shape),
        )
    elif replica is not None and (room := replica.graph_sequences) is not None and room < replica.slots:
        options = "set rollout.vllm.eager to true, or raise rollout.memoryFraction"
        yield Problem(
            "spec.rollout.maxSequencesPerReplica",
            f"{replica.slots} sequences need {gib(replica.slots * (replica.graph_block or 0.0))} for their states before vLLM records CUDA "
            f"graphs, and about {gib(max(0.0, replica.for_sequences - GRAPH_BYTES))} are left; it would not start.",
            f"Lower it to at most {room}, or {options}." if room else f"{options[0].upper()}{options[1:]}.",
        )


def gib(size: float) -> str:
    """Format a number of bytes as GiB with one decimal, such as "1.5 GiB"."""
    return f"{size / GIB:,.1f} GiB"


def _replica_fix(spec: TrainingSpec, shape: ModelSizes) -> str:
    if spec.rollout is None or spec.rollout.engine != "VLLM":
        return "Set rollout.engine to VLLM, which can divide a replica over several devices, or use devices with more memory."
    if (larger := larger_replica(shape, spec)) is None:
        return "Raise rollout.memoryFraction, or use devices with more memory."
    return f"Raise rollout.tensorParallel to {larger} or more, or rollout.memoryFraction."


def _train_fix(spec: TrainingSpec, plan: MemoryPlan) -> str:
    train, parts = spec.train, plan.train.device
    fixes = []
    if not train.activationCheckpointing and parts.activations > parts.total / 4:
        fixes.append("set train.activationCheckpointing to true")
    elif train.engine == "FSDP" and not train.offload.activations and parts.activations > parts.total / 4:
        fixes.append("set train.offload.activations to true")
    if train.engine == "FSDP" and not train.offload.parameters:
        fixes.append("set train.offload.parameters to true")
    if train.engine == "Megatron" and not train.offload.optimizer:
        fixes.append("set train.offload.optimizer to true")
    if train.engine == "Megatron" and (degrees := larger_degrees(plan.shape, spec)):
        fixes.append(f"raise train.parallelism.{' or '.join(degrees)}")
    if parts.activations > parts.total / 4 and train.engine == "FSDP":
        fixes.append("raise train.parallelism.context")
    fixes.append(f"use more than {counted(train.nodes, 'node')}")
    text = ", or ".join(fixes)
    return f"{text[0].upper()}{text[1:]}."
