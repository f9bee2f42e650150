"""The clock of a cluster in virtual time, and how the operator is made to read it."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, tzinfo
from types import SimpleNamespace
from typing import Self

import pytest

from qwen35_operator import main, reconcile_workers
from qwen35_operator.kube import client

START = datetime(2026, 1, 1, tzinfo=UTC).timestamp()


class Clock:
    """Seconds since 1970 of the cluster: START when its event loop starts."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def now(self) -> float:
        return START + self._loop.time()

    def monotonic(self) -> float:
        return self._loop.time()


@contextmanager
def read_by_the_operator(clock: Clock) -> Iterator[None]:
    """While this lasts, the modules of the operator that read a clock read this one."""

    class VirtualDatetime(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return cls.fromtimestamp(clock.now(), tz)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "datetime", VirtualDatetime)
        for module in (main, reconcile_workers):
            patch.setattr(module, "time", SimpleNamespace(monotonic=clock.monotonic))
        yield
