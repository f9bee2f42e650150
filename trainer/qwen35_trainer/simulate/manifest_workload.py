"""The workload of a manifest, with assumptions about what a manifest does not contain."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final

from qwen35_trainer.formatting import counted
from qwen35_trainer.manifest.training import TrainingSpec
from qwen35_trainer.pipeline.buffer import MissedDeadlinePolicy
from qwen35_trainer.simulate.cost_model import LaneSpeed, ReplicaGroup, ReplicaSpeed, TrainSpeed
from qwen35_trainer.simulate.field_changes import WorkloadRefused
from qwen35_trainer.simulate.response_lengths import BoundedPareto, Lognormal, Replayed
from qwen35_trainer.simulate.workload import BatchPolicy, Workload

SPEED_FACTOR_PER_DOUBLING: Final = 1.5
"""An assumption: a replica with twice the devices reads its weights faster by this factor."""
SEQUENCE_COST_FACTOR_PER_DOUBLING: Final = 0.75
"""An assumption: the cost of a sequence on a replica with twice the devices changes by this factor."""
MEAN_LENGTH_SHARE_OF_CAP: Final = 1 / 8
"""An assumption: the mean length as a share of data.maxResponseTokens, as in the reference workload."""


@dataclass(frozen=True)
class AssumedConstant:
    """A quantity that affects the result of a simulation and is not in a manifest."""

    name: str
    value: str
    is_given: bool
    """Whether an option set it. Otherwise it is an assumption."""


@dataclass(frozen=True)
class HardwareSpeeds:
    """Speeds of the hardware. All of them use the same unit of time, which may be any.

    The unit of the defaults is the decode step of a replica that holds one sequence.
    """

    base: float = 1.0
    """As `ReplicaSpeed.base`, at the manifest's tensorParallel."""
    per_sequence: float = 0.004
    """As `ReplicaSpeed.per_sequence`."""
    train: float = 0.0375
    """Time per trained token and device."""
    lane: float = SPEED_FACTOR_PER_DOUBLING
    """Factor by which a lane reads its weights faster for each doubling of its devices."""

    @property
    def lane_per_sequence(self) -> float:
        """`per_sequence` of a lane whose replicas have twice the devices of the pool's.

        It is lower than the pool's, because more devices share the work of a sequence.
        """
        return self.per_sequence * SEQUENCE_COST_FACTOR_PER_DOUBLING


def workload_of(spec: TrainingSpec, speeds: HardwareSpeeds = HardwareSpeeds()) -> Workload:
    """Return the workload of a training. `constants` lists the values in it that are assumed.

    A trainer unit has as many devices as a replica if the train pool divides evenly into such units. Pools that share
    devices can then swap roles. Raises WorkloadRefused for a training that generates nothing.
    """
    if spec.rollout is None:
        raise WorkloadRefused([f"spec.mode: {spec.mode} generates nothing, so there is no pipeline to simulate"])
    knobs, cap = spec.effective_async, spec.data.maxResponseTokens
    replica = ReplicaSpeed(spec.rollout.maxSequencesPerReplica, speeds.base, speeds.per_sequence)
    devices_per_unit = spec.rollout.tensorParallel if spec.world_size % spec.rollout.tensorParallel == 0 else 1
    workload = Workload(
        pools=(ReplicaGroup(spec.rollout_replicas, replica),),
        lane=_lane(spec, replica, speeds.lane),
        trainer=TrainSpeed(spec.world_size // devices_per_unit, speeds.train / devices_per_unit),
        lengths=Lognormal(mean=max(1.0, cap * MEAN_LENGTH_SHARE_OF_CAP), cv=1.0, cap=cap, floor=1),
        prompts_per_batch=spec.groups_per_batch,
        group_size=spec.algorithm.groupSize,
        batches_per_version=spec.batches_per_version,
        staleness_threshold=knobs.stalenessThreshold,
        max_version_lag=knobs.maxVersionLag,
        on_missed_deadline=MissedDeadlinePolicy(knobs.onMissedDeadline),
        partial_rollout=knobs.partialRollout,
        adaptive=knobs.adaptiveDispatch,
        dynamic_sampling=spec.algorithm.dynamicSampling,
    )
    return _shared_devices(workload) if spec.mode == "Colocated" else workload


def constants(workload: Workload, given_fields: Collection[str]) -> tuple[AssumedConstant, ...]:
    """Return the quantities that affect the result of a simulation and are not in a manifest.

    given_fields: the fields that options set, as paths of the workload.
    """
    replica, trainer, publication = workload.pools[0].replica, workload.train_pool, workload.publication
    quantities = [
        ("decode step", f"{replica.base:.4g} + {replica.per_sequence:.4g} per sequence", ("pools.replica.base",)),
        (
            "training",
            f"{trainer.seconds_per_token:.4g} per token and unit, {counted(trainer.units, 'unit')}",
            ("trainer.seconds_per_token",),
        ),
        ("response length", describe_lengths(workload), ("lengths.mean", "lengths.cv", "lengths.alpha")),
        (
            "publication",
            f"{publication.transfer:.4g} to transfer, {publication.pause:.4g} to load",
            ("publication.transfer", "publication.pause"),
        ),
        ("prefill", _prefill(workload), ("prefill.tokens_per_second",)),
    ]
    if (lane := workload.lane) is not None:
        value = f"{lane.speed:.3g} × as fast, {lane.per_sequence:.4g} per sequence"
        quantities.append(("lane", value, ("lane.speed",)))
    return tuple(AssumedConstant(name, value, _is_any_given(paths, given_fields)) for name, value, paths in quantities)


def _is_any_given(paths: Collection[str], given_fields: Collection[str]) -> bool:
    """Whether options set one of the paths, or a part of the workload that contains one of them."""
    return any(path == prefix or path.startswith(f"{prefix}.") for path in paths for prefix in given_fields)


def describe_lengths(workload: Workload) -> str:
    """Return the distribution of the response lengths: "lognormal, mean 4,000, cv 1, at most 32,000"."""
    match workload.lengths:
        case Lognormal(mean, cv, cap, _):
            return f"lognormal, mean {mean:,.0f}, cv {cv:g}, at most {cap:,}"
        case BoundedPareto(alpha, floor, cap):
            return f"Pareto, alpha {alpha:g}, {floor:,} to {cap:,}"
        case Replayed(prompts):
            return f"replayed, {sum(map(len, prompts)):,} of {len(prompts):,} prompts, at most {workload.lengths.cap:,}"


def _lane(spec: TrainingSpec, replica: ReplicaSpeed, speed: float) -> LaneSpeed | None:
    pool = spec.rollout
    if pool is None or pool.stragglerLane is None:
        return None
    doublings = math.log2(pool.stragglerLane.tensorParallel / pool.tensorParallel)
    return LaneSpeed(
        replicas=pool.stragglerLane.nodes * spec.accelerator.devicesPerNode // pool.stragglerLane.tensorParallel,
        slots=pool.maxSequencesPerReplica,
        speed=speed**doublings,
        base=replica.base,
        per_sequence=replica.per_sequence * SEQUENCE_COST_FACTOR_PER_DOUBLING**doublings,
        after_tokens=pool.stragglerLane.afterTokens,
    )


def _shared_devices(workload: Workload) -> Workload:
    """Return the workload of pools that share their devices.

    `BatchPolicy.COLOCATED` adds up the hardware of both pools. So that shared devices count once, the trainer gets the
    hardware of one replica, and the rollout pool has one replica less. A single replica cannot be divided. Its workload
    gets the synchronous policy, which has the same result.
    """
    replicas, trainer = workload.pools[0].count, workload.trainer
    if replicas == 1:
        return replace(workload, policy=BatchPolicy.SYNCHRONOUS)
    return replace(
        workload,
        policy=BatchPolicy.COLOCATED,
        pools=(replace(workload.pools[0], count=replicas - 1),),
        trainer=TrainSpeed(1, trainer.seconds_per_token * replicas / trainer.units, trainer.overhead),
    )


def _prefill(workload: Workload) -> str:
    if math.isinf(workload.prefill.tokens_per_second):
        return "free"
    return f"{workload.prefill.tokens_per_second:,.4g} tokens per unit of time, prompts of {workload.prefill.prompt_tokens:,}"
