"""What to choose for a manifest: the split of its nodes, the two knobs, and a lane or none.

    search: short simulations ─► a good plan ─► long simulations of it and of every neighbour
                                     ▲                                     │
                                     └────── a neighbour is better ◄───────┴─► none is: the plan

Every plan on the way is a manifest that `qwen35 validate` accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from qwen35_trainer.simulate.analytic import Estimate, estimate
from qwen35_trainer.simulate.changes import Change, LoadRefused
from qwen35_trainer.simulate.choice import Choice, neighbours
from qwen35_trainer.simulate.grid import Grid
from qwen35_trainer.simulate.load import Load
from qwen35_trainer.simulate.manifest import Speeds
from qwen35_trainer.simulate.search import less_lag, preferred, search
from qwen35_trainer.simulate.trials import Trial, Trials
from qwen35_trainer.spec.training import TrainingSpec

MOST_SHORT: Final = 250
"""Simulations of the search; the neighbours' come on top."""
MOST_ROUNDS: Final = 10


@dataclass(frozen=True)
class Neighbour:
    """A plan that differs in one thing."""

    change: str
    trial: Trial
    within: bool
    """Whether the plan was free to choose it: the bound holds, and the missed-deadline policy is the manifest's."""


@dataclass(frozen=True)
class Plan:
    """The plan, what else there is, and what it was decided by."""

    recommended: Trial
    manifest: Trial
    """The manifest as it is."""
    neighbours: tuple[Neighbour, ...]
    load: Load
    """Of the recommended plan."""
    estimate: Estimate
    """By arithmetic, of the recommended plan."""
    max_lag: int
    simulations: int

    @property
    def changes(self) -> list[str]:
        """Where the plan differs from the manifest, as `path=value` for `qwen35 run --set`."""
        plan, own = self.recommended.choice.as_dict(), self.manifest.choice.as_dict()
        return [f"{path}={_yaml(value)}" for path, value in plan.items() if value != own[path]]


def make_plan(
    spec: TrainingSpec,
    speeds: Speeds,
    changes: Sequence[Change],
    max_lag: int | None = None,
    told: Callable[[], None] = lambda: None,
) -> Plan:
    """The plan of greatest effective throughput whose token lag is at most max_lag, by default the manifest's bound.

    Within 2 % of the greatest, that of the smallest mean lag. changes: of every load. told: called after each
    simulation. Raises LoadRefused for a manifest without two pools, and for loads that cannot be simulated.
    """
    if spec.mode != "FullyAsync" or spec.rollout is None:
        raise LoadRefused([f"spec.mode: {spec.mode} has no two pools to divide the nodes between; plan FullyAsync"])
    own = Choice.of(spec)
    bound = own.max_version_lag if max_lag is None else max_lag
    trials = Trials(spec, speeds, changes, MOST_SHORT, told)
    if (as_it_is := trials.long(own)) is None:
        trials.load(own)
        raise LoadRefused(["the manifest as it is cannot be simulated"])
    start = replace(own, lane=None, max_version_lag=bound, staleness_threshold=min(own.staleness_threshold, bound))
    grid = Grid.over(spec, start, trials.load(start))
    best, found = _settled(less_lag(search(grid, trials), grid, trials), grid, trials)
    load = trials.load(best.choice)
    return Plan(
        best,
        Trial(own, as_it_is),
        tuple(each for each in found if each.trial.choice not in (best.choice, own)),
        load,
        estimate(load),
        bound,
        trials.simulations,
    )


def _settled(best: Trial, grid: Grid, trials: Trials) -> tuple[Trial, list[Neighbour]]:
    """The plan that no neighbour beats when all are simulated for longer, and its neighbours."""
    free = {trial.choice: trial for trial in trials.played(long=True) if grid.within(trial.choice)}  # the manifest's
    for _ in range(MOST_ROUNDS):
        choice = best.choice
        found = [
            Neighbour(change, Trial(other, result), grid.within(other))
            for change, other in [("", choice), *neighbours(choice, grid.steps)]
            if (result := trials.long(other)) is not None
        ]
        free |= {each.trial.choice: each.trial for each in found if each.within}
        best = preferred(list(free.values()))
        if best.choice == choice:
            break
    return free[choice], [each for each in found if each.change]


def _yaml(value: object) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_yaml(inside)}' for key, inside in value.items())}}}"
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
