"""Parses tool calls in the XML format of Qwen3.5, from text to typed arguments.

Only tests use this module today; rollouts with several turns will.

    text before the first call
    <tool_call>
    <function=NAME>
    <parameter=NAME>
    value, of one or more lines
    </parameter>
    </function>
    </tool_call>

The text is read once from left to right, so that a value may contain any tag except its closing tag. If the text ends
within a call, the call was cut off at the token limit: it has the arguments so far, and `cut_off` is true. Any other
violation of the format makes the call malformed, and parsing continues with the next call.

The format has no escapes, so a parameter without its closing tag looks like a parameter whose value contains tags. The
value ends at the next closing tag, even if a line with <parameter=NAME> comes first. A parameter counts as not closed
in two cases: the call ends and no closing tag follows, or the call ends before the next closing tag, which belongs to a
parameter of a later call.

vLLM's qwen3_coder parser and verl's Qwen3XMLToolParser read the same format. They drop some input that this parser
keeps or reports: an empty value, a call after an error, a JSON array that is not a Python literal, a wrong number.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qwen35_trainer.data.prompt import Tool
from qwen35_trainer.data.tool_values import JsonValue, typed_value

CALL, END_OF_CALL = "<tool_call>", "</tool_call>"
FUNCTION, END_OF_FUNCTION = "<function=", "</function>"
PARAMETER, END_OF_PARAMETER = "<parameter=", "</parameter>"
_NAME = re.compile(r"([^<>\n]*)>")
_CALL_ENDS = re.compile(rf"\n{END_OF_FUNCTION}\s*{END_OF_CALL}")
_CALL_WITH_PARAMETER = re.compile(rf"{CALL}\s*{FUNCTION}[^<>\n]*>\s*{PARAMETER}")


@dataclass(frozen=True)
class ToolCall:
    """A well-formed call of a tool.

    name: name of the tool. arguments: value of each parameter, in the order of the text, with the types of the
    tool's schema.
    """

    name: str
    arguments: Mapping[str, JsonValue]
    problems: tuple[str, ...] = ()
    """Mismatches with the tool's schema: an unknown tool or parameter, a missing parameter, a value of another type.

    A value that does not fit the type stays text.
    """
    cut_off: bool = False
    """Whether the text ended within the call, so that the last value may be incomplete."""

    @property
    def arguments_json(self) -> str:
        """The arguments as JSON text, as chat messages contain them. Characters beyond ASCII are not escaped."""
        return json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True)
class MalformedCall:
    """A tool call that violates the format.

    text: the call as the model wrote it. reason: the violation, as a message. cut_off: whether the text ended within
    the call.
    """

    text: str
    reason: str
    cut_off: bool = False


@dataclass(frozen=True)
class ParsedResponse:
    """A parsed response. content: the text before the first call. calls: all calls, in order."""

    content: str
    calls: tuple[ToolCall | MalformedCall, ...]
    stray: tuple[str, ...] = ()
    """Text between and after the calls, which the format does not allow; outer whitespace is removed."""


class _Broken(Exception):
    """A tool call violates the format. at: position in the text at which the parser stopped."""

    def __init__(self, reason: str, at: int) -> None:
        super().__init__(reason)
        self.reason, self.at = reason, at


def parse_tool_calls(text: str, tools: Sequence[Tool] = ()) -> ParsedResponse:
    """Parse the tool calls of a response. Never raises.

    text: the response without its reasoning (the part up to </think>) and without the end token. tools: functions that
    the model may call, each {type: function, function: {name, parameters}} or only the inner mapping. The JSON schemas
    of the parameters determine the types of the values. Values of unknown tools and of unknown parameters stay text.
    """
    schemas = _schemas(tools)
    content, _, _ = text.partition(CALL)
    calls: list[ToolCall | MalformedCall] = []
    stray: list[str] = []
    start = len(content)
    while start < len(text):
        reader = _Reader(text, start + len(CALL))
        try:
            name, values = reader.call()
            calls.append(_typed(name, values, schemas, cut_off=reader.cut_off))
            end = reader.at
        except _Broken as broken:
            end = _resume(text, broken.at)
            calls.append(MalformedCall(text[start:end].strip(), broken.reason, cut_off=broken.at >= len(text)))
        following = text.find(CALL, end)
        start = following if following >= 0 else len(text)
        stray += [text[end:start].strip()] if text[end:start].strip() else []
    return ParsedResponse(content, tuple(calls), tuple(stray))


def _resume(text: str, at: int) -> int:
    """Return the position at which parsing continues after a malformed call.

    The position is after the call's closing tag or at the next call, whichever comes first, or else the end of the text.
    at: position at which the parser stopped.
    """
    closed, following = text.find(END_OF_CALL, at), text.find(CALL, at)
    if closed >= 0 and (following < 0 or closed < following):
        return closed + len(END_OF_CALL)
    return following if following >= 0 else len(text)


@dataclass
class _Reader:
    """Reads one tool call from a text, starting at position `at`."""

    text: str
    at: int
    cut_off: bool = False

    def call(self) -> tuple[str, list[tuple[str, str]]]:
        """Read the name of the function and its parameters, each as (name, text of the value).

        Raises _Broken if the call violates the format.
        """
        values: list[tuple[str, str]] = []
        if not self._take(FUNCTION):
            raise _Broken(f"{FUNCTION}NAME> is expected after {CALL}", self._stop(FUNCTION))
        name = self._name(FUNCTION)
        while self._take(PARAMETER):
            if self._ended_in_name():
                self.at, self.cut_off = len(self.text), True
                return name, values
            parameter = self._name(PARAMETER)
            if any(parameter == earlier for earlier, _ in values):
                raise _Broken(f"parameter {parameter!r} is there twice", self.at)
            values.append((parameter, self._value(parameter)))
            if self.cut_off:
                return name, values
        self._close(END_OF_FUNCTION, or_else=PARAMETER)
        self._close(END_OF_CALL)
        return name, values

    def _close(self, tag: str, or_else: str = "") -> None:
        """Skip the closing tag `tag`. Raises _Broken if something else comes next.

        or_else: an opening tag that the format also allows here; "" if there is none. If the text ends within `tag` or
        `or_else`, sets `cut_off` and goes to the end of the text.
        """
        if self._take(tag):
            return
        if not self._ends_within(tag) and not (or_else and self._ends_within(or_else)):
            raise _Broken(f"{tag} is expected after {self.text[: self.at][-20:]!r}", self.at)
        self.at, self.cut_off = len(self.text), True

    def _take(self, tag: str) -> bool:
        """Skip whitespace, and then `tag` if it comes next. Returns whether `tag` came next."""
        while self.text[self.at : self.at + 1].isspace():
            self.at += 1
        if not self.text.startswith(tag, self.at):
            return False
        self.at += len(tag)
        return True

    def _ends_within(self, tag: str) -> bool:
        """Return whether the remaining text, apart from leading whitespace, is empty or an incomplete `tag`."""
        return tag.startswith(self.text[self.at :].strip())

    def _stop(self, tag: str) -> int:
        return len(self.text) if self._ends_within(tag) else self.at

    def _name(self, tag: str) -> str:
        match = _NAME.match(self.text, self.at)
        if match is None:
            stopped = len(self.text) if self._ended_in_name() else self.at
            raise _Broken(f"{tag} has no name that ends in >", stopped)
        self.at = match.end()
        name = match[1].strip()
        if not name:
            raise _Broken(f"{tag}> has no name", self.at)
        return name

    def _ended_in_name(self) -> bool:
        return not re.compile(r"[<>\n]").search(self.text, self.at)

    def _value(self, parameter: str) -> str:
        """Read the value of a parameter: the text up to the closing tag, without one newline at each end."""
        start, closed = self.at, self.text.find(END_OF_PARAMETER, self.at)
        end = closed if closed >= 0 else len(self.text)
        ended = _CALL_ENDS.search(self.text, start, end)
        if ended and (closed < 0 or _CALL_WITH_PARAMETER.search(self.text, ended.end(), end)):
            raise _Broken(f"parameter {parameter!r} is not closed", ended.start())
        if closed < 0:
            self.at, self.cut_off = end, True
            return _without_beginning_of_tag(self.text[start:]).removeprefix("\n")
        self.at = end + len(END_OF_PARAMETER)
        return self.text[start:end].removeprefix("\n").removesuffix("\n")


def _without_beginning_of_tag(value: str) -> str:
    """Remove an incomplete closing tag, and the newline before the tag, from the end of a value that was cut off."""
    closing = f"\n{END_OF_PARAMETER}"
    lengths = range(len(closing) - 1, 0, -1)
    return next((value[:-length] for length in lengths if value.endswith(closing[:length])), value)


def _schemas(tools: Sequence[Tool]) -> dict[str, Mapping[str, object]]:
    """Return the name of each tool → the JSON schema of its parameters."""
    functions = [tool.get("function", tool) for tool in tools]
    named = [function for function in functions if isinstance(function, Mapping)]
    return {str(function.get("name")): _mapping(function.get("parameters")) for function in named}


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _typed(
    name: str, values: Sequence[tuple[str, str]], schemas: Mapping[str, Mapping[str, object]], *, cut_off: bool
) -> ToolCall:
    if name not in schemas:
        names = f"there are {', '.join(schemas)}" if schemas else "there are none"
        return ToolCall(name, dict(values), (f"unknown tool {name!r}; {names}",), cut_off)
    properties = _mapping(schemas[name].get("properties"))
    arguments: dict[str, JsonValue] = {}
    problems: list[str] = []
    for parameter, text in values:
        if parameter not in properties:
            arguments[parameter] = text
            problems.append(f"{name} has no parameter {parameter!r}; it has {', '.join(properties) or 'none'}")
            continue
        arguments[parameter], problem = typed_value(text, _mapping(properties[parameter]))
        if problem is not None:
            problems.append(f"parameter {parameter!r}: {problem}")
    required = schemas[name].get("required")
    missing = [str(each) for each in required if each not in arguments] if isinstance(required, list | tuple) else []
    if missing and not cut_off:
        problems.append(f"{name} needs {', '.join(missing)}")
    return ToolCall(name, arguments, tuple(problems), cut_off)
