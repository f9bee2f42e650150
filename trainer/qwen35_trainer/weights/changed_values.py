"""Encodes the changes of a tensor's part between two versions (delta encoding): the new values, and where they are.

    before   3.0  1.5  0.5  2.0 …          encoding   new values, as they are   │ gaps, one byte each or more
    after    3.0  1.6  0.5  2.1 …    ─►               1.6  2.1                  │ 1  1

A gap is the number of unchanged values directly before a changed value. It is stored as bytes whose sum is the gap: any number
of bytes equal to ESCAPE, then one smaller byte, which ends the gap. Values are compared by their bits, so the result is exact,
also for values that are not a number (NaN).
"""

from __future__ import annotations

import numpy as np

from qwen35_trainer.weights.segment import Memory

ESCAPE = 255
"""Byte that adds 255 to a gap and is followed by another byte of the same gap."""
ITEM_TYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""Size of a value in bytes → unsigned integer type of that size, as which values are compared bit by bit."""


class ChangesDamaged(ValueError):
    """Encoded changes do not fit their part: the number of positions is wrong, or a position is beyond the part's end."""


def encoded_changes(before: Memory, after: Memory, item_bytes: int) -> tuple[Memory, int] | None:
    """Return the encoded changes from `before` to `after`, and the number of changed values.

    None: the encoding would not be smaller than `after`. before, after: bytes of the same part of a tensor in the
    previous and in the new version. item_bytes: size of a value in bytes. The encoding shares no memory with `before`
    and `after`.
    """
    new = after.view(ITEM_TYPES[item_bytes])
    changed = np.flatnonzero(before.view(ITEM_TYPES[item_bytes]) != new)
    if changed.size * (item_bytes + 1) >= after.size:
        return None
    gaps = np.diff(changed, prepend=-1) - 1
    ends = np.cumsum(gaps // ESCAPE + 1)  # positions after the last byte of each gap
    codes = np.full(ends[-1] if changed.size else 0, ESCAPE, np.uint8)
    codes[ends - 1] = gaps % ESCAPE
    encoding = np.concatenate([new[changed].view(np.uint8), codes])
    return (encoding, changed.size) if encoding.size < after.size else None


def apply_changes(target: Memory, encoding: Memory, changes: int, item_bytes: int) -> None:
    """Apply encoded changes to `target` in place.

    target: bytes of the part in the previous version, which become the bytes of the new version. encoding: from
    `encoded_changes`. changes: number of changed values. item_bytes: size of a value in bytes. Raises ChangesDamaged if
    the encoding does not fit; `target` is unchanged in this case.
    """
    values = target.view(ITEM_TYPES[item_bytes])
    codes = encoding[changes * item_bytes :]
    ends = np.flatnonzero(codes != ESCAPE)
    positions = np.cumsum(codes, dtype=np.int64)[ends] + np.arange(ends.size)
    if ends.size != changes or (changes and positions[-1] >= values.size):
        raise ChangesDamaged(f"{ends.size} positions of {values.size} values for {changes} changes")
    values[positions] = encoding[: changes * item_bytes].view(values.dtype)
