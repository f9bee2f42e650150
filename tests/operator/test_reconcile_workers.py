"""Workers: after any end of a reconcile its key comes back when it must, and reconciles under way are finished."""

import asyncio
import io
import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace

import pytest

from qwen35_operator import reconcile_workers as module
from qwen35_operator.kube import queue
from qwen35_operator.kube.api_errors import Conflict, Forbidden, Unavailable
from qwen35_operator.kube.kinds import RAY_JOB, TRAINING
from qwen35_operator.kube.object_cache import ObjectCache
from qwen35_operator.kube.queue import MAX_BACKOFF_SECONDS
from qwen35_operator.kube.store import TrainingKey
from qwen35_operator.kube.trainings import Trainings
from qwen35_operator.logs import JsonLines
from qwen35_operator.metrics import Metrics
from qwen35_operator.operator_settings import OperatorSettings
from qwen35_operator.reconcile.first_sweep import FirstSweep
from qwen35_operator.reconcile.reconciler import Reconciler, Refusal
from qwen35_operator.reconcile_workers import ReconcileWorkers
from tests.operator.kube import raw_objects, virtual
from tests.operator.kube.memory_api import MemoryApi
from tests.operator.kube.server import until
from tests.operator.reconcile.world import SPEC


class Shop:
    """Workers, a reconciler, and an API server in memory."""

    def __init__(self) -> None:
        self.api = MemoryApi()
        self.metrics = Metrics()
        self.work = ReconcileWorkers(self.metrics)
        self.trainings = Trainings()
        cluster = ObjectCache((), self.work.add, lambda kind: None)
        self.reconciler = Reconciler(OperatorSettings(), self.api, cluster, self.trainings, self.work.progressed)

    def training(self, name: str = "demo", **fields) -> tuple[str, str]:
        """One that both the API server and the operator know."""
        metadata = {
            "name": name,
            "namespace": "team",
            "uid": f"{raw_objects.UID[:-1]}{name[-1]}",
            "generation": 1,
            **fields,
        }
        self.trainings.put(self.api.place(self.path(name), {"metadata": metadata, "spec": SPEC}))
        return "team", name

    def path(self, name: str = "demo") -> str:
        return TRAINING.path("team", name)

    def started(self, name: str = "demo") -> bool:
        """Whether the first attempt is there and the status says so."""
        status = self.api.objects[self.path(name)].get("status") or {}
        return RAY_JOB.path("team", f"{name}-1") in self.api.objects and status.get("state") == "Starting"

    def count(self, result: str) -> float:
        return self.metrics.registry.get_sample_value("qwen35_reconciles_total", {"result": result}) or 0.0

    def value(self, name: str) -> float:
        return self.metrics.registry.get_sample_value(name)

    @asynccontextmanager
    async def open(self, workers: int = 2, *keys: TrainingKey) -> AsyncIterator[asyncio.Task]:
        task = asyncio.create_task(self.work.run(self.reconciler, workers, FirstSweep(active=keys)))
        await asyncio.sleep(0)
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.wait({task})


@pytest.fixture
def shop() -> Shop:
    return Shop()


async def test_a_changed_training_is_reconciled(shop) -> None:
    key = shop.training()
    async with shop.open():
        shop.work.add(key)
        await until(shop.started, "an attempt")
    assert len(shop.work) == 0
    assert shop.value("qwen35_event_to_status_seconds_count") == 1
    assert shop.value("qwen35_reconcile_seconds_count") >= 1


TROUBLES: dict[str, Callable[[Shop], None]] = {
    "stale": lambda shop: shop.api.refuse("PATCH", "status", *[Conflict(409, "changed")] * 2),
    "refused": lambda shop: shop.api.refuse("POST", "rayjobs", *[Forbidden(403, "no")] * 2),
    "unavailable": lambda shop: shop.api.refuse("POST", "rayjobs", *[Unavailable(429, "later")] * 2),
}


@pytest.mark.parametrize("result", TROUBLES)
async def test_what_failed_is_tried_again_until_it_succeeds(shop, result) -> None:
    key = shop.training()
    TROUBLES[result](shop)
    async with shop.open():
        shop.work.add(key)
        await until(shop.started, "success in spite of it")
        await until(lambda: shop.count("done"), "a reconcile that is done")
    assert shop.count(result) == 2


async def test_a_refused_repair_does_not_delay_what_the_decision_waits_for(shop, monkeypatch) -> None:
    """As the end of a grace period: the backoff of the refusal may be longer."""
    key, called = ("team", "demo"), []

    async def refused(key: TrainingKey) -> None:
        called.append(key)
        raise Refusal("a policy forbids it", 0.3)

    monkeypatch.setattr(shop.reconciler, "reconcile", refused)
    monkeypatch.setattr(queue, "FIRST_BACKOFF_SECONDS", MAX_BACKOFF_SECONDS)
    async with shop.open():
        shop.work.add(key)
        async with asyncio.timeout(MAX_BACKOFF_SECONDS / 2):
            await until(lambda: len(called) == 2, "another reconcile")


async def test_a_bug_is_logged_counted_and_holds_up_nobody_else(shop, caplog) -> None:
    key, other = shop.training(), shop.training("other")
    metadata = shop.api.objects[shop.path()]["metadata"]
    # A body that no API server sends: without its generation.
    nonsense = {name: value for name, value in metadata.items() if name != "generation"}
    shop.trainings.put({"metadata": {**nonsense, "resourceVersion": "500"}, "spec": SPEC})
    async with shop.open(workers=1):
        shop.work.add(key)
        shop.work.add(other)
        await until(lambda: shop.started("other"), "the other training")
        await until(lambda: shop.count("failed") >= 2, "another try")
    assert "team/demo: this is a bug; again in 0.1 s" in caplog.text
    assert "KeyError" in caplog.text
    assert "again in 0.2 s" in caplog.text


async def test_what_a_reconcile_logs_names_its_training(shop) -> None:
    key, lines = shop.training(), io.StringIO()
    handler = logging.StreamHandler(lines)
    handler.setFormatter(JsonLines())
    logging.getLogger(module.__name__).addHandler(handler)
    TROUBLES["refused"](shop)
    try:
        async with shop.open():
            shop.work.add(key)
            await until(lambda: shop.count("refused"), "a refusal")
    finally:
        logging.getLogger(module.__name__).removeHandler(handler)
    line = json.loads(lines.getvalue().splitlines()[0])
    assert (line["namespace"], line["training"], line["level"]) == ("team", "demo", "WARNING")


async def test_waits_begin_again_with_every_write_that_was_carried_out(shop, caplog) -> None:
    """What fails after progress has not failed before: only what gets nowhere waits longer and longer."""
    key = shop.training()
    shop.api.refuse("POST", "configmaps", *[Unavailable(429, "later")] * 2)
    shop.api.refuse("POST", "rayjobs", Unavailable(429, "later"))
    async with shop.open():
        shop.work.add(key)
        await until(shop.started, "an attempt")
    waits = [message.rsplit("again in ", 1)[1] for message in caplog.messages if "later" in message]
    assert waits == ["0.1 s", "0.2 s", "0.1 s"]


async def test_a_training_is_reconciled_by_one_worker_at_a_time(shop) -> None:
    key, inside, most = shop.training(), 0, 0

    async def before(verb: str, path: str) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.002)
        inside -= 1

    shop.api.before = before
    async with shop.open(workers=4):
        for _ in range(20):
            shop.work.add(key)
            await asyncio.sleep(0.002)
        await until(shop.started, "an attempt")
    assert most == 1


async def test_several_trainings_are_worked_at_together(shop) -> None:
    keys = [shop.training(name) for name in ("demo", "other")]
    met = asyncio.Barrier(2)
    first = {key[1]: True for key in keys}

    async def before(verb: str, path: str) -> None:
        name = path.rsplit("/", 1)[1]
        if first.pop(name, False):
            await met.wait()

    shop.api.before = before
    async with shop.open(workers=2):
        for key in keys:
            shop.work.add(key)
        await until(lambda: shop.started() and shop.started("other"), "both")


def test_reconciles_under_way_are_finished_before_the_work_stops(shop) -> None:
    key, go = shop.training(), asyncio.Event()

    async def scenario() -> None:
        reached = asyncio.Event()

        async def before(verb: str, path: str) -> None:
            if path.endswith("/rayjobs"):
                reached.set()
                await go.wait()

        shop.api.before = before
        async with shop.open() as task:
            shop.work.add(key)
            await reached.wait()
            task.cancel()
            await asyncio.sleep(module.STOP_SECONDS * 0.9)
            assert not task.done()
            go.set()
            await asyncio.wait({task})

    virtual.run(scenario())
    assert shop.started()


def test_what_does_not_end_is_left_after_the_grace_and_comes_again_with_the_next_term(shop) -> None:
    key = shop.training()

    async def scenario() -> None:
        loop, reached, stuck = asyncio.get_running_loop(), asyncio.Event(), True

        async def before(verb: str, path: str) -> None:
            if stuck and path.endswith("/rayjobs"):
                reached.set()
                await asyncio.sleep(3600)

        shop.api.before = before
        async with shop.open():
            shop.work.add(key)
            await reached.wait()
            stopped = loop.time()
        assert loop.time() - stopped == pytest.approx(module.STOP_SECONDS, abs=0.01)
        assert not shop.started()
        stuck = False
        async with shop.open(2, key):
            shop.work.add(key)
            await until(shop.started, "an attempt")

    virtual.run(scenario())


async def test_a_standby_queues_nothing_and_a_leader_begins_with_all_trainings_which_are_not_late(shop) -> None:
    key = shop.training()
    for _ in range(2):
        shop.work.add(key)
        assert len(shop.work) == 0
        async with shop.open(2, key):
            await until(shop.started, "an attempt")
    assert shop.value("qwen35_event_to_status_seconds_count") == 0


class Term:
    """One term of a leader that reconciles nothing but notes when it would. Times are seconds since its start."""

    def __init__(self, monkeypatch) -> None:
        monkeypatch.setattr(module.time, "monotonic", lambda: asyncio.get_running_loop().time())
        self.work = ReconcileWorkers(Metrics())
        self.times: dict[str, float] = {}
        self.seconds = 0.0  # how long a reconcile takes

    async def lead(self, seconds: float, active: Sequence[str] = (), at_rest: Sequence[str] = ()) -> None:
        began = asyncio.get_running_loop().time()

        async def reconcile(key: TrainingKey) -> None:
            self.times.setdefault(key[1], asyncio.get_running_loop().time() - began)
            await asyncio.sleep(self.seconds)

        sweep = FirstSweep(*(tuple(("team", name) for name in names) for names in (active, at_rest)))
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.work.run(SimpleNamespace(reconcile=reconcile), 2, sweep)


@pytest.fixture
def term(monkeypatch) -> Term:
    return Term(monkeypatch)


def test_a_new_leader_reconciles_trainings_at_rest_last_and_a_few_at_a_time(term) -> None:
    names = [f"rest{number}" for number in range(100)]
    virtual.run(term.lead(60.0, ["runs"], names))
    assert term.times.pop("runs") < 0.1
    assert list(term.times) == names
    assert list(term.times.values()) == pytest.approx([10 + number / 50 for number in range(100)], abs=0.01)


def test_a_training_at_rest_that_changes_is_reconciled_immediately(term) -> None:
    async def scenario() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(term.lead(60.0, (), ["a", "b"]))
            await asyncio.sleep(1)
            term.work.add(("team", "b"))

    virtual.run(scenario())
    assert term.times["b"] == pytest.approx(1, abs=0.01)


def test_trainings_at_rest_come_more_seldom_while_others_are_queued(term) -> None:
    async def scenario() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(term.lead(30.0, (), [f"rest{number}" for number in range(50)]))
            await asyncio.sleep(module.REST_SECONDS - 0.001)
            for number in range(1500):
                term.work.add(("team", f"busy{number}"))

    term.seconds = 0.01
    virtual.run(scenario())
    times = [at for name, at in term.times.items() if name.startswith("rest")]
    assert times == pytest.approx([module.REST_SECONDS + number / 10 for number in range(50)], abs=0.03)


async def test_a_write_that_the_api_server_delays_is_tried_again_when_it_says(shop, caplog) -> None:
    key = shop.training()
    shop.api.refuse("POST", "rayjobs", Unavailable(429, "too many requests", retry_after=0.3))
    async with shop.open():
        shop.work.add(key)
        await until(shop.started, "an attempt")
    assert "too many requests; again in 0.3 s" in caplog.text
