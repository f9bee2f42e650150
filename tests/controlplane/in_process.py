"""Many operators in this process, each for one namespace and all through the proxy; each can die at any write.

    scenario ─► API server ◄── proxy (a thread) ◄── operator of namespace a (a thread, a loop) ── dead? the next one
                                             ◄── operator of namespace b …

A process takes seconds to start, and sweeps start hundreds. What dies here is the same: from the moment of its death
nothing of the operator reaches the API server, not even the release of its Lease, and the next one has new stores, a new
client and a new queue. Each has a loop of its own because kopf, when it ends, cancels whatever it does not know there.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import ClassVar

import pytest

from qwen35_operator import main
from qwen35_operator.kube.store import TrainingKey
from qwen35_operator.main import operate
from qwen35_operator.metrics import Metrics
from qwen35_operator.operator_settings import OperatorSettings
from qwen35_operator.reconcile.first_sweep import FirstSweep
from qwen35_operator.reconcile.reconciler import Reconciler
from qwen35_operator.reconcile_workers import ReconcileWorkers
from tests.controlplane import operator_process
from tests.controlplane.proxy import Line, Proxy, serving
from tests.testbed.control_plane import ControlPlane

SOON = 15.0
"""Seconds. What is due later is a deadline that no scenario waits for; what is due sooner belongs to the scenario."""


class WatchedWorkers(ReconcileWorkers):
    """The operator's workers, for inspection by other threads. `by_thread` holds the newest of each thread."""

    by_thread: ClassVar[dict[threading.Thread, "WatchedWorkers"]] = {}

    def __init__(self, metrics: Metrics) -> None:
        super().__init__(metrics)
        self._reconciler: Reconciler | None = None
        self.looked = 0
        self.by_thread[threading.current_thread()] = self

    async def run(self, reconciler: Reconciler, count: int, sweep: FirstSweep) -> None:
        self._reconciler = reconciler
        await super().run(reconciler, count, sweep)

    async def _reconcile(self, reconciler: Reconciler, key: TrainingKey) -> None:
        await super()._reconcile(reconciler, key)
        self.looked += 1

    def rests(self, key: TrainingKey, version: int | None) -> bool:
        """Whether this version of the training has been reconciled, and no write is pending now or soon."""
        if self._reconciler is None:
            return False
        queue, soon = self._queue, time.monotonic() + SOON
        if len(queue) or queue._processing or queue._failures or any(due < soon for due in list(queue._due.values())):
            return False
        body = self._reconciler._trainings.get(key)
        if body is None or version is None:
            return body is None and version is None
        # What the operator has not looked at yet, because it has just begun, is not at rest either.
        return int(body["metadata"]["resourceVersion"]) >= version and self.looked > 0


class RestartingOperator:
    """The operators of one namespace, one after the other."""

    def __init__(self, plane: ControlPlane, namespace: str, line: Line, kubeconfig: str) -> None:
        self._plane = plane
        self._namespace = namespace
        self._line = line
        self._kubeconfig = kubeconfig
        self._number = 0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._live, name=f"operators of {namespace}")
        line.rests, line.looks = self._rests, self._looks

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._ending.set()
        self._line.end()
        self._thread.join()

    def _rests(self, name: str, version: int | None) -> bool:
        work = WatchedWorkers.by_thread.get(self._thread)
        return work is not None and not self._line.dead and work.rests((self._namespace, name), version)

    def _looks(self) -> tuple[int, int]:
        work = WatchedWorkers.by_thread.get(self._thread)
        return self._number, 0 if work is None else work.looked

    def _live(self) -> None:
        while not self._ending.is_set():
            self._number += 1
            operator_process.released(self._plane, self._namespace, self._name)
            asyncio.run(self._operate())
            WatchedWorkers.by_thread.pop(self._thread, None)
            self._line.revive()

    @property
    def _name(self) -> str:
        return f"operator-{self._number}"

    async def _operate(self) -> None:
        """Run one operator until it is killed. Raises if it ends before."""
        loop, death = asyncio.get_running_loop(), asyncio.Event()
        self._line.on_death = lambda: loop.call_soon_threadsafe(death.set)
        if self._ending.is_set():
            return  # the act that ended the line has notified the one before
        # The dead do not release their Lease, and to wait for its end is another test's matter.
        settings = OperatorSettings(
            namespaces=(self._namespace,),
            lease_namespace=self._namespace,
            lease_name=self._name,
            identity=self._name,
            metrics_port=0,
            health_port=0,
            workers=2,
        )
        alive, dying = asyncio.ensure_future(operate(settings, self._kubeconfig)), asyncio.ensure_future(death.wait())
        await asyncio.wait({alive, dying}, return_when=asyncio.FIRST_COMPLETED)
        if not self._line.dead:
            alive.result()
            raise RuntimeError(f"the operator of {self._namespace} ended on its own")
        # What the dead have to say about how they ended interests nobody.
        loop.set_exception_handler(lambda *_: None)
        await _cancel_others()


@contextmanager
def operators(plane: ControlPlane) -> Iterator[Callable[[str], AbstractContextManager[Line]]]:
    """serving(namespace): an operator for it, replaced by another whenever it dies."""
    with proxied(plane) as proxy, pytest.MonkeyPatch.context() as patch:
        kubeconfig = str(plane.kubeconfig_via(proxy.url))
        patch.setenv("KUBECONFIG", kubeconfig)  # where kopf looks
        patch.setattr(main, "ReconcileWorkers", WatchedWorkers)

        @contextmanager
        def serving(namespace: str) -> Iterator[Line]:
            line = proxy.line(namespace)
            operators_of_namespace = RestartingOperator(plane, namespace, line, kubeconfig)
            operators_of_namespace.start()
            try:
                yield line
            finally:
                operators_of_namespace.end()

        yield serving


@contextmanager
def proxied(plane: ControlPlane) -> Iterator[Proxy]:
    """A proxy in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="proxy")
    thread.start()
    proxy = serving(plane.server, plane.ca)
    try:
        yield asyncio.run_coroutine_threadsafe(proxy.__aenter__(), loop).result()
    finally:
        asyncio.run_coroutine_threadsafe(proxy.__aexit__(None, None, None), loop).result()
        asyncio.run_coroutine_threadsafe(_cancel_others(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
