"""The rewards of a spec as plain data, and the number of processes that score.

Importing this file imports only the standard library, so that the processes which use it start fast.

cores   scoring processes   maximum of worker processes per synchronous function, over all scoring processes
2       1                   8
16      2                   32
64      8                   64
128     8                   64

A scoring process decodes about 100 responses of 32,000 tokens in a second. A function that computes needs one process
per core. A function that waits, for example for a server, needs one process per call, so the limit is above the number of
cores. Processes are started only while calls wait for one (isolated.py).
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from qwen35_trainer.rewards.reward import RewardSetupError

if TYPE_CHECKING:
    from qwen35_trainer.manifest.data import SourceSpec
    from qwen35_trainer.manifest.rewards import OnError, RewardSpec, RewardType

_COMPARES_ANSWERS: Final = ("Math", "ExactMatch")
_CORES_PER_SCORING_PROCESS: Final = 8
_MAX_SCORING_PROCESSES: Final = 8
_FUNCTION_PROCESSES_PER_CORE: Final = 2
_MIN_FUNCTION_PROCESSES: Final = 8
_MAX_FUNCTION_PROCESSES: Final = 64
_CGROUP_LIMIT: Final = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True)
class RewardSettings:
    """The settings of one reward.

    base: absolute path of the manifest's folder, from which functions may be imported.
    """

    name: str
    type: RewardType
    extract: str | None
    function: str | None
    timeout_seconds: float
    base: str


@dataclass(frozen=True)
class RewardTerm:
    """The weight of a reward in the sum, and the effect of its failures (`onError`)."""

    name: str
    weight: float
    on_error: OnError


@dataclass(frozen=True)
class RewardsSetup:
    """All rewards of a run.

    rewards: the settings of each reward.
    terms: the weight and the `onError` policy of each reward, in the same order.
    gyms: the settings of all gym sources whose prompts will be scored, training and validation.
    """

    rewards: tuple[RewardSettings, ...]
    terms: tuple[RewardTerm, ...]
    gyms: tuple[Mapping[str, object], ...] = ()

    @classmethod
    def of(cls, rewards: Sequence[RewardSpec], sources: Iterable[SourceSpec], base: Path) -> RewardsSetup:
        """Return the rewards of a spec as plain data.

        base: the manifest's folder. Raises RewardSetupError if two rewards have the same name.
        """
        names = _names(rewards)
        if repeated := sorted(name for name, count in Counter(names).items() if count > 1):
            raise RewardSetupError([f"two rewards are named {name}. Give one another name." for name in repeated])
        return cls(
            tuple(settings_of(name, reward, base) for name, reward in zip(names, rewards, strict=True)),
            tuple(RewardTerm(name, each.weight, each.onError) for name, each in zip(names, rewards, strict=True)),
            tuple(source.gym.model_dump() for source in sources if source.gym is not None),
        )


def settings_of(name: str, reward: RewardSpec, base: Path) -> RewardSettings:
    """Return the settings of one entry of `spec.rewards`."""
    folder = str(base.resolve())
    return RewardSettings(name, reward.type, reward.extract, reward.function, reward.timeoutSeconds, folder)


def needs_answers(rewards: Iterable[RewardSpec]) -> bool:
    """Return whether a reward compares responses with a reference answer, so that every prompt must have one."""
    return any(reward.type in _COMPARES_ANSWERS for reward in rewards)


def _names(rewards: Sequence[RewardSpec]) -> list[str]:
    """Return the names of the rewards in metrics: the name in the spec, or the type for a reward without a name.

    If several rewards of one type have no name, a number is appended to the type.
    """
    unnamed = Counter(reward.type for reward in rewards if reward.name is None)
    seen: Counter[str] = Counter()
    names = []
    for reward in rewards:
        seen[reward.type] += reward.name is None
        numbered = f"{reward.type}-{seen[reward.type]}" if unnamed[reward.type] > 1 else reward.type
        names.append(reward.name or numbered)
    return names


@dataclass(frozen=True)
class ProcessLimits:
    """The numbers of processes that score on one machine.

    scoring: number of scoring processes.
    functions: maximum number of worker processes that each scoring process starts for each plain (not async) function.
    cores: the maximum that replaces `functions` while no call is slow (`isolated.py`).
    """

    scoring: int = 1
    functions: int = _MIN_FUNCTION_PROCESSES
    cores: int = 1

    @classmethod
    def of(cls, cores: int) -> ProcessLimits:
        """Return the limits for a machine or pod with `cores` cores.

        While no call is slow, the worker processes of a reward are limited to one per two cores. The scoring processes
        divide this number among themselves, but each of them may start at least one.
        """
        scoring = min(_MAX_SCORING_PROCESSES, max(1, cores // _CORES_PER_SCORING_PROCESS))
        wanted = max(_MIN_FUNCTION_PROCESSES, _FUNCTION_PROCESSES_PER_CORE * cores)
        functions = -(-min(_MAX_FUNCTION_PROCESSES, wanted) // scoring)
        return cls(scoring, functions, max(1, min(functions, cores // 2 // scoring)))


def usable_cores(cgroup_limit: Path = _CGROUP_LIMIT) -> int:
    """Return the number of cores that this process may use: the minimum of its CPU affinity and its pod's CPU limit."""
    # Only Linux reports the affinity, and has the file: "quota period" in microseconds, or "max period".
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    try:
        quota, period = cgroup_limit.read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores
