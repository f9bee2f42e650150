"""Checks of numbers that report every violated inequality in one error."""

from __future__ import annotations

import math


def raise_if_any(*problems: str | None) -> None:
    """Raise ValueError with all problems that are not None."""
    messages = [problem for problem in problems if problem is not None]
    if messages:
        raise ValueError("; ".join(messages))


def below_minimum(minimum: float, **values: float) -> list[str]:
    """Return the message `name value < minimum` for each value that is below the minimum or not finite."""
    return [f"{name} {value} < {minimum}" for name, value in values.items() if not minimum <= value < math.inf]


def not_above(limit: float, **values: float) -> list[str]:
    """Return the message `name value <= limit` for each value that is not above the limit or not finite."""
    return [f"{name} {value} <= {limit}" for name, value in values.items() if not limit < value < math.inf]
