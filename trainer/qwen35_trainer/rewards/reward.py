"""The interface of rewards: a `Reward` turns a `Response` into a number. The other classes hold scores and errors."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Final, Protocol

from qwen35_trainer.failure_reasons import FailureReason

if TYPE_CHECKING:  # they import numpy and pydantic, which the processes of rewards do not need
    import numpy as np
    from numpy.typing import NDArray

    from qwen35_trainer.data.prompt import Prompt


GENERATION: Final = "generation"
"""Key of the responses that could not be generated, in errors whose other keys are names of rewards."""


@dataclass(frozen=True)
class ResponseTokens:
    """A response before it is decoded.

    ids: token ids, (tokens,).
    truncated: whether the response reached the length limit.
    """

    ids: NDArray[np.int32]
    truncated: bool


@dataclass(frozen=True)
class CombinedScore:
    """The reward of a response, and the scores from which it was computed.

    value: the weighted sum of the scores, or None if the sample does not train.
    parts: the unweighted score by name of the reward. A failed reward has 0 with `onError: Zero`, and is
      absent with `onError: Skip`.
    errors: error messages by name of the reward. A response that could not be generated has one error,
      under "generation".
    timeouts: the names of the rewards whose call timed out. They are also keys of `errors`.
    penalties: the names of the rewards whose weight is not above 0, for which a high score is not better. They do not
      count for accuracy.
    """

    value: float | None
    parts: Mapping[str, float]
    errors: Mapping[str, str]
    timeouts: frozenset[str] = frozenset()
    penalties: frozenset[str] = frozenset()

    def first_error(self, prompt: str) -> str:
        """Return a text that names the first failed reward, the prompt and the reason. `errors` must not be empty."""
        name, error = next(iter(self.errors.items()))
        return f"reward {name}, prompt {prompt}: {error}"


class GroupScorer(Protocol):
    """Scores the responses of a group with all rewards of the run."""

    async def score_group(
        self, prompt: Prompt, responses: Sequence[ResponseTokens], *, in_trial: bool
    ) -> tuple[CombinedScore, ...]:
        """Return the combined score of each response, in order.

        in_trial: whether the responses count towards the trial, which consists of the first responses of the run.
        Raises RewardFailed if a reward with `onError: Fail` cannot score, or if every reward has failed for every
        response of the trial.
        """
        ...


@dataclass(frozen=True)
class PromptFields:
    """The fields of a prompt that rewards use.

    id: the id of the prompt.
    answer: the reference answer, or None.
    content: the pickled tuple (text, answer, metadata). Only the worker process of a reward unpickles it.
    """

    id: str
    answer: str | None
    content: bytes

    @classmethod
    def of(cls, prompt: Prompt) -> PromptFields:
        """Return the fields of `prompt`. Raises RewardError if the metadata cannot be pickled."""
        text = prompt.text if isinstance(prompt.text, str) else [dict(message) for message in prompt.text]
        try:
            content = pickle.dumps((text, prompt.answer, dict(prompt.metadata)), protocol=5)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            reason = f"the prompt's metadata cannot be sent to the process of the reward: {error}"
            raise RewardError(reason, kind="Unsendable") from error
        return cls(prompt.id, prompt.answer, content)


@dataclass(frozen=True)
class Response:
    """A decoded response to score.

    token_count: number of tokens of the response.
    truncated: whether the response reached the length limit.
    """

    prompt: PromptFields
    text: str
    token_count: int
    truncated: bool


@dataclass(frozen=True)
class Score:
    """The unweighted score of a response by one reward, or the error of the reward.

    value: the score; None after an error.
    error: text `kind: message`; None if the reward succeeded.
    """

    value: float | None
    error: str | None = None
    timed_out: bool = False
    """Whether the call of the reward timed out."""
    details: str = ""
    """The traceback of the error; empty without an error, or if no traceback was sent."""

    @classmethod
    def failed(cls, error: RewardError) -> Score:
        return cls(None, f"{error.kind}: {error}", isinstance(error, RewardTimeoutError), error.details)

    @property
    def kind(self) -> str:
        """The kind of the error, which is the part of `error` before the first colon."""
        return (self.error or "").partition(":")[0]


class Reward(Protocol):
    """A reward of the manifest: scores responses. `score` raises only RewardError and RewardTimeoutError."""

    @property
    def name(self) -> str: ...

    @property
    def concurrent(self) -> bool:
        """Whether `score` waits for other processes, so that several responses can be scored at the same time.

        Otherwise `score` computes on the event loop, and is called for one response at a time.
        """
        ...

    async def score(self, response: Response) -> float: ...

    async def close(self) -> None: ...


class RewardError(Exception):
    """A reward could not score a response, or could not be loaded.

    kind: a word for the kind of error, such as the type of the exception that caused it. details: traceback of that
    exception, or empty. Characters that logs and terminals cannot print are escaped.
    """

    def __init__(self, message: str, *, kind: str = "RewardError", details: str = "") -> None:
        super().__init__(_plain(message))
        self.kind = _plain(kind)
        self.details = _plain(details)


class RewardTimeoutError(RewardError):
    """A call of a reward took longer than its `timeoutSeconds`. The call was ended."""

    def __init__(self, message: str) -> None:
        super().__init__(message, kind="Timeout")


class RewardFailed(Exception):  # an outcome that the manifest requests
    """Ends the run: a reward with `onError: Fail` failed, or every reward failed for all responses of the trial.

    The trial consists of the first responses of the run.
    """

    failure = FailureReason.REWARD_FAILED


class RewardSetupError(ValueError):
    """The rewards of a run cannot be built. problems: one text per problem."""

    failure = FailureReason.REWARD_SETUP_ERROR

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        count = len(self.problems)
        return "\n  ".join([f"{count} problem{'' if count == 1 else 's'} in the rewards", *self.problems])


MAX_SCORE: Final = 1e15
"""Maximum magnitude of a score. Advantages square rewards in float32, whose maximum is 3e38."""


def as_score(value: object) -> float:
    """Return `value`, the result of a reward function, as a float.

    Raises RewardError if `value` is not a number, is infinite or NaN, or exceeds MAX_SCORE in magnitude.
    """
    if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        value = bool(value)  # not a Real for Python, other than its own bool
    if not isinstance(value, Real):
        shown = repr(value)[:80]
        raise RewardError(f"returned {shown} ({type(value).__name__}), not a number", kind="NotANumber")
    too_large = f"returned {repr(value)[:80]}; a score is at most {MAX_SCORE:g} in magnitude"
    try:
        score = float(value)
    except OverflowError as error:
        raise RewardError(too_large, kind="NotANumber") from error
    if not math.isfinite(score):
        raise RewardError(f"returned {score}; a score is a finite number", kind="NotANumber")
    if abs(score) > MAX_SCORE:
        raise RewardError(too_large, kind="NotANumber")
    return score


def required_answer(response: Response) -> str:
    """Return the reference answer of a response's prompt. Raises RewardError if the prompt has none."""
    if response.prompt.answer is None:
        raise RewardError(f"prompt {response.prompt.id} has no answer to compare with", kind="NoAnswer")
    return response.prompt.answer


def _plain(text: str) -> str:
    """Return `text` with control characters and unpaired surrogates escaped. Tabs and line ends are kept."""
    shown = "".join(each if each.isprintable() or each in "\n\t" else ascii(each)[1:-1] for each in text)
    return shown.encode(errors="backslashreplace").decode()
