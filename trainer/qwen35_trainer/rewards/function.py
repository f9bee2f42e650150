"""Function: a reward that calls a function of the user, given as `module:function`, sync or async.

The function is called as `function(prompt, response, answer, metadata)` and returns a number. prompt: the text, or the
list of chat messages. answer: the reference answer, or None if the row has none. metadata: a copy of the row's other
fields, as a dict.
"""

import difflib
import importlib
import inspect
import pickle
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar

from qwen35_trainer.rewards.function_process import is_asynchronous
from qwen35_trainer.rewards.isolated import IsolatedFunction
from qwen35_trainer.rewards.reward import Response, RewardError

EXPECTED = "function(prompt, response, answer, metadata)"
_MAX_NAMED = 10


@dataclass(frozen=True)
class Function:
    """A reward that calls a function of the user in worker processes."""

    name: str
    isolated: IsolatedFunction
    concurrent: ClassVar[bool] = True

    async def score(self, response: Response) -> float:
        return await self.isolated.call(response.prompt.content, response.text)

    async def close(self) -> None:
        await self.isolated.close()


def load_scorer(target: str, base: str) -> Callable[[bytes, str], Any]:
    """Load the user's function, and return a function that takes (pickled content of the prompt, response) and calls
    the user's function.

    target: `module:function`. base: the manifest's folder. Raises RewardError if the user's function cannot be loaded.
    """
    function = load_function(target, base)

    def arguments(content: bytes, response: str) -> tuple[object, ...]:
        prompt, answer, metadata = pickle.loads(content)  # noqa: S301  # from our caller
        return prompt, response, answer, metadata

    if not is_asynchronous(function):
        return lambda content, response: function(*arguments(content, response))

    async def score(content: bytes, response: str) -> object:
        return await function(*arguments(content, response))

    return score


def load_function(target: str, base: str) -> Callable[..., Any]:
    """Import and return the function `module:function`.

    target: `module:function`. base: the manifest's folder, in which modules are searched first; it is inserted at the
    start of sys.path. Raises RewardError if the module or the function does not exist, the import fails, or the
    parameters do not fit.
    """
    if sys.path[:1] != [base]:
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
        raise RewardError(f"{target}: {module.__file__} has no {name!r}{_known(name, names)}", kind="NoFunction")
    if not callable(function):
        raise RewardError(f"{target} is a {type(function).__name__}, not a function", kind="NoFunction")
    _check_parameters(target, function)
    return function  # type: ignore[no-any-return]  # getattr is untyped; callable() narrowed it


def _known(name: str, names: list[str]) -> str:
    """Return the end of the message for an unknown name: the similar ones of `names`, and the first _MAX_NAMED of all."""
    near = difflib.get_close_matches(name, names)
    listed = [*near, *(each for each in names if each not in near)]
    more = f" and {len(listed) - _MAX_NAMED} more" if len(listed) > _MAX_NAMED else ""
    question = f" (did you mean {' or '.join(near)}?)" if near else ""
    return f"{question}; it has {', '.join(listed[:_MAX_NAMED]) or 'no function'}{more}"


def _of_module(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without its first frames, which belong to the import machinery."""
    while trace is not None and (
        trace.tb_frame.f_code.co_filename == __file__ or "importlib" in trace.tb_frame.f_code.co_filename
    ):
        trace = trace.tb_next
    return trace


def _check_parameters(target: str, function: Callable[..., object]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:
        # Some compiled functions have no signature. Their first call will show whether they accept these arguments.
        return
    try:
        signature.bind("prompt", "response", "answer", {})
    except TypeError as error:
        reason = f"{target}{signature} cannot be called as {EXPECTED}, with four positional arguments: {error}"
        raise RewardError(reason, kind="WrongParameters") from error
