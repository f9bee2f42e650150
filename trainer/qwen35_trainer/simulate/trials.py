"""Simulations of a manifest's plans, none of them twice."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from qwen35_trainer.simulate.changes import Change, LoadRefused, changed
from qwen35_trainer.simulate.choice import Choice
from qwen35_trainer.simulate.load import Load
from qwen35_trainer.simulate.manifest import Speeds, load_of
from qwen35_trainer.simulate.result import Result
from qwen35_trainer.simulate.sweep import run
from qwen35_trainer.spec.training import TrainingSpec


@dataclass(frozen=True)
class Trial:
    """A plan and what came of it."""

    choice: Choice
    result: Result


class Trials:
    """Plays choices. Short plays tell the good from the bad, long ones tell the good apart."""

    def __init__(
        self,
        spec: TrainingSpec,
        speeds: Speeds,
        changes: Sequence[Change],
        limit: int,
        told: Callable[[], None] = lambda: None,
    ) -> None:
        """changes: of every load. limit: most short simulations. told: called after each simulation."""
        self._spec, self._speeds, self._changes, self._limit, self._told = spec, speeds, changes, limit, told
        self._played: dict[tuple[Choice, bool], Result | None] = {}
        self.simulations = 0

    def load(self, choice: Choice) -> Load:
        """What would be simulated, but for its length. Raises LoadRefused."""
        return changed(load_of(choice.apply(self._spec), self._speeds), self._changes)

    def legal(self, choice: Choice) -> bool:
        """Whether the spec's rules allow it."""
        return choice.legal(self._spec)

    def short(self, choice: Choice) -> Result | None:
        """None: the choice is not legal, or too much was simulated already."""
        if (choice, False) not in self._played and self.simulations >= self._limit:
            return None
        return self._play(choice, long=False)

    def long(self, choice: Choice) -> Result | None:
        """None: the choice is not legal."""
        return self._play(choice, long=True)

    def played(self, *, long: bool) -> list[Trial]:
        """Every legal choice that was simulated so, in that order."""
        found = ((choice, result) for (choice, was_long), result in self._played.items() if was_long == long)
        return [Trial(choice, result) for choice, result in found if result is not None]

    def _play(self, choice: Choice, *, long: bool) -> Result | None:
        key = (choice, long)
        if key not in self._played:
            self._played[key] = self._simulated(choice, long=long)
        return self._played[key]

    def _simulated(self, choice: Choice, *, long: bool) -> Result | None:
        if not self.legal(choice):
            return None
        try:
            load = self.load(choice)
            (result,) = run(_long(load) if long else _short(load), 1, self._told)
        except LoadRefused:
            return None
        self.simulations += 1
        return result


def _short(load: Load) -> Load:
    return _of_length(load, sequences=6_000, fewest=8, most=24)


def _long(load: Load) -> Load:
    return _of_length(load, sequences=16_000, fewest=16, most=50)


def _of_length(load: Load, *, sequences: int, fewest: int, most: int) -> Load:
    """Measured are so many sequences, in whole versions. Before, the window has been refilled twice."""
    versions = sequences / (load.prompts_per_batch * load.group_size * load.batches_per_version)
    measured = max(fewest, min(most, math.ceil(versions))) * load.batches_per_version
    warm_up = math.ceil(2 * (1 + load.settings.window.staleness_threshold)) * load.batches_per_version
    return replace(load, batches=warm_up + measured, warm_up=warm_up)
