"""The planner of `qwen35 plan`. For a manifest, it recommends the numbers of rollout and train nodes, the two bounds of
staleness, the policy for missed deadlines, and a straggler lane (replicas for long sequences) if one is worthwhile.

    search: short simulations ─► a good plan ─► long simulations of it and of every neighbour
                                     ▲                                     │
                                     └────── a neighbour is better ◄───────┴─► no neighbour is better: the plan

A neighbour is a plan that differs in one choice. Every simulated plan passes the checks of a manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from qwen35_trainer.manifest.training import TrainingSpec
from qwen35_trainer.simulate.field_changes import FieldChange, WorkloadRefused
from qwen35_trainer.simulate.manifest_workload import HardwareSpeeds
from qwen35_trainer.simulate.plan_choice import PlanChoice, PlanGrid, neighbours_of
from qwen35_trainer.simulate.plan_search import (
    Estimate,
    Trial,
    Trials,
    estimate,
    preferred,
    reduce_lag,
    search,
)
from qwen35_trainer.simulate.workload import Workload

MAX_SHORT_SIMULATIONS: Final = 250
"""Number of simulations after which the search starts no further short ones. The long simulations
that compare neighbours may exceed it."""
MAX_ROUNDS: Final = 10
"""Maximum number of times that the planner simulates all neighbours of a plan and moves to the best plan found so far."""


@dataclass(frozen=True)
class Neighbour:
    """A plan that differs from the recommended plan in one choice."""

    change: str
    """The choice that differs, as text, such as "maxVersionLag 3"."""
    trial: Trial
    is_allowed: bool
    """Whether the planner may recommend this plan.

    Its maximum lag must be within the limit, and its policy for missed deadlines must be the manifest's.
    """


@dataclass(frozen=True)
class PlanResult:
    """The recommended plan, and the plans that it was compared with."""

    recommended: Trial
    manifest: Trial
    """The plan of the manifest without changes."""
    neighbours: tuple[Neighbour, ...]
    workload: Workload
    """The workload of the recommended plan."""
    estimate: Estimate
    """The analytic estimate of the recommended plan."""
    max_lag: int
    """Limit of the maximum lag of a recommended plan, in versions."""
    simulations: int
    """Number of simulations that the planner ran."""

    @property
    def changes(self) -> list[str]:
        """The values in which the recommended plan differs from the manifest, each as `PATH=VALUE` for `--set`."""
        plan, manifest = self.recommended.choice.as_dict(), self.manifest.choice.as_dict()
        return [f"{path}={_yaml(value)}" for path, value in plan.items() if value != manifest[path]]


def make_plan(
    spec: TrainingSpec,
    speeds: HardwareSpeeds,
    changes: Sequence[FieldChange],
    max_lag: int | None = None,
    on_simulated: Callable[[], None] = lambda: None,
) -> PlanResult:
    """Find the plan with the highest effective throughput among plans whose maximum lag is at most `max_lag`.

    Of the plans within THROUGHPUT_TOLERANCE of that throughput, the plan with the minimum
    mean lag is recommended (`preferred`).

    max_lag: in versions; None stands for the maximum lag of the manifest. changes: applied to every workload.
    on_simulated: called after each simulation. Raises WorkloadRefused for a mode other than FullyAsync, and for
    workloads that cannot be simulated.
    """
    if spec.mode != "FullyAsync" or spec.rollout is None:
        raise WorkloadRefused([f"spec.mode: {spec.mode} has no two pools to divide the nodes between; plan FullyAsync"])
    manifest = PlanChoice.of(spec)
    bound = manifest.max_version_lag if max_lag is None else max_lag
    trials = Trials(spec, speeds, changes, MAX_SHORT_SIMULATIONS, on_simulated)
    if (manifest_result := trials.long(manifest)) is None:
        trials.workload(manifest)
        raise WorkloadRefused(["the manifest as it is cannot be simulated"])
    threshold = min(manifest.staleness_threshold, bound)
    start = replace(manifest, lane=None, max_version_lag=bound, staleness_threshold=threshold)
    grid = PlanGrid.around(spec, start, trials.workload(start))
    best, neighbours = _settle(reduce_lag(search(grid, trials), grid, trials), grid, trials)
    workload = trials.workload(best.choice)
    return PlanResult(
        best,
        Trial(manifest, manifest_result),
        tuple(neighbour for neighbour in neighbours if neighbour.trial.choice not in (best.choice, manifest)),
        workload,
        estimate(workload),
        bound,
        trials.simulations,
    )


def _settle(best: Trial, grid: PlanGrid, trials: Trials) -> tuple[Trial, list[Neighbour]]:
    """Move from the plan `best` to better neighbours, until no neighbour is better in long simulations.

    Returns the last plan and its neighbours. Stops after MAX_ROUNDS moves.
    """
    allowed = {trial.choice: trial for trial in trials.simulated(long=True) if grid.allows(trial.choice)}
    for _ in range(MAX_ROUNDS):
        choice = best.choice
        candidates = [
            Neighbour(change, Trial(other, result), grid.allows(other))
            for change, other in [("", choice), *neighbours_of(choice, grid.steps)]
            if (result := trials.long(other)) is not None
        ]
        allowed |= {candidate.trial.choice: candidate.trial for candidate in candidates if candidate.is_allowed}
        best = preferred(list(allowed.values()))
        if best.choice == choice:
            break
    return allowed[choice], [candidate for candidate in candidates if candidate.change]


def _yaml(value: object) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_yaml(item)}' for key, item in value.items())}}}"
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
