"""Plans what a training needs, how long an update takes, and what does not fit. Pure: manifest and sizes in, plan out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from qwen35_trainer.catalog.devices import DEVICES, Device, DeviceName
from qwen35_trainer.catalog.model_sizes import ModelSizes
from qwen35_trainer.manifest.problems import Problem
from qwen35_trainer.manifest.training import TrainingSpec
from qwen35_trainer.planning import fsdp_memory, megatron_memory, parameters
from qwen35_trainer.planning.assumptions import MEAN_LENGTH_SHARE
from qwen35_trainer.planning.generation_time import generation_time
from qwen35_trainer.planning.host_memory import PodMemory, colocated_pod, rollout_pod, train_pod
from qwen35_trainer.planning.measured_run import MeasuredRun
from qwen35_trainer.planning.publication_time import publication_time
from qwen35_trainer.planning.rollout_memory import ReplicaMemory, replica_memory
from qwen35_trainer.planning.train_memory import RankMemory
from qwen35_trainer.planning.train_time import train_time
from qwen35_trainer.planning.update_time import UpdateTime, update_time

DEVICE_RESERVE = 0.08
"""Share of a device that a plan leaves free: libraries, communication buffers, and what the allocator cannot use. An assumption."""
GIB = float(1 << 30)


@dataclass(frozen=True)
class Inputs:
    """Everything that a plan needs in addition to the manifest."""

    shape: ModelSizes
    device: DeviceName | None
    """None: a CPU, whose memory is that of the pod, and whose time is not planned."""
    mean: float | None
    """Tokens of a response in the mean; None: a share of the maximum."""
    pictures: bool
    """Whether the data contain pictures."""
    pod_memory: float
    """Bytes of memory that the operator requests for a pod."""
    pod_shm: float
    """Bytes that /dev/shm of a pod may take."""
    prompt: float | None = None
    """Tokens of a prompt in the mean; None: the maximum."""
    measured: MeasuredRun | None = None
    """Times of an earlier run, instead of computed ones."""


@dataclass(frozen=True)
class ResourcePlan:
    """The answer of `qwen35 plan`."""

    device: DeviceName | None
    device_memory: float
    """Bytes that a device has; infinity for a CPU."""
    parameters: int
    """Number of parameters of the model, with its vision tower."""
    active: int
    """Number of parameters that a token is multiplied by."""
    mean: float
    train: RankMemory
    replica: ReplicaMemory | None
    pods: tuple[PodMemory, ...]
    pod_memory: float
    pod_shm: float
    time: UpdateTime | None
    measured: bool
    """Whether times are those of an earlier run."""
    misfits: tuple[Problem, ...]


def resource_plan(spec: TrainingSpec, inputs: Inputs) -> ResourcePlan:
    """Plan a training."""
    device = None if inputs.device is None else DEVICES[inputs.device]
    memory = float("inf") if device is None else device.memory
    shape, fused = inputs.shape, device is not None and device.profile == "NVIDIA"
    if spec.train.engine == "Megatron":
        train = megatron_memory.rank_memory(shape, spec, "Fused" if fused else "Torch", on_cpu=device is None)
    else:
        train = fsdp_memory.rank_memory(shape, spec, "Fused" if fused else "Torch", pictures=inputs.pictures)
    replica = None if spec.rollout is None else replica_memory(shape, spec, memory)
    on_cpu = device is None
    of_rank = train.host + (train.device.total if on_cpu else 0.0)
    of_replica = replica.total if replica is not None and on_cpu else 0.0
    of_train, of_rollout = train_pod(shape, spec, of_rank), rollout_pod(shape, spec, of_replica)
    pods = [of_train] if of_rollout is None else [of_train, of_rollout]
    if of_rollout is not None and spec.mode == "Colocated":
        pods = [colocated_pod(shape, spec, of_train, of_rollout, 0.0 if on_cpu else train.state)]
    run, mean = inputs.measured, inputs.mean
    if mean is None:
        mean = (run.response if run else None) or spec.data.maxResponseTokens * MEAN_LENGTH_SHARE
    if run is not None:
        time: UpdateTime | None = _measured_time(spec, run, mean)
    else:
        time = None if device is None else _time(spec, inputs, device, mean, replica)
    plan = ResourcePlan(
        inputs.device,
        memory,
        parameters.text(shape).total + parameters.vision(shape),
        parameters.active(shape),
        mean,
        train,
        replica,
        tuple(pods),
        inputs.pod_memory,
        inputs.pod_shm,
        time,
        run is not None,
        (),
    )
    return replace(plan, misfits=tuple(misfits(plan, spec)))


def _time(spec: TrainingSpec, inputs: Inputs, device: Device, mean: float, replica: ReplicaMemory | None) -> UpdateTime:
    shape = inputs.shape
    prompt = spec.data.maxPromptTokens if inputs.prompt is None else inputs.prompt
    training, generation = train_time(shape, spec, device, prompt + mean), None
    if replica is not None:
        generation = generation_time(shape, spec, device, mean, fitting=replica.fitting, prompt=prompt)
    return update_time(spec, training, generation, publication_time(shape, spec, device))


def _measured_time(spec: TrainingSpec, run: MeasuredRun, mean: float) -> UpdateTime:
    generation = run.generation(spec, mean)
    return update_time(spec, run.training(spec, mean), generation, None if generation is None else run.publication)


def misfits(plan: ResourcePlan, spec: TrainingSpec) -> Iterator[Problem]:
    """Yield what does not fit, with a fix for each."""
    limit = plan.device_memory * (1 - DEVICE_RESERVE)
    needed = plan.train.device.total
    if needed > limit:
        yield Problem(
            "spec.train",
            f"a rank needs {_gib(needed)} at its peak ({plan.train.peak}), and {plan.device} has {_gib(limit)} free.",
            _train_fix(spec, plan),
        )
    if (replica := plan.replica) is not None and replica.fitting < 1:
        yield Problem(
            "spec.rollout",
            f"weights and workspace take {_gib(replica.weights + replica.workspace)} of {_gib(replica.available)}, "
            f"and a sequence of the maximum length needs {_gib(replica.per_sequence)}.",
            f"Raise rollout.tensorParallel above {spec.replica_devices(lane=False)}, or rollout.memoryFraction.",
        )
    for pod in plan.pods:
        if pod.total > plan.pod_memory:
            yield Problem(
                f"spec.pods.{pod.pool}",
                f"a pod needs {_gib(pod.total)} of memory, and the operator requests {_gib(plan.pod_memory)}.",
                f"Request at least {_gib(pod.total)} in spec.pods.{pod.pool}"
                + (", use more nodes, or offload less." if pod.tensors else ", or use more nodes."),
            )
        if pod.shared > plan.pod_shm:
            yield Problem(
                f"spec.pods.{pod.pool}",
                f"a pod needs {_gib(pod.shared)} in /dev/shm, and the operator gives it {_gib(plan.pod_shm)}.",
                "Set publication.transport to RDMA or Folder, or use more nodes.",
            )


def _train_fix(spec: TrainingSpec, plan: ResourcePlan) -> str:
    train, parts = spec.train, plan.train.device
    fixes = []
    if not train.activationCheckpointing and parts.activations > parts.total / 4:
        fixes.append("set train.activationCheckpointing to true")
    if train.engine == "FSDP" and not train.offload.parameters:
        fixes.append("set train.offload.parameters to true")
    if train.engine == "Megatron":
        fixes.append("raise train.parallelism.tensor, pipeline or expert")
    if parts.activations > parts.total / 4 and train.engine == "FSDP":
        fixes.append("raise train.parallelism.context")
    fixes.append(f"use more than {train.nodes} nodes")
    text = ", or ".join(fixes)
    return f"{text[0].upper()}{text[1:]}."


def _gib(size: float) -> str:
    return f"{size / GIB:,.1f} GiB"
