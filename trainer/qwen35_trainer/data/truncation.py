"""What becomes of sequences above the limit: `data.overlongPrompts`."""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from qwen35_trainer.data.errors import DataError
from qwen35_trainer.data.prompt import Prompt
from qwen35_trainer.data.template import Tokens
from qwen35_trainer.spec.data import Overlong

logger = logging.getLogger(__name__)
_NAMED_OFFENDERS = 5


class CutError(Exception):
    """Why a sequence cannot be cut."""


class Encoded(Protocol):
    @property
    def prompt(self) -> Prompt: ...
    @property
    def token_ids(self) -> Tokens: ...


def kept(length: int, limit: int, rule: Overlong) -> tuple[range, range]:
    """The positions that stay of a sequence of `length` > `limit`, as a head and a tail; one of them may be empty.

    TruncateLeft keeps the end, TruncateRight the beginning, TruncateMiddle half of the limit (rounded down) at the
    beginning and the rest at the end.
    """
    head = {"TruncateLeft": 0, "TruncateRight": limit, "TruncateMiddle": limit // 2}[rule]
    return range(head), range(length - (limit - head), length)


def select[T](values: tuple[T, ...], parts: tuple[range, range]) -> tuple[T, ...]:
    """The values at those positions."""
    head, tail = parts
    return values[head.start : head.stop] + values[tail.start : tail.stop]


def fit[T: Encoded](
    encoded: Sequence[T],
    limit: int,
    limit_name: str,
    rule: Overlong,
    problems: Sequence[str],
    cut: Callable[[T, tuple[range, range]], T],
) -> list[T]:
    """All of at most `limit` tokens: longer ones are refused, left out, or cut.

    cut: makes a sequence of the positions given; raises CutError. Raises DataError with `problems`, with the sequences
    that are refused, and when nothing is left.
    """
    found = list(problems)
    fitting: list[T] = []
    offenders: list[T] = []
    for entry in encoded:
        length = len(entry.token_ids)
        if length <= limit:
            fitting.append(entry)
            continue
        offenders.append(entry)
        if rule not in ("Error", "Skip"):
            try:
                fitting.append(cut(entry, kept(length, limit, rule)))
            except CutError as reason:
                found.append(f"prompt {entry.prompt.id}, {length} tokens cut to {limit_name} {limit}: {reason}")
    if offenders and rule == "Error":
        found.append(_too_long(offenders, limit, limit_name))
    if not fitting and not found:
        skipped = f", all {len(offenders)} are longer than {limit_name} {limit}" if offenders else ""
        found.append(f"no prompt is left{skipped}. Add prompts{f' or raise {limit_name}' if offenders else ''}.")
    if found:
        raise DataError(found)
    if offenders:
        done = "left out" if rule == "Skip" else "cut"
        logger.warning(
            "%s %d of %d prompts, longer than %s %d tokens", done, len(offenders), len(encoded), limit_name, limit
        )
    return fitting


def _too_long(offenders: Sequence[Encoded], limit: int, limit_name: str) -> str:
    longest = max(len(entry.token_ids) for entry in offenders)
    named = ", ".join(f"{entry.prompt.id} ({len(entry.token_ids)} tokens)" for entry in offenders[:_NAMED_OFFENDERS])
    more = len(offenders) - _NAMED_OFFENDERS
    return (
        f"{len(offenders)} longer than {limit_name} {limit}: {named}{f' and {more} more' if more > 0 else ''}. "
        f"Raise {limit_name} to {longest}, or set data.overlongPrompts: Skip to leave them out, or Truncate… to cut them."
    )
