"""Sizes the pods of a training by its memory plan, and refuses what its model and the memory of its devices do not allow.

    spec, catalog ─► planning.memory_plan, once per parsed spec ─► memory of worker pods: at least the profile's
                                                               └─► problems of new trainings

The operator knows neither the model's files nor the nodes. It takes the model's sizes from the catalog by model.name,
and compares the plan with the devices that node selectors name, or else with the largest device of the profile. The
sizes are not part of `spec_hash`, so a release of the operator that computes other sizes does not end a running attempt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final
from weakref import WeakKeyDictionary

from qwen35_operator.api.training_resource import TrainingResource
from qwen35_operator.api.v1alpha1 import PodPool
from qwen35_operator.desired.pools import worker_pools
from qwen35_operator.device_profiles import PROFILES, PodSize
from qwen35_trainer.catalog.devices import DEVICES, DeviceName, largest_device
from qwen35_trainer.manifest import Problem, TrainingSpec
from qwen35_trainer.planning.known_sizes import known_sizes
from qwen35_trainer.planning.memory_plan import MemoryPlan, device_misfits, memory_plan
from qwen35_trainer.planning.model_limits import limit_problems
from qwen35_trainer.planning.pod_request import PodRequest, planned_request

_plans: Final[WeakKeyDictionary[TrainingResource, MemoryPlan]] = WeakKeyDictionary()
"""Cache of the plans, by training."""


def size_of(training: TrainingResource, pool: PodPool) -> PodSize:
    """Return the CPUs and memory of a pod of the pool.

    The CPUs are those of the device profile. The memory is that of the profile, or more if the training's memory plan
    needs more.
    """
    profile, devices = PROFILES[training.spec.accelerator.profile], training.spec.accelerator.devicesPerNode
    if pool == "head":
        return profile.head
    share = profile.per_device
    size = PodSize(share.cpu * devices, share.memory_gib * devices, share.shm_gib * devices)
    if (plan := _plan(training)) is None:
        return size
    request = PodRequest(size.memory_gib, size.shm_gib)
    for pod in plan.pods:
        if pod.pool == pool:
            request = planned_request(pod, request)
    return replace(size, memory_gib=request.memory_gib, shm_gib=request.shm_gib)


def problems(training: TrainingResource) -> list[Problem]:
    """Return a problem for everything that the sizes of the model do not allow.

    Degrees that do not divide the model, a context longer than its positions, and pools that, according to the memory plan,
    need more memory than their devices have. The operator refuses new trainings with such problems.
    """
    if (plan := _plan(training)) is None:
        return []
    override = "For larger devices than those of the catalog, set spec.pods.sizing to Profile."
    misfits = [replace(problem, fix=f"{problem.fix} {override}") for problem in device_misfits(plan, training.spec)]
    return [*limit_problems(plan.shape, training.spec), *misfits]


def note(training: TrainingResource) -> str:
    """Return a note if pods have no memory plan because the catalog lacks the model; otherwise an empty string."""
    model, spec = training.spec.model, training.spec
    if spec.pods.sizing == "Profile" or known_sizes(model) is not None:
        return ""
    return (
        f"model.name {model.name} is not in the catalog: pods have the memory of profile {spec.accelerator.profile}, and "
        "whether the model fits is not known; `qwen35 plan` computes it from the model's folder"
    )


def _plan(training: TrainingResource) -> MemoryPlan | None:
    """Return the plan of a training, computed once per parsed spec; None if the profile alone sizes its pods."""
    spec = training.spec
    if spec.pods.sizing == "Profile" or (shape := known_sizes(spec.model)) is None:
        return None
    if (plan := _plans.get(training)) is None:
        plan = _plans[training] = memory_plan(shape, spec, _device(spec))
    return plan


def _device(spec: TrainingSpec) -> DeviceName | None:
    """Return the largest device that the node selectors of the worker pools name.

    If a pool's node selector names no device, return the largest device of the profile.
    """
    names = [_selected(getattr(spec.pods, pool)) for pool in worker_pools(spec)]
    named = [name for name in names if name is not None]
    if len(named) < len(names):
        return largest_device(spec.accelerator.profile)
    return max(named, key=lambda name: DEVICES[name].memory)


def _selected(change: Mapping[str, Any]) -> DeviceName | None:
    """Return the device that a user's change of a pod template selects by the label nvidia.com/gpu.product, or None.

    The change may be malformed.
    """
    match change:
        case {"spec": {"nodeSelector": {"nvidia.com/gpu.product": str(product)}}}:
            return next((name for name, device in DEVICES.items() if device.product == product), None)
    return None
