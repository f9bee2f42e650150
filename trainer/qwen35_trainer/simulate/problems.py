"""Every inequality that fails, in one error."""

from __future__ import annotations

import math


def refuse(*failed: str | None) -> None:
    """Raises ValueError with all of `failed` that is not None."""
    problems = [each for each in failed if each is not None]
    if problems:
        raise ValueError("; ".join(problems))


def at_least(least: float, **values: float) -> list[str]:
    """`name value < least` of each value that is smaller, or not finite."""
    return [f"{name} {value} < {least}" for name, value in values.items() if not least <= value < math.inf]


def above(limit: float, **values: float) -> list[str]:
    """`name value <= limit` of each value that is not greater, or not finite."""
    return [f"{name} {value} <= {limit}" for name, value in values.items() if not limit < value < math.inf]
