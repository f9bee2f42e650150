"""Builds the scorer of a spec."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import indent

from qwen35_trainer.manifest.data import GymSpec, SourceSpec
from qwen35_trainer.manifest.rewards import RewardSpec
from qwen35_trainer.rewards.exact_match import ExactMatch, grader
from qwen35_trainer.rewards.function import AsyncFunction, SyncFunction, load_function
from qwen35_trainer.rewards.isolated import IsolatedFunction
from qwen35_trainer.rewards.math import Math
from qwen35_trainer.rewards.reasoning_gym import GymReward
from qwen35_trainer.rewards.reward import Reward, RewardError, RewardSetupError
from qwen35_trainer.rewards.scorer import ConfiguredReward, Scorer

_COMPARES_ANSWERS = ("Math", "ExactMatch")


def needs_answers(rewards: Iterable[RewardSpec]) -> bool:
    """Return whether any reward compares with a reference answer, so that every prompt must have one."""
    return any(reward.type in _COMPARES_ANSWERS for reward in rewards)


def function_errors(rewards: Sequence[RewardSpec], base: Path) -> dict[int, RewardError]:
    """Load each function in `spec.rewards` in a process of its own, and return the errors by index of the reward.

    base: the manifest's folder, from which functions may be imported.
    """
    isolated = {at: _isolated(reward, (), base) for at, reward in enumerate(rewards) if reward.type == "Function"}
    loading = {at: (function, function.load()) for at, function in isolated.items() if function is not None}
    errors: dict[int, RewardError] = {}
    for at, (function, loaded) in loading.items():
        try:
            loaded.result()
        except RewardError as error:
            errors[at] = error
        finally:
            function.close()
    return errors


def build_scorer(rewards: Sequence[RewardSpec], sources: Iterable[SourceSpec], base: Path, *, trial: int = 0) -> Scorer:
    """Return the scorer of `spec.rewards`, with its worker processes started and all functions loaded.

    sources: all sources whose prompts will be scored, training and validation. The worker of a Gym reward loads their tasks
    before the first call. base: the manifest's folder, from which functions may be imported. trial: number of first
    responses; the run ends if every reward fails for all of them. Raises RewardSetupError with every problem.
    """
    gyms = [source.gym for source in sources if source.gym is not None]
    names = _names(rewards)
    if repeated := sorted(name for name, count in Counter(names).items() if count > 1):
        raise RewardSetupError([f"two rewards are named {name}. Give one another name." for name in repeated])
    isolated = [_isolated(reward, gyms, base) for reward in rewards]
    # All functions load at the same time.
    loading = [None if function is None else function.load() for function in isolated]
    parts: list[ConfiguredReward] = []
    problems: list[str] = []
    for name, spec, function, loaded in zip(names, rewards, isolated, loading, strict=True):
        try:
            if loaded is not None:
                loaded.result()
            parts.append(ConfiguredReward(_reward(name, spec, function, gyms, base), spec.onError))
        except RewardError as error:
            problems.append(f"reward {name}: {error}" + indent(f"\n{error.details}", "    ").rstrip())
    if problems:
        for function in isolated:
            if function is not None:
                function.close()
        raise RewardSetupError(problems)
    return Scorer(parts, trial)


def _isolated(spec: RewardSpec, gyms: Sequence[GymSpec], base: Path) -> IsolatedFunction | None:
    """Return the worker process of a reward, not started yet; None for a reward whose calls cannot hang."""
    package = __name__.rpartition(".")[0]
    match spec.type:
        case "Math":
            return IsolatedFunction(f"{package}.math:grader", (spec.extract,), spec.timeoutSeconds)
        case "ExactMatch":
            return None
        case "Gym":
            tasks = tuple(gym.model_dump() for gym in gyms)
            return IsolatedFunction(f"{package}.reasoning_gym:grader", (tasks,), spec.timeoutSeconds)
        case "Function":
            return IsolatedFunction(
                f"{package}.function:load_function", (spec.function, str(base.resolve())), spec.timeoutSeconds
            )


def _reward(
    name: str, spec: RewardSpec, isolated: IsolatedFunction | None, gyms: Sequence[GymSpec], base: Path
) -> Reward:
    """Return the reward that a spec describes. isolated: the reward's worker process, which has loaded its function."""
    if spec.type == "ExactMatch":
        return ExactMatch(name, spec.weight, grader(spec.extract))
    assert isolated is not None, "every other type runs a function of its own"
    match spec.type:
        case "Math":
            return Math(name, spec.weight, isolated)
        case "Gym" if not gyms:
            raise RewardError(
                "no source is a gym, so that there is no task to score with. Add one, or use another type."
            )
        case "Gym":
            return GymReward(name, spec.weight, isolated)
        case "Function" if not isolated.asynchronous:
            return SyncFunction(name, spec.weight, isolated)
        case "Function":
            # The worker has shown that the function loads and is a coroutine function, which runs on the event loop.
            isolated.close()
            function = load_function(str(spec.function), str(base.resolve()))
            return AsyncFunction(name, spec.weight, function, spec.timeoutSeconds)


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
