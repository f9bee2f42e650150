"""The interface of rewards: each scores a response with a number."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Protocol

from qwen35_trainer.failure_reasons import FailureReason

if TYPE_CHECKING:  # it imports numpy and pydantic, which the worker processes do not need
    from qwen35_trainer.data.prompt import Prompt


@dataclass(frozen=True)
class Response:
    """A response to score. token_count: tokens of the response. truncated: whether it reached the length limit."""

    prompt: Prompt
    text: str
    token_count: int
    truncated: bool


@dataclass(frozen=True)
class Score:
    """The score of one reward. value: unweighted, None after an error. error: `kind: message`. seconds: duration of the call."""

    value: float | None
    error: str | None
    seconds: float
    timed_out: bool = False
    """Whether the error is a time-out."""


class Reward(Protocol):
    """A scorer of responses. `score` raises only RewardError and RewardTimeoutError."""

    @property
    def name(self) -> str: ...
    @property
    def weight(self) -> float: ...

    async def score(self, response: Response) -> float: ...

    def close(self) -> None: ...


class RewardError(Exception):
    """A reward could not score. kind: type of the original exception. details: its traceback, if there is one.

    Characters of a user's exception that logs and terminals cannot print are escaped.
    """

    def __init__(self, message: str, *, kind: str = "RewardError", details: str = "") -> None:
        super().__init__(_plain(message))
        self.kind = kind
        self.details = _plain(details)


class RewardTimeoutError(RewardError):
    """A call took longer than timeoutSeconds, and was ended."""

    def __init__(self, message: str) -> None:
        super().__init__(message, kind="Timeout")


class RewardFailed(Exception):  # an outcome that the manifest requests
    """The run ends: a reward with `onError: Fail` failed, or all rewards failed for all of the first responses."""

    failure = FailureReason.REWARD_FAILED


class RewardSetupError(ValueError):
    """Rewards cannot be built. problems: one text per problem."""

    failure = FailureReason.REWARD_SETUP_ERROR

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        count = len(self.problems)
        return "\n  ".join([f"{count} problem{'' if count == 1 else 's'} in the rewards", *self.problems])


def as_score(value: object) -> float:
    """Return the number that a scorer returned. Raises RewardError for anything else, NaN and infinity included."""
    if not isinstance(value, Real):
        shown = repr(value)[:80]
        raise RewardError(f"returned {shown} ({type(value).__name__}), not a number", kind="NotANumber")
    if not math.isfinite(value):
        raise RewardError(f"returned {float(value)}; a score is a finite number", kind="NotANumber")
    return float(value)


def required_answer(response: Response) -> str:
    """Return the reference answer. Raises RewardError if the prompt has none."""
    if response.prompt.answer is None:
        raise RewardError(f"prompt {response.prompt.id} has no answer to compare with", kind="NoAnswer")
    return response.prompt.answer


def _plain(text: str) -> str:
    """Return the text with escapes for control characters, except tabs and line ends, and for lone halves of surrogate pairs."""
    shown = "".join(each if each.isprintable() or each in "\n\t" else ascii(each)[1:-1] for each in text)
    return shown.encode(errors="backslashreplace").decode()
