"""Which cases of a table are tried on the real API server."""

from collections.abc import Iterable
from typing import Any

import pytest


def first_real(cases: Iterable[Any], count: int = 1) -> list[Any]:
    """All cases in `make soak`, the first ones in `make test`: there the others are proved in memory, in tests/operator."""
    listed = list(cases)
    rest = [
        pytest.param(*(listed_object if isinstance(listed_object, tuple) else (listed_object,)), marks=pytest.mark.soak)
        for listed_object in listed[count:]
    ]
    return [*listed[:count], *rest]
