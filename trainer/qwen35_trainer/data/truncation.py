"""Handles sequences that are longer than the limit: `data.overlongPrompts`."""

import logging
from collections.abc import Callable, Sequence, Sized
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from qwen35_trainer.data.data_errors import DataError
from qwen35_trainer.data.prompt import Prompt
from qwen35_trainer.manifest.data import Overlong

logger = logging.getLogger(__name__)
_MAX_NAMED_PROMPTS = 5


class CutError(Exception):
    """A sequence cannot be shortened to the length limit; the message says why and what to change."""


class Encoded(Protocol):
    @property
    def prompt(self) -> Prompt: ...
    @property
    def token_ids(self) -> Sized: ...


def kept_positions(length: int, limit: int, rule: Overlong) -> tuple[range, range]:
    """Return the positions to keep of a sequence longer than `limit`: a range at its start and a range at its end.

    TruncateLeft keeps the end of the sequence, and TruncateRight its start, so that the other range is empty.
    TruncateMiddle keeps half of the limit (rounded down) at the start, and the rest of the limit at the end.
    """
    head = {"TruncateLeft": 0, "TruncateRight": limit, "TruncateMiddle": limit // 2}[rule]
    return range(head), range(length - (limit - head), length)


def select[T: np.generic](values: NDArray[T], parts: tuple[range, range]) -> NDArray[T]:
    """Return the values at the positions in `parts`."""
    return np.concatenate([values[part.start : part.stop] for part in parts])


def fit[T: Encoded](
    encoded: Sequence[T],
    limit: int,
    limit_name: str,
    rule: Overlong,
    problems: Sequence[str],
    cut: Callable[[T, tuple[range, range]], T],
) -> list[T]:
    """Return the sequences, each with at most `limit` tokens.

    Longer ones are rejected, skipped or cut, as `rule` states. limit_name: name of the limit in messages. rule: value
    of `data.overlongPrompts`. problems: problems found earlier, which are reported together with those found here. cut:
    returns a sequence with only the given positions, and may raise CutError. Raises DataError if there are problems or
    rejected sequences, and if no sequence remains.
    """
    all_problems = list(problems)
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
                fitting.append(cut(entry, kept_positions(length, limit, rule)))
            except CutError as reason:
                all_problems.append(f"{entry.prompt.described}, {length} tokens cut to {limit_name} {limit}: {reason}")
    if offenders and rule == "Error":
        all_problems.append(_too_long(offenders, limit, limit_name))
    if not fitting and not all_problems:
        skipped = f", all {len(offenders)} are longer than {limit_name} {limit}" if offenders else ""
        all_problems.append(f"no prompt is left{skipped}. Add prompts{f' or raise {limit_name}' if offenders else ''}.")
    if all_problems:
        raise DataError(all_problems)
    if offenders:
        done = "left out" if rule == "Skip" else "cut"
        logger.warning(
            "%s %d of %d prompts, longer than %s %d tokens", done, len(offenders), len(encoded), limit_name, limit
        )
    return fitting


def _too_long(offenders: Sequence[Encoded], limit: int, limit_name: str) -> str:
    longest = max(len(entry.token_ids) for entry in offenders)
    named = ", ".join(_described(entry) for entry in offenders[:_MAX_NAMED_PROMPTS])
    more = len(offenders) - _MAX_NAMED_PROMPTS
    return (
        f"{len(offenders)} longer than {limit_name} {limit}: {named}{f' and {more} more' if more > 0 else ''}. "
        f"Raise {limit_name} to {longest}, or set data.overlongPrompts: Skip to leave them out, or Truncate… to cut them."
    )


def _described(entry: Encoded) -> str:
    prompt, length = entry.prompt, f"{len(entry.token_ids)} tokens"
    if prompt.images or prompt.videos:
        length += f" with its {len(prompt.images)} images and {len(prompt.videos)} videos"
    return f"{prompt.id} ({length}; {prompt.place})" if prompt.place else f"{prompt.id} ({length})"
