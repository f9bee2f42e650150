"""The wait between retries, for both sides: operator and trainer retry requests to the API server and to each other."""


def backoff_seconds(failures: int, *, first: float, maximum: float) -> float:
    """Seconds to wait after `failures` failures in a row: `first` after one, doubled after each further one."""
    return min(first * 2.0 ** min(max(failures - 1, 0), 32), maximum)
