"""Function: the user's own scorer, `module:function`, sync or async.

It is called as `function(prompt, response, answer, metadata)` and returns a number: prompt is the text, or the list of
chat messages; answer is None where the data has none; metadata is the row's other fields, as a dict of its own.
"""

import asyncio
import difflib
import importlib
import inspect
import sys
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from qwen35_trainer.rewards.base import Completion, RewardError, RewardTimeoutError, as_score
from qwen35_trainer.rewards.isolated import IsolatedFunction

EXPECTED = "function(prompt, response, answer, metadata)"

type AsyncScorer = Callable[..., Awaitable[object]]


@dataclass(frozen=True)
class SyncFunction:
    """A plain function: runs in a worker process and is killed at its time-out."""

    name: str
    weight: float
    isolated: IsolatedFunction

    async def score(self, completion: Completion) -> float:
        return await self.isolated.call(*_arguments(completion))

    def close(self) -> None:
        self.isolated.close()


@dataclass(frozen=True)
class AsyncFunction:
    """A coroutine function: runs on the caller's event loop, many calls at once, and is cancelled at its time-out.

    It must not block: nothing could end it, and everything else on the loop would stand still.
    """

    name: str
    weight: float
    function: AsyncScorer
    timeout_seconds: float

    async def score(self, completion: Completion) -> float:
        try:
            async with asyncio.timeout(self.timeout_seconds) as deadline:
                value = await self.function(*_arguments(completion))
        except (Exception, SystemExit) as error:
            if isinstance(error, TimeoutError) and deadline.expired():
                late = f"no score within timeoutSeconds {self.timeout_seconds:g}; the call was cancelled"
                raise RewardTimeoutError(late) from error
            details = "".join(traceback.format_exception(error))
            raise RewardError(str(error), kind=type(error).__name__, details=details) from error
        return as_score(value)

    def close(self) -> None:
        """Nothing to end: calls belong to the event loop."""


def _arguments(completion: Completion) -> tuple[object, ...]:
    prompt = completion.prompt
    text = prompt.text if isinstance(prompt.text, str) else [dict(message) for message in prompt.text]
    return text, completion.text, prompt.answer, dict(prompt.metadata)


def load_function(target: str, base: str) -> Callable[..., Any]:
    """Import `module:function`; base, the manifest's folder, goes first on sys.path, as for a script in it.

    Raises RewardError: no such module, an error in it (or in one that it imports), no such function, wrong parameters.
    """
    if base not in sys.path:
        sys.path.insert(0, base)
    module_name, _, name = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            reason = f"{target}: module {error.name} was not found in the manifest's folder {base} or on sys.path"
            raise RewardError(reason, kind="NoModule") from error
        own = _of_module(error.__traceback__)
        details = "".join(traceback.format_exception(error.with_traceback(own)))
        place = f" ({own.tb_frame.f_code.co_filename}, line {own.tb_lineno})" if own is not None else ""
        hint = f" Searched: the manifest's folder {base}, then sys.path." if isinstance(error, ImportError) else ""
        reason = f"{target}: importing {module_name} failed: {type(error).__name__}: {error}{place}.{hint}"
        raise RewardError(reason, kind="ImportFailed", details=details) from error
    function = getattr(module, name, None)
    if function is None:
        names = [entry for entry, value in vars(module).items() if callable(value) and not entry.startswith("_")]
        near = ", ".join(difflib.get_close_matches(name, names) or names[:10]) or "no function"
        raise RewardError(f"{target}: {module.__file__} has no {name!r}; it has {near}", kind="NoFunction")
    if not callable(function):
        raise RewardError(f"{target} is a {type(function).__name__}, no function", kind="NoFunction")
    _check_parameters(target, function)
    return function  # type: ignore[no-any-return]  # getattr is untyped; callable() narrowed it


def _of_module(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of the import itself."""
    while trace is not None and (
        trace.tb_frame.f_code.co_filename == __file__ or "importlib" in trace.tb_frame.f_code.co_filename
    ):
        trace = trace.tb_next
    return trace


def _check_parameters(target: str, function: Callable[..., object]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:
        # Some compiled functions have no signature to look at; the first call will tell.
        return
    try:
        signature.bind("prompt", "response", "answer", {})
    except TypeError as error:
        reason = f"{target}{signature} cannot be called as {EXPECTED}, with four positional arguments: {error}"
        raise RewardError(reason, kind="WrongParameters") from error
