"""What a reward is: a completion in, a number out."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # numpy and pydantic come with it, and workers, which need neither, import this
    from qwen35_trainer.data.prompt import Prompt


@dataclass(frozen=True)
class Completion:
    """One response to judge. token_count: tokens of the response; truncated: it ran into the length limit."""

    prompt: Prompt
    text: str
    token_count: int
    truncated: bool


@dataclass(frozen=True)
class Score:
    """What one reward said. value: unweighted, None after an error; error: `kind: message`; seconds: the call took."""

    value: float | None
    error: str | None
    seconds: float
    timed_out: bool = False
    """The error is a time-out."""


class Reward(Protocol):
    """One scorer. `score` raises RewardError or RewardTimeoutError, nothing else."""

    @property
    def name(self) -> str: ...
    @property
    def weight(self) -> float: ...

    async def score(self, completion: Completion) -> float: ...

    def close(self) -> None: ...


class RewardError(Exception):
    """A reward could not score. kind: type of the original exception; details: its traceback, where there is one.

    Texts of the user's exceptions may have anything in them. Here they lose what logs and terminals cannot take.
    """

    def __init__(self, message: str, *, kind: str = "RewardError", details: str = "") -> None:
        super().__init__(_plain(message))
        self.kind = kind
        self.details = _plain(details)


class RewardTimeoutError(RewardError):
    """A call took longer than timeoutSeconds and was ended."""

    def __init__(self, message: str) -> None:
        super().__init__(message, kind="Timeout")


class RewardFailed(Exception):  # an outcome the user asked for
    """A reward with `onError: Fail` could not score: the run ends."""


class RewardSetupError(ValueError):
    """Rewards cannot be built. problems: one text per problem."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        count = len(self.problems)
        return "\n  ".join([f"{count} problem{'' if count == 1 else 's'} in the rewards", *self.problems])


def as_score(value: object) -> float:
    """The number a scorer returned. Raises RewardError for anything else, NaN and infinity included."""
    if not isinstance(value, Real):
        shown = repr(value)[:80]
        raise RewardError(f"returned {shown} ({type(value).__name__}), not a number", kind="NotANumber")
    if not math.isfinite(value):
        raise RewardError(f"returned {float(value)}; a score is a finite number", kind="NotANumber")
    return float(value)


def required_answer(completion: Completion) -> str:
    """The reference answer. Raises RewardError where the prompt has none."""
    if completion.prompt.answer is None:
        raise RewardError(f"prompt {completion.prompt.id} has no answer to compare with", kind="NoAnswer")
    return completion.prompt.answer


def _plain(text: str) -> str:
    """Control characters, except for tabs and line ends, and lone halves of surrogate pairs as escapes."""
    shown = "".join(each if each.isprintable() or each in "\n\t" else ascii(each)[1:-1] for each in text)
    return shown.encode(errors="backslashreplace").decode()
