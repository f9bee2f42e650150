"""Reads JSON that may be nested so deeply that Python can neither parse nor copy it: deeper parts are replaced.

    text ─► nested deeper than MAX_DEPTH? ── no ──────────────────────────► json.loads
                       └─ yes ─► TOO_DEEP replaces the deeper parts ──────► json.loads

An API server accepts 10,000 levels where a definition keeps unknown fields, as in spec.pods. Python's parser raises
RecursionError from about 1,900 levels on, and copy.deepcopy from about 300 on. One such object would end every list and
every watch that contains it.
"""

import json
import re
from collections.abc import Callable
from itertools import accumulate
from typing import Any, Final

MAX_DEPTH: Final = 100
"""Number of levels that are read. A pod's spec has about 15."""
TOO_DEEP: Final = "nested too deeply"
"""The string that replaces each part of a document that is nested too deeply."""

_STRING = rb'"[^"\\]*(?:\\.[^"\\]*)*"'
_STRINGS, _STRINGS_AND_BRACKETS = re.compile(_STRING), re.compile(_STRING + rb"|[][{}]")
_OPENING = b"[{"
_STEPS: Final = [1 if byte in _OPENING else -1 for byte in range(256)]
_DECODER: Final = json.JSONDecoder()
_ITEMS, _NEXT = re.compile(r'"items"\s*:\s*\[\s*'), re.compile(r"\s*,?\s*")
_NO_BRACKETS: Final = bytes(byte for byte in range(256) if byte not in b"[]{}")


def loads(text: bytes) -> Any:  # noqa: ANN401  # JSON
    """Parse JSON, with TOO_DEEP in place of every part nested deeper than MAX_DEPTH.

    Raises ValueError if the text is not JSON. The value is measured, and not the text: a text with many brackets in strings takes much
    longer to measure than to parse, and anybody can write one into a ConfigMap.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        return json.loads(_cut(text))
    return value if _is_shallow(value) else json.loads(_cut(text))


def loads_list(text: bytes, each: Callable[[Any], Any]) -> Any:  # noqa: ANN401  # JSON
    """Parse a list of the API server as `loads` does, with each(item) in place of every item.

    The items are parsed one at a time. Parsed JSON takes up to 30 times the memory of its text, as in `[{},{},…]`, so a page of such
    objects, which anybody who may create trainings can write, would otherwise take hundreds of megabytes. Raises ValueError if the text
    is not JSON.
    """
    try:
        return _list(text, each)
    except RecursionError:
        return _list(_cut(text), each)


def _list(text: bytes, each: Callable[[Any], Any]) -> Any:  # noqa: ANN401  # JSON
    """Of the fields that precede `items` in a list, none has a field of that name."""
    whole = text.decode()
    if (begin := _ITEMS.search(whole)) is None:
        return loads(text)
    items, place = [], begin.end()
    while not whole.startswith("]", place):
        item, place = _DECODER.raw_decode(whole, place)
        items.append(each(item if _is_shallow(item) else loads(json.dumps(item).encode())))
        place = _NEXT.match(whole, place).end()  # type: ignore[union-attr]  # it matches the empty string too
    answer = json.loads(whole[: begin.end()] + whole[place:])
    return answer | {"items": items} if isinstance(answer, dict) else answer


def _is_shallow(value: object) -> bool:
    """Return whether a parsed document has at most MAX_DEPTH levels of objects and lists.

    `type(…) is …` takes a fifth of the time that isinstance takes for a list of 100,000 numbers, and every event is measured.
    """
    level: list[Any] = [value] if type(value) is dict or type(value) is list else []
    for _ in range(MAX_DEPTH):
        level = [
            child
            for parent in level
            for child in (parent.values() if type(parent) is dict else parent)
            if type(child) is dict or type(child) is list
        ]
        if not level:
            return True
    return False


def shallow(text: bytes) -> bytes:
    """Return the JSON text with TOO_DEEP in place of every part nested deeper than MAX_DEPTH.

    A text without such parts is returned unchanged.
    """
    opened = text.count(b"{") + text.count(b"[")
    return _cut(text) if opened > MAX_DEPTH and depth(text) > MAX_DEPTH else text


def depth(text: bytes) -> int:
    """Return the number of levels of objects and arrays in JSON."""
    brackets = _STRINGS.sub(b"", text).translate(None, _NO_BRACKETS)
    return max(accumulate(map(_STEPS.__getitem__, brackets)), default=0)


def _cut(text: bytes) -> bytes:
    kept: list[bytes] = []
    level, start = 0, 0
    for token in _STRINGS_AND_BRACKETS.finditer(text):
        first = text[token.start()]
        if first in _OPENING:
            level += 1
            if level == MAX_DEPTH + 1:
                kept += (text[start : token.start()], json.dumps(TOO_DEEP).encode())
        elif first in b"]}":
            if level == MAX_DEPTH + 1:
                start = token.end()
            level -= 1
    if level <= MAX_DEPTH:  # otherwise the text is cut off within what is left out
        kept.append(text[start:])
    return b"".join(kept)
