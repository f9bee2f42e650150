"""Which cases of a table are tried on the real API server."""

from collections.abc import Iterable
from typing import Any

import pytest


def first_real(cases: Iterable[Any], count: int = 1) -> list[Any]:
    """All cases in `make soak`, the first ones in `make test`: there the others are proved in memory, in tests/operator."""
    listed = list(cases)
    return [*listed[:count], *(_marked(case, pytest.mark.soak) for case in listed[count:])]


def first_on_both(cases: Iterable[Any], count: int = 1) -> list[Any]:
    """All cases in memory, and the first ones on the real control plane too. For a story whose module is marked `worlds`."""
    listed = list(cases)
    return [*(_marked(case, pytest.mark.worlds("memory", "real")) for case in listed[:count]), *listed[count:]]


def _marked(case: Any, mark: pytest.MarkDecorator) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)
