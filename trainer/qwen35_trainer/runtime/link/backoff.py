"""How long to wait before trying again."""

LONGEST = 15.0
"""An operator that is back learns within this how things stand."""


def backoff(failures: int) -> float:
    """Seconds after so many failures in a row, the first of which is 1."""
    return min(LONGEST, 0.5 * 2.0 ** min(failures - 1, 16))
