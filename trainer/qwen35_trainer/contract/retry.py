"""Computes exponential backoffs: waits that grow with each failure.

Operator and trainer wait for a backoff before they repeat a request. The operator also waits
before the next attempt of a training, and the trainer before it replaces a replica again.
"""


def backoff_seconds(failures: int, *, first: float, maximum: float) -> float:
    """Return the seconds to wait after `failures` failures in a row, without jitter.

    The wait is `first` after one failure, and doubles with each further failure up to `maximum`.
    """
    return min(first * 2.0 ** min(max(failures - 1, 0), 32), maximum)
