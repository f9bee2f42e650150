"""A manifest as a load: what it says, and what has to be guessed."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final

from qwen35_trainer.pipeline.buffer import OnMissedDeadline
from qwen35_trainer.simulate.changes import LoadRefused
from qwen35_trainer.simulate.hardware import Engine, EnginePool, Lane, Trainer
from qwen35_trainer.simulate.lengths import BoundedPareto, Lognormal, Replayed
from qwen35_trainer.simulate.load import Load, Policy
from qwen35_trainer.spec.problems import counted
from qwen35_trainer.spec.training import TrainingSpec

SPEED_PER_DOUBLING: Final = 1.5
"""A guess: how much faster an engine of twice the devices reads its weights."""
SEQUENCE_PER_DOUBLING: Final = 0.75
"""A guess: what a sequence costs there, against one engine of half the devices."""
MEAN_SHARE: Final = 1 / 8
"""A guess: the mean length as a share of data.maxResponseTokens; the reference load's."""


@dataclass(frozen=True)
class Constant:
    """A number that decides the outcome and stands in no manifest."""

    name: str
    value: str
    given: bool
    """By an option. Otherwise it is a guess."""


@dataclass(frozen=True)
class Speeds:
    """Of the hardware, in any one unit of time. The defaults count in decode steps of an engine with one sequence."""

    base: float = 1.0
    """Of a decode step, as `Engine.base`, at the manifest's tensorParallel."""
    per_sequence: float = 0.004
    """Of a decode step, as `Engine.per_sequence`."""
    train: float = 0.0375
    """Per trained token and device."""
    lane: float = SPEED_PER_DOUBLING
    """How much faster a lane reads its weights for each doubling of its devices."""

    @property
    def lane_per_sequence(self) -> float:
        """As `per_sequence`, of a lane of twice the devices."""
        return self.per_sequence * SEQUENCE_PER_DOUBLING


def load_of(spec: TrainingSpec, speeds: Speeds = Speeds()) -> Load:
    """The load that a training puts on its pools; `constants` tells what of it had to be guessed.

    A trainer unit is as many devices as a replica where that divides, so that pools that take turns can swap roles.
    Raises LoadRefused for a training that generates nothing.
    """
    if spec.rollout is None:
        raise LoadRefused([f"spec.mode: {spec.mode} generates nothing, so there is no pipeline to simulate"])
    knobs, cap = spec.effective_async, spec.data.maxResponseTokens
    engine = Engine(spec.rollout.maxSequences, speeds.base, speeds.per_sequence)
    share = spec.rollout.tensorParallel if spec.world_size % spec.rollout.tensorParallel == 0 else 1
    load = Load(
        pools=(EnginePool(spec.rollout_replicas, engine),),
        lane=_lane(spec, engine, speeds.lane),
        trainer=Trainer(spec.world_size // share, speeds.train / share),
        lengths=Lognormal(mean=max(1.0, cap * MEAN_SHARE), cv=1.0, cap=cap, floor=1),
        prompts_per_batch=spec.groups_per_batch,
        group_size=spec.algorithm.groupSize,
        batches_per_version=spec.batches_per_version,
        staleness_threshold=knobs.stalenessThreshold,
        max_version_lag=knobs.maxVersionLag,
        on_missed_deadline=OnMissedDeadline(knobs.onMissedDeadline),
        partial_rollout=knobs.partialRollout,
        adaptive=knobs.adaptiveDispatch,
        dynamic_sampling=spec.algorithm.dynamicSampling,
    )
    return _taking_turns(load) if spec.mode == "Colocated" else load


def constants(load: Load, given: Collection[str]) -> tuple[Constant, ...]:
    """What the outcome hangs on and no manifest says. given: the fields that options have set, as paths of the load."""
    engine, trainer, publication = load.pools[0].engine, load.train_pool, load.publication
    found = [
        ("decode step", f"{engine.base:.4g} + {engine.per_sequence:.4g} per sequence", ("pools.engine.base",)),
        (
            "training",
            f"{trainer.seconds_per_token:.4g} per token and unit, {counted(trainer.units, 'unit')}",
            ("trainer.seconds_per_token",),
        ),
        ("response length", lengths_in_words(load), ("lengths.mean", "lengths.cv", "lengths.alpha")),
        (
            "publication",
            f"{publication.transfer:.4g} to travel, {publication.pause:.4g} to load",
            ("publication.transfer", "publication.pause"),
        ),
        ("prefill", _prefill(load), ("prefill.tokens_per_second",)),
    ]
    if (lane := load.lane) is not None:
        value = f"{lane.speed:.3g} × as fast, {lane.per_sequence:.4g} per sequence"
        found.append(("lane", value, ("lane.speed",)))
    return tuple(Constant(name, value, _any_set(paths, given)) for name, value, paths in found)


def _any_set(paths: Collection[str], given: Collection[str]) -> bool:
    """Whether one of the paths was set, itself or with what it is in."""
    return any(path == set_ or path.startswith(f"{set_}.") for path in paths for set_ in given)


def lengths_in_words(load: Load) -> str:
    """The distribution of the response lengths: "lognormal, mean 4,000, cv 1, at most 32,000"."""
    match load.lengths:
        case Lognormal(mean, cv, cap, _):
            return f"lognormal, mean {mean:,.0f}, cv {cv:g}, at most {cap:,}"
        case BoundedPareto(alpha, floor, cap):
            return f"Pareto, alpha {alpha:g}, {floor:,} to {cap:,}"
        case Replayed(prompts):
            return f"replayed, {sum(map(len, prompts)):,} of {len(prompts):,} prompts, at most {load.lengths.cap:,}"


def _lane(spec: TrainingSpec, engine: Engine, speed: float) -> Lane | None:
    pool = spec.rollout
    if pool is None or pool.lane is None:
        return None
    doublings = math.log2(pool.lane.tensorParallel / pool.tensorParallel)
    return Lane(
        engines=pool.lane.nodes * spec.accelerator.perNode // pool.lane.tensorParallel,
        slots=pool.maxSequences,
        speed=speed**doublings,
        base=engine.base,
        per_sequence=engine.per_sequence * SEQUENCE_PER_DOUBLING**doublings,
        after_tokens=pool.lane.afterTokens,
    )


def _taking_turns(load: Load) -> Load:
    """Pools on the same devices. `Policy.COLOCATED` adds up two pools, so that one unit is moved from one to the other.

    A single engine cannot be shared out so; strictly one after the other is the same thing there.
    """
    engines, trainer = load.pools[0].count, load.trainer
    if engines == 1:
        return replace(load, policy=Policy.SYNCHRONOUS)
    return replace(
        load,
        policy=Policy.COLOCATED,
        pools=(replace(load.pools[0], count=engines - 1),),
        trainer=Trainer(1, trainer.seconds_per_token * engines / trainer.units, trainer.overhead),
    )


def _prefill(load: Load) -> str:
    if math.isinf(load.prefill.tokens_per_second):
        return "free"
    return f"{load.prefill.tokens_per_second:,.4g} tokens per unit of time, prompts of {load.prefill.prompt_tokens:,}"
