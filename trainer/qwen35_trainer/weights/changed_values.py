"""Encodes which values of a part of a tensor differ from the version before, and the new values.

    before   3.0  1.5  0.5  2.0 …          encoding   new values, as they are   │ gaps, one byte each or more
    after    3.0  1.6  0.5  2.1 …    ─►               1.6  2.1                  │ 1  1

A gap is the number of equal values before a changed value. The bytes of a gap are added up: bytes equal to ESCAPE
continue the gap, and a smaller byte ends it. Values are compared by their bits, so the result is exact, also for values
that are not a number (NaN).
"""

from __future__ import annotations

import numpy as np

from qwen35_trainer.weights.segment import Memory

ESCAPE = 255
"""Largest byte of a gap: it adds ESCAPE to the gap, and the next byte continues the gap."""
ITEM_TYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""Number of bytes of a value → type by which its bits are compared."""


class ChangesDamaged(ValueError):
    """An encoding does not fit its part: the number of its values is wrong, or values are beyond the part's end."""


def encoded_changes(before: Memory, after: Memory, item_bytes: int) -> tuple[Memory, int] | None:
    """Return the encoding of `after` and the number of changed values; None if it would not be smaller than `after`.

    before, after: bytes of the part in the version before and in the new version. item_bytes: number of bytes of each
    value. The encoding shares no memory with them.
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
    """Change `target` from the bytes of the version before to the bytes of the encoded version.

    changes: number of changed values. item_bytes: number of bytes of each value. Raises ChangesDamaged if the encoding
    does not fit `target`.
    """
    values = target.view(ITEM_TYPES[item_bytes])
    codes = encoding[changes * item_bytes :]
    ends = np.flatnonzero(codes != ESCAPE)
    positions = np.cumsum(codes, dtype=np.int64)[ends] + np.arange(ends.size)
    if ends.size != changes or (changes and positions[-1] >= values.size):
        raise ChangesDamaged(f"{ends.size} positions of {values.size} values for {changes} changes")
    values[positions] = encoding[: changes * item_bytes].view(values.dtype)
