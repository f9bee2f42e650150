"""Derives a workload from a manifest, with assumptions about the quantities that a manifest does not contain."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final

from qwen35_trainer.formatting import counted
from qwen35_trainer.manifest.training import TrainingSpec
from qwen35_trainer.pipeline.buffer import MissedDeadlinePolicy
from qwen35_trainer.simulate.cost_model import (
    LaneSpeed,
    PrefillCost,
    PublicationCost,
    ReplicaGroup,
    ReplicaSpeed,
    TrainSpeed,
)
from qwen35_trainer.simulate.field_changes import WorkloadRefused
from qwen35_trainer.simulate.response_lengths import BoundedPareto, Lognormal, Replayed
from qwen35_trainer.simulate.workload import BatchPolicy, Workload

SPEED_FACTOR_PER_DOUBLING: Final = 1.5
"""Assumed factor by which a replica reads its weights faster when it has twice as many devices."""
SEQUENCE_COST_FACTOR_PER_DOUBLING: Final = 0.75
"""Assumed factor by which the time that each sequence adds to a decode step changes when a
replica has twice as many devices."""
MEAN_LENGTH_SHARE_OF_CAP: Final = 1 / 8
"""Assumed mean response length, as a share of `data.maxResponseTokens`. The reference workload has the same share."""


PREFILL_TOKENS_PER_STEP: Final = 150.0
"""Assumed number of tokens that a replica prefills in the time in which it reads its weights once.

The number is computed for an H100 in bfloat16. A token takes 2 FLOP per parameter, and a parameter has 2 bytes. With
half of 989e12 FLOP/s and with 3.35e12 B/s, the result is 148.
"""
HAND_OVER_STEPS: Final = 5.0
"""Assumed time from the decision that a sequence moves to the lane until a replica of the lane has it,
in decode steps. Prefill is extra.

Two calls and the end of a step are tens of milliseconds, and a step of a large model takes about ten.
"""
COPY_STEPS: Final = 6000.0
"""Assumed time to copy the weights for a publication, as a multiple of the time in which one device reads them once.

The train pool gathers float32 weights on rank 0, which copies about 1.1 GB/s. An H100 reads the weights in bfloat16,
half as many bytes, with 3,350 GB/s.
"""
CPU_COPY_STEPS: Final = 18.0
"""Assumed time to copy the weights with the accelerator profile CPU, as a multiple of
the time to read the weights once.

A CPU reads float32 weights with about 20 GB/s.
"""


@dataclass(frozen=True)
class AssumedConstant:
    """A quantity that affects the result of a simulation and that a manifest does not contain."""

    name: str
    value: str
    is_given: bool
    """Whether an option of the command set the quantity. Otherwise its value is an assumption."""


@dataclass(frozen=True)
class HardwareSpeeds:
    """Speeds of the hardware, given as times. Any unit of time can be used, but all times must have the same unit.

    The unit of the defaults is the time of a decode step of a replica that holds one sequence.
    """

    base: float = 1.0
    """Time of a decode step that does not depend on the number of sequences, for a replica
    with rollout.tensorParallel devices."""
    per_sequence: float = 0.004
    """Time that each sequence adds to a decode step."""
    train: float = 0.0375
    """Time that one device of the train pool takes per trained token."""
    lane: float = SPEED_FACTOR_PER_DOUBLING
    """Factor by which a replica of the lane reads its weights faster for each doubling of its devices."""

    @property
    def lane_per_sequence(self) -> float:
        """Time that each sequence adds to a decode step in a lane whose replicas have twice as
        many devices as the replicas of the pool.

        It is shorter than `per_sequence`, because more devices share the work of a sequence.
        """
        return self.per_sequence * SEQUENCE_COST_FACTOR_PER_DOUBLING


def workload_of(spec: TrainingSpec, speeds: HardwareSpeeds = HardwareSpeeds()) -> Workload:
    """Return the workload of a training. It contains assumed values, which the function `constants` lists.

    The train pool is divided into units. A unit has as many devices as a rollout replica, so that pools that share
    devices can take turns on the same units. If the train pool does not divide evenly into such units, a unit is one
    device. Raises WorkloadRefused in mode SFT, in which nothing is generated.
    """
    if spec.rollout is None:
        raise WorkloadRefused([f"spec.mode: {spec.mode} generates nothing, so there is no pipeline to simulate"])
    knobs, cap = spec.effective_async, spec.data.maxResponseTokens
    replica = ReplicaSpeed(spec.rollout.maxSequencesPerReplica, speeds.base, speeds.per_sequence)
    devices_per_unit = spec.rollout.tensorParallel if spec.world_size % spec.rollout.tensorParallel == 0 else 1
    workload = Workload(
        pools=(ReplicaGroup(spec.rollout_replicas, replica),),
        lane=_lane(spec, replica, speeds.lane),
        publication=PublicationCost(copy=_copy_seconds(spec, speeds.base)),
        prefill=_prefill_cost(spec, speeds.base),
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
    """Return the quantities that affect the result of a simulation and that a manifest does not contain.

    given_fields: paths of the fields of the workload that options set. A quantity that none of these fields determines is
    marked as assumed.
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
            f"{publication.copy:.4g} to copy, {publication.transfer:.4g} to transfer, {publication.pause:.4g} to load",
            ("publication.copy", "publication.transfer", "publication.pause"),
        ),
        ("scoring", f"{workload.scoring_latency:.4g} after the last token of a group", ("scoring_latency",)),
        ("prefill", _prefill(workload), ("prefill.tokens_per_second",)),
    ]
    if (lane := workload.lane) is not None:
        value = f"{lane.speed:.3g} × as fast, {lane.per_sequence:.4g} per sequence"
        quantities.append(("lane", value, ("lane.speed",)))
    return tuple(AssumedConstant(name, value, _is_any_given(paths, given_fields)) for name, value, paths in quantities)


def _is_any_given(paths: Collection[str], given_fields: Collection[str]) -> bool:
    """Return whether options set a field at one of the paths, or a part of the workload that contains such a field."""
    return any(path == prefix or path.startswith(f"{prefix}.") for path in paths for prefix in given_fields)


def describe_lengths(workload: Workload) -> str:
    """Return the distribution of response lengths as text, such as "lognormal, mean 4,000, cv 1, at most 32,000"."""
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
        arrival_steps=HAND_OVER_STEPS,
        after_tokens=pool.stragglerLane.afterTokens,
    )


def _copy_seconds(spec: TrainingSpec, base: float) -> float:
    """Return the assumed time to copy the weights for a publication. Adapters (LoRA) are assumed to take no time."""
    if spec.train.lora is not None or spec.rollout is None:
        return 0.0
    if spec.accelerator.profile == "CPU":
        return CPU_COPY_STEPS * base
    return COPY_STEPS * spec.rollout.tensorParallel * base


def _prefill_cost(spec: TrainingSpec, base: float) -> PrefillCost:
    """Return the assumed cost of prefill. All prompts are assumed to have the maximum length."""
    rate = PREFILL_TOKENS_PER_STEP / base if base > 0 else math.inf
    return PrefillCost(rate, spec.data.maxPromptTokens)


def _shared_devices(workload: Workload) -> Workload:
    """Return the workload of pools that share their devices.

    `BatchPolicy.COLOCATED` adds up the hardware of both pools. Shared devices must count only once, so the trainer gets
    the hardware of one replica, and the rollout pool has one replica less. A single replica cannot be divided in this
    way, so its workload gets the policy `synchronous`, which has the same result.
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
