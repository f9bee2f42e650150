"""The scorer that a spec describes."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import indent

from qwen35_trainer.rewards.base import Reward, RewardError, RewardSetupError
from qwen35_trainer.rewards.exact_match import ExactMatch, grader
from qwen35_trainer.rewards.function import AsyncFunction, SyncFunction, load_function
from qwen35_trainer.rewards.gym import GymReward
from qwen35_trainer.rewards.isolated import IsolatedFunction
from qwen35_trainer.rewards.math import Math
from qwen35_trainer.rewards.scorer import Part, Scorer
from qwen35_trainer.spec.data import Gym, Source
from qwen35_trainer.spec.rewards import Reward as RewardSpec

_COMPARES_ANSWERS = ("Math", "ExactMatch")


def needs_answers(rewards: Iterable[RewardSpec]) -> bool:
    """Whether some reward compares with a reference answer, so that every prompt must have one."""
    return any(reward.type in _COMPARES_ANSWERS for reward in rewards)


def function_errors(rewards: Sequence[RewardSpec], base: Path) -> dict[int, RewardError]:
    """Why functions of `spec.rewards` cannot be called, by the reward's index. Loads each in a process that ends again.

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


def build_scorer(rewards: Sequence[RewardSpec], sources: Iterable[Source], base: Path, *, trial: int = 0) -> Scorer:
    """The scorer of `spec.rewards`, its worker processes started and all functions loaded.

    sources: those whose prompts will be scored, training and validation; the worker of a Gym reward
    loads their tasks before the first call.
    base: the manifest's folder, from which functions may be imported. trial: as of Scorer. Raises RewardSetupError with every problem.
    """
    gyms = [source.gym for source in sources if source.gym is not None]
    names = _names(rewards)
    if repeated := sorted(name for name, count in Counter(names).items() if count > 1):
        raise RewardSetupError([f"two rewards are named {name}. Give one another name." for name in repeated])
    isolated = [_isolated(reward, gyms, base) for reward in rewards]
    # All start before any is waited for: they load side by side.
    loading = [None if function is None else function.load() for function in isolated]
    parts: list[Part] = []
    problems: list[str] = []
    for name, spec, function, loaded in zip(names, rewards, isolated, loading, strict=True):
        try:
            if loaded is not None:
                loaded.result()
            parts.append(Part(_reward(name, spec, function, gyms, base), spec.onError))
        except RewardError as error:
            problems.append(f"reward {name}: {error}" + indent(f"\n{error.details}", "    ").rstrip())
    if problems:
        for function in isolated:
            if function is not None:
                function.close()
        raise RewardSetupError(problems)
    return Scorer(parts, trial)


def _isolated(spec: RewardSpec, gyms: Sequence[Gym], base: Path) -> IsolatedFunction | None:
    """The worker process of a reward, not yet started; None where a call cannot hang."""
    package = __name__.rpartition(".")[0]
    match spec.type:
        case "Math":
            return IsolatedFunction(f"{package}.math:grader", (spec.extract,), spec.timeoutSeconds)
        case "ExactMatch":
            return None
        case "Gym":
            tasks = tuple(gym.model_dump() for gym in gyms)
            return IsolatedFunction(f"{package}.gym:grader", (tasks,), spec.timeoutSeconds)
        case "Function":
            return IsolatedFunction(
                f"{package}.function:load_function", (spec.function, str(base.resolve())), spec.timeoutSeconds
            )


def _reward(name: str, spec: RewardSpec, isolated: IsolatedFunction | None, gyms: Sequence[Gym], base: Path) -> Reward:
    """The reward around a loaded function."""
    if spec.type == "ExactMatch":
        return ExactMatch(name, spec.weight, grader(spec.extract))
    assert isolated is not None, "every other type runs a function of its own"
    match spec.type:
        case "Math":
            return Math(name, spec.weight, isolated)
        case "Gym" if not gyms:
            raise RewardError("no source is a gym, so that there is no task to ask. Add one, or use another type.")
        case "Gym":
            return GymReward(name, spec.weight, isolated)
        case "Function" if not isolated.asynchronous:
            return SyncFunction(name, spec.weight, isolated)
        case "Function":
            # The worker has shown that it loads, and that it belongs on the event loop.
            isolated.close()
            function = load_function(str(spec.function), str(base.resolve()))
            return AsyncFunction(name, spec.weight, function, spec.timeoutSeconds)


def _names(rewards: Sequence[RewardSpec]) -> list[str]:
    """The names in metrics: as given, or the type's, numbered where several of a type have none."""
    unnamed = Counter(reward.type for reward in rewards if reward.name is None)
    seen: Counter[str] = Counter()
    names = []
    for reward in rewards:
        seen[reward.type] += reward.name is None
        numbered = f"{reward.type}-{seen[reward.type]}" if unnamed[reward.type] > 1 else reward.type
        names.append(reward.name or numbered)
    return names
