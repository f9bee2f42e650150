"""The rewards of a spec as plain data, for the processes that score. Importing this file imports no library."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qwen35_trainer.rewards.reward import RewardSetupError

if TYPE_CHECKING:
    from pathlib import Path

    from qwen35_trainer.manifest.data import SourceSpec
    from qwen35_trainer.manifest.rewards import OnError, RewardSpec, RewardType

_COMPARES_ANSWERS = ("Math", "ExactMatch")


@dataclass(frozen=True)
class RewardSettings:
    """The settings of one reward.

    base: the manifest's folder, absolute, from which functions may be imported.
    """

    name: str
    type: RewardType
    extract: str | None
    function: str | None
    timeout_seconds: float
    base: str


@dataclass(frozen=True)
class RewardTerm:
    """The weight of a reward in the sum, and the consequence of its failures."""

    name: str
    weight: float
    on_error: OnError


@dataclass(frozen=True)
class RewardsSetup:
    """All rewards of a run.

    gyms: the fields of all gym sources whose prompts will be scored, training and validation.
    """

    rewards: tuple[RewardSettings, ...]
    terms: tuple[RewardTerm, ...]
    gyms: tuple[Mapping[str, object], ...] = ()

    @classmethod
    def of(cls, rewards: Sequence[RewardSpec], sources: Iterable[SourceSpec], base: Path) -> RewardsSetup:
        """Raises RewardSetupError when two rewards have one name."""
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
    """Return whether any reward compares with a reference answer, so that every prompt must have one."""
    return any(reward.type in _COMPARES_ANSWERS for reward in rewards)


def _names(rewards: Sequence[RewardSpec]) -> list[str]:
    """Return the names of the rewards in metrics: the given name, or else the type.

    The type is numbered if several rewards of that type have no name.
    """
    unnamed = Counter(reward.type for reward in rewards if reward.name is None)
    seen: Counter[str] = Counter()
    names = []
    for reward in rewards:
        seen[reward.type] += reward.name is None
        numbered = f"{reward.type}-{seen[reward.type]}" if unnamed[reward.type] > 1 else reward.type
        names.append(reward.name or numbered)
    return names
