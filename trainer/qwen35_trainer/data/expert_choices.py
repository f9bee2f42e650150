"""The experts that the routers of a mixture-of-experts model chose while a sequence was generated, and their replay.

Router replay trains each token with the experts that the rollout chose (R3, arXiv:2510.11370). Rollout and trainer round
differently, so their routers may choose different experts for the same token, and a different expert changes the
log-probability of a token much more than rounding does. Only the choice is replayed. The weights of the chosen experts are
those of the trainer's router, which therefore still learns.

    prompt and response     p0 p1 p2 r0 r1 r2
    inputs of the model     p0 p1 p2 r0 r1          the last token is not read
    computes                      r0 r1 r2          `n` tokens of a response belong to the last `n` inputs

A table of choices has one row for each input, in the order of the inputs. The table of a part of a response ends with the
input from which the part's last token was computed. The table of the first part begins with the prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

type RecordedChoices = NDArray[np.unsignedinteger[Any]]
"""(inputs, layers, k) numbers of the k experts that the router of each layer chose for each input, of `recorded_type`."""
type RecordedParts = Sequence[tuple[RecordedChoices, int]]
"""The tables of a sequence's parts, each with the number of response tokens up to the end of the part."""
type ReplayedChoices = NDArray[np.int16]
"""(inputs, layers, k) like RecordedChoices, with NO_CHOICE where nothing is replayed: there, the trainer's router chooses."""

NO_CHOICE = -1
"""Entry of ReplayedChoices for an input whose experts the trainer's router chooses."""


class ChoiceSource(Protocol):
    """The choices of one sequence, which are stored elsewhere until the trainer needs them."""

    def read(self) -> RecordedParts | None:
        """Return the tables of the sequence's parts. Returns None if a part cannot be read any more."""
        ...


def recorded_type(experts: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Return the smallest type that holds the number of each of `experts` experts."""
    return np.dtype(np.uint8 if experts <= 1 << 8 else np.uint16)


def cut(choices: RecordedChoices, tokens: int, start: int, end: int) -> RecordedChoices:
    """Return the table of tokens `start` to `end` (exclusive) of a part with `tokens` tokens.

    choices: the table of the part. The result shares its memory. If `start` is 0, it includes the rows before those of
    the tokens.
    """
    first = len(choices) - tokens
    return choices[0 if start == 0 else first + start : first + end]


def joined(parts: Iterable[RecordedChoices | None], lengths: Iterable[int]) -> RecordedChoices | None:
    """Concatenate the tables of consecutive parts. Returns None if a part that has tokens has no table.

    lengths: number of tokens of each part.
    """
    tables = [part for part, length in zip(parts, lengths, strict=True) if length]
    present = [table for table in tables if table is not None]
    return np.concatenate(present) if present and len(present) == len(tables) else None


def replayed(parts: RecordedParts, *, prompt: int, response: int) -> ReplayedChoices:
    """Return the choices to replay for the inputs of one sequence.

    parts: at least one. prompt, response: numbers of tokens. The sequence has prompt + response - 1 inputs. An input that no
    table has gets NO_CHOICE.
    """
    choices = np.full((prompt + response - 1, *parts[0][0].shape[1:]), NO_CHOICE, np.int16)
    for table, tokens in parts:
        end = prompt + tokens - 1
        choices[end - len(table) : end] = table
    return choices
