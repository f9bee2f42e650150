"""Stages of scenarios in memory: a cluster for each run, and operators that follow one another when they die."""

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from qwen35_operator import main
from tests.controlplane import in_process
from tests.controlplane.in_process import WatchedWorkers
from tests.controlplane.sweep import Scenario, ScenarioRun
from tests.virtual.line import VirtualLine
from tests.virtual.operators import Operators, VirtualOperator, virtual_plane


class RestartingOperator:
    """The operators of one namespace, one after the other, all on one line."""

    def __init__(self, operators: Operators, namespace: str) -> None:
        self._operators = operators
        self._namespace = namespace
        self._number = 0
        self._running: VirtualOperator | None = None
        self.line = VirtualLine(operators.plane.loop)
        self.line.on_death = lambda: operators.plane.loop.create_task(self._follow())
        self.line.rests, self.line.looks = self._rests, self._looks

    def start(self) -> None:
        """Start the next operator. The dead do not release their Lease, so that each has a Lease of its own."""
        self._number += 1
        lease = f"operator-{self._number}"
        self._running = self._operators.operator((self._namespace,), disturber=self.line, lease=lease)
        self._running.start()

    async def _follow(self) -> None:
        assert self._running is not None
        await self._running.cancel()
        self.line.revive()
        self.start()

    def _rests(self, name: str, version: int | None) -> bool:
        work = WatchedWorkers.by_thread.get(threading.current_thread())
        return work is not None and not self.line.dead and work.rests((self._namespace, name), version)

    def _looks(self) -> tuple[int, int]:
        work = WatchedWorkers.by_thread.get(threading.current_thread())
        return self._number, 0 if work is None else work.looked


@contextmanager
def in_memory(scenario: Scenario, failed: threading.Event) -> Iterator[ScenarioRun]:
    """The stage of one run: see `sweep.Stage`."""
    namespace = f"{scenario.name.replace('_', '-')}-{secrets.token_hex(3)}"
    with virtual_plane() as (plane, operators), pytest.MonkeyPatch.context() as patch:
        patch.setattr(main, "ReconcileWorkers", WatchedWorkers)
        patch.setattr(in_process, "time", SimpleNamespace(monotonic=plane.monotonic))
        plane.api.post("/api/v1/namespaces", {"metadata": {"name": namespace}})
        own = RestartingOperator(operators, namespace)
        own.start()
        try:
            yield ScenarioRun(plane, namespace, line=own.line, failed=failed)
        finally:
            WatchedWorkers.by_thread.pop(threading.current_thread(), None)
