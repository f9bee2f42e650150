"""Formats numbers and long texts, in the same way for the terminal, the report, the simulator and the operator's console.

A missing number (None) is formatted as "–".
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

_BLOCKS: Final = "▁▂▃▄▅▆▇█"
MISSING: Final = "–"
MAX_EXCERPT_CHARACTERS: Final = 300


def number(value: float | None) -> str:
    """Format a number with about three significant digits, and commas between thousands: 0.0123, 1.23, 12.3, 1,234."""
    if value is None:
        return MISSING
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e7:
        return f"{value:.2e}"
    magnitude = abs(value)
    for limit, decimals in ((0.1, 4), (10, 3 if magnitude < 1 else 2), (100, 1)):
        if magnitude < limit:
            return f"{value:.{decimals}f}"
    return f"{value:,.0f}"


def count(value: int | None) -> str:
    """Format a count: 1,234 below a million, and 1.23 M from a million on."""
    if value is None:
        return MISSING
    return f"{value:,}" if value < 1_000_000 else f"{value / 1e6:,.2f} M"


def counted(value: int, noun: str) -> str:
    """Format a count with its noun: 1 version, 2 versions, 1,234 versions."""
    return f"{count(value)} {noun}{'' if value == 1 else 's'}"


def by_name(values: Mapping[str, float]) -> str:
    """Format the values of several rewards or data sources, each with its name: "digit 0.500, brevity 0.250"."""
    return ", ".join(f"{name} {value:.3f}" for name, value in values.items())


def failures(errors: Mapping[str, int], timeouts: Mapping[str, int]) -> str:
    """Format the failed calls of rewards: "judge 12 errors, 1 time-out; digit 2 errors"."""
    parts = []
    for name in sorted({*errors, *timeouts}):
        counts = [(errors.get(name, 0), "error"), (timeouts.get(name, 0), "time-out")]
        parts.append(f"{name} {', '.join(counted(value, noun) for value, noun in counts if value)}")
    return "; ".join(parts)


def excerpt(text: str) -> str:
    """Format a text of any length as one line of at most MAX_EXCERPT_CHARACTERS. A line that was cut ends with "…"."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_EXCERPT_CHARACTERS else f"{line[: MAX_EXCERPT_CHARACTERS - 1]}…"


def percent(share: float | None, *, signed: bool = False) -> str:
    """Format a share, where 1 is 100%, without decimals: 12%. A share below 10% has one decimal: 1.2%.

    signed: whether a positive share begins with "+". A share that is not finite is formatted as a missing number.
    """
    if share is None or not math.isfinite(share):
        return MISSING
    if abs(share) < 0.0005:
        return "0%"
    return f"{share:{'+' if signed else ''}.{1 if abs(share) < 0.0995 else 0}%}"


def duration(seconds: float | None) -> str:
    """Format a duration: 1.2 s, 42 s, 3 min 05 s, 2 h 07 min, 3 d 04 h."""
    if seconds is None:
        return MISSING
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values as a line of at most `width` block characters. Each block shows the mean of adjacent values.

    The lowest block stands for the smallest mean, and the highest block for the largest mean. Values that are not
    finite are left out.
    """
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return ""
    columns = min(width, len(values))
    edges = [index * len(values) // columns for index in range(columns + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    if not high > low:
        return _BLOCKS[0] * columns
    return "".join(_BLOCKS[min(7, int((mean - low) / (high - low) * 8))] for mean in means)


def bars(counts: Mapping[int, int], last: int) -> str:
    """Draw a histogram as one line of text, with one block character for each number from 0 to `last`.

    counts: number → its count. The height of a block is its count in proportion to the largest count; "·" stands for a
    count of 0.
    """
    top = max(counts.values(), default=0)
    heights = (counts.get(index, 0) for index in range(last + 1))
    return "".join(_BLOCKS[-(-height * 8 // top) - 1] if height else "·" for height in heights)
