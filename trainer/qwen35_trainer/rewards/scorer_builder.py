"""Builds the scorer of a run, in a scoring process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from textwrap import indent
from typing import TYPE_CHECKING

from qwen35_trainer.rewards.exact_match import ExactMatch, grader
from qwen35_trainer.rewards.function import Function
from qwen35_trainer.rewards.isolated import IsolatedFunction
from qwen35_trainer.rewards.math import Math
from qwen35_trainer.rewards.process_limits import ProcessLimits
from qwen35_trainer.rewards.reasoning_gym import GymReward
from qwen35_trainer.rewards.reward import Reward, RewardError, RewardSetupError
from qwen35_trainer.rewards.reward_settings import RewardSettings, RewardsSetup, settings_of
from qwen35_trainer.rewards.scorer import Scorer

if TYPE_CHECKING:
    from pathlib import Path

    from qwen35_trainer.manifest.rewards import RewardSpec


def function_errors(rewards: Sequence[RewardSpec], base: Path) -> dict[int, RewardError]:
    """Load each function in `spec.rewards` in a process of its own, and return the errors by index of the reward.

    base: the manifest's folder, from which functions may be imported. Must not be called from an event loop.
    """
    functions = {at: reward for at, reward in enumerate(rewards) if reward.type == "Function"}
    return asyncio.run(_function_errors(functions, base)) if functions else {}


async def _function_errors(rewards: Mapping[int, RewardSpec], base: Path) -> dict[int, RewardError]:
    async def error_of(reward: RewardSpec) -> RewardError | None:
        function = _isolated(settings_of("", reward, base), (), ProcessLimits())
        assert function is not None
        try:
            await function.load()
        except RewardError as error:
            return error
        finally:
            await function.close()
        return None

    errors = await asyncio.gather(*(error_of(reward) for reward in rewards.values()))
    return {at: error for at, error in zip(rewards, errors, strict=True) if error is not None}


async def build_scorer(setup: RewardsSetup, limits: ProcessLimits) -> Scorer:
    """Return the scorer, with a process of each function started and the function loaded in it.

    The process of a Gym reward loads the tasks of all sources before its first call. Raises RewardSetupError with
    every problem.
    """
    functions = [_isolated(reward, setup.gyms, limits) for reward in setup.rewards]
    # All functions load at the same time.
    loading = [asyncio.create_task(function.load()) for function in functions if function is not None]
    loaded = iter(await asyncio.gather(*loading, return_exceptions=True))
    rewards: list[Reward] = []
    problems: list[str] = []
    for settings, function in zip(setup.rewards, functions, strict=True):
        try:
            if function is not None and (failure := next(loaded)) is not None:
                raise failure
            rewards.append(_reward(settings, function, setup.gyms))
        except RewardError as error:
            problems.append(f"reward {settings.name}: {error}" + indent(f"\n{error.details}", "    ").rstrip())
    if problems:
        await asyncio.gather(*(function.close() for function in functions if function is not None))
        raise RewardSetupError(problems)
    return Scorer(rewards)


def _isolated(
    reward: RewardSettings, gyms: Sequence[Mapping[str, object]], limits: ProcessLimits
) -> IsolatedFunction | None:
    """Return the function of a reward, in no process yet; None for a reward whose calls cannot hang."""
    package = __name__.rpartition(".")[0]
    arguments: tuple[object, ...]
    match reward.type:
        case "Math":
            loader, arguments = f"{package}.math:grader", (reward.extract,)
        case "ExactMatch":
            return None
        case "Gym":
            loader, arguments = f"{package}.reasoning_gym:grader", (tuple(gyms),)
        case "Function":
            loader, arguments = f"{package}.function:load_scorer", (reward.function, reward.base)
    return IsolatedFunction(loader, arguments, reward.timeout_seconds, processes=limits.functions, cores=limits.cores)


def _reward(
    settings: RewardSettings, isolated: IsolatedFunction | None, gyms: Sequence[Mapping[str, object]]
) -> Reward:
    """Return the reward that the settings describe. isolated: its function, which has been loaded."""
    if settings.type == "ExactMatch":
        return ExactMatch(settings.name, grader(settings.extract))
    assert isolated is not None, "every other type runs a function of its own"
    match settings.type:
        case "Math":
            return Math(settings.name, isolated)
        case "Gym" if not gyms:
            raise RewardError(
                "no source is a gym, so that there is no task to score with. Add one, or use another type."
            )
        case "Gym":
            return GymReward(settings.name, isolated)
        case "Function":
            return Function(settings.name, isolated)
