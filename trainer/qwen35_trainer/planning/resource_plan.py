"""Plans what a training needs, how long an update takes, and what does not fit.

The module is pure: it computes a plan from a manifest and the sizes of a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from qwen35_trainer.catalog.devices import DEVICES, Device, DeviceName
from qwen35_trainer.catalog.model_sizes import ModelSizes
from qwen35_trainer.manifest.problems import Problem
from qwen35_trainer.manifest.training import TrainingSpec
from qwen35_trainer.planning import parameters
from qwen35_trainer.planning.assumptions import MEAN_LENGTH_SHARE
from qwen35_trainer.planning.generation_time import generation_time
from qwen35_trainer.planning.host_memory import Pool
from qwen35_trainer.planning.measured_run import MeasuredRun
from qwen35_trainer.planning.memory_plan import MemoryPlan, device_misfits, memory_plan
from qwen35_trainer.planning.model_limits import limit_problems
from qwen35_trainer.planning.pod_request import PodRequest, planned_request, request_misfits
from qwen35_trainer.planning.publication_time import publication_time
from qwen35_trainer.planning.rollout_memory import ReplicaMemory
from qwen35_trainer.planning.train_time import train_time
from qwen35_trainer.planning.update_time import UpdateTime, update_time


@dataclass(frozen=True)
class Inputs:
    """Everything that a plan needs in addition to the manifest."""

    shape: ModelSizes
    device: DeviceName | None
    """The kind of device. None: a CPU, whose tensors are in the pod's memory, and whose time is not planned."""
    mean: float | None
    """Mean tokens of a response. None: that of `measured`, otherwise MEAN_LENGTH_SHARE of the maximum."""
    pictures: bool
    """Whether the data contain pictures."""
    profile: PodRequest
    """The memory request of the device profile for a pod."""
    prompt: float | None = None
    """Mean tokens of a prompt; None: data.maxPromptTokens."""
    measured: MeasuredRun | None = None
    """Speeds of an earlier run, from which times are computed. None: times are computed from the device's data sheet."""


@dataclass(frozen=True)
class ResourcePlan:
    """The result of `qwen35 plan --resources`: memory, requests of pods, times, and what does not fit."""

    memory: MemoryPlan
    requests: Mapping[Pool, PodRequest]
    """Pool → what the operator requests for each pod of the pool, before spec.pods changes it."""
    parameters: int
    """Number of parameters of the model, with its vision tower."""
    active: int
    """Number of parameters that multiply a token."""
    mean: float
    """Mean tokens of a response with which the times were computed."""
    time: UpdateTime | None
    """The time of an update. None on a CPU without a measured run."""
    measured: bool
    """Whether the times come from the records of an earlier run."""
    misfits: tuple[Problem, ...]
    notes: tuple[str, ...]
    """What the times do not contain, or contain only approximately. Each is a sentence."""


def resource_plan(spec: TrainingSpec, inputs: Inputs) -> ResourcePlan:
    """Return the memory, pod requests and times of a training, and a problem for everything that does not fit."""
    shape = inputs.shape
    memory = memory_plan(shape, spec, inputs.device, pictures=inputs.pictures)
    requests = {pod.pool: inputs.profile for pod in memory.pods}
    if spec.pods.sizing == "Planned":
        requests = {pod.pool: planned_request(pod, inputs.profile) for pod in memory.pods}
    run, mean = inputs.measured, inputs.mean
    if mean is None:
        mean = (run.response if run else None) or spec.data.maxResponseTokens * MEAN_LENGTH_SHARE
    if run is not None:
        time: UpdateTime | None = _measured_time(spec, run, mean)
    else:
        time = None if inputs.device is None else _time(spec, inputs, DEVICES[inputs.device], mean, memory.replica)
    misfits = [*limit_problems(shape, spec), *device_misfits(memory, spec)]
    for pod in memory.pods:
        misfits += request_misfits(pod, requests[pod.pool])
    return ResourcePlan(
        memory,
        requests,
        parameters.text(shape).total + parameters.vision(shape),
        parameters.active(shape),
        mean,
        time,
        run is not None,
        tuple(misfits),
        tuple(_notes(spec, run, time)),
    )


def _notes(spec: TrainingSpec, run: MeasuredRun | None, time: UpdateTime | None) -> Iterator[str]:
    """Yield a sentence for each known reason why the planned times may differ from those of the training."""
    if run is not None and run.mode is not None and run.mode != spec.mode:
        yield (
            f"The times come from a run in mode {run.mode}, and the manifest's mode is {spec.mode}. Replicas decode another number of "
            "sequences at a time there, so generation takes another time."
        )
    if run is None and time is not None and spec.train.engine == "FSDP" and spec.train.offload.parameters:
        yield (
            "The time of training contains neither the transfers of offloaded parameters and gradients, nor the optimizer step, which "
            "computes on the host."
        )


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
