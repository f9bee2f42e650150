"""List and watch against a server that misbehaves in every way it can: the store comes to what is, and is never lost."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from qwen35_operator.kube import client as client_module
from qwen35_operator.kube import list_pages
from qwen35_operator.kube import watch as module
from qwen35_operator.kube.api_errors import ApiError, Unavailable, Unexpected
from qwen35_operator.kube.client import JsonObject, Query
from qwen35_operator.kube.kinds import (
    CONFIG_MAP,
    DISRUPTION_BUDGET,
    METADATA_ONLY,
    POD,
    RAY_JOB,
    ROLE,
    WATCHED,
    ObjectKind,
)
from qwen35_operator.kube.list_pace import ListPace
from qwen35_operator.kube.list_pages import PAGE_SIZE
from qwen35_operator.kube.object_cache import ObjectCache
from qwen35_operator.kube.store import Store, TrainingKey
from qwen35_operator.kube.trainings import Trainings
from qwen35_operator.kube.watch import METADATA, METADATA_LIST, Watch, not_listed
from qwen35_trainer.manifest import Problem
from tests.operator.kube import raw_objects
from tests.operator.kube.server import Server, bookmark, event, page, refuses, says, serving, stream, until
from tests.patience import PATIENCE

KEY = ("team", "demo")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch) -> None:
    monkeypatch.setattr(module, "FIRST_BACKOFF_SECONDS", 0.01)
    monkeypatch.setattr(module, "MAX_BACKOFF_SECONDS", 0.04)
    monkeypatch.setattr(module, "MAX_REFUSALS", 1)
    monkeypatch.setattr(module, "OPTIONAL_SECONDS", 0.02)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving(Server()) as server:
        yield server


class Seen(Watch):
    """A watch, and the trainings whose events it delivered."""

    def __init__(self, kind: ObjectKind, namespace: str | None = None) -> None:
        self.notified: list[TrainingKey] = []
        self.starts = self.recoveries = self.losses = 0
        super().__init__(kind, namespace, Store(), self.notified.append, self._count, self._recover, self._lose)

    def _count(self, kind: str) -> None:
        assert kind == self.kind.name
        self.starts += 1

    def _recover(self) -> None:
        self.recoveries += 1

    def _lose(self) -> None:
        self.losses += 1

    @property
    def names(self) -> dict[str, str]:
        return {record.name: record.version for record in self.store.of(KEY)}


@asynccontextmanager
async def watching(server: Server, kind: ObjectKind = CONFIG_MAP, namespace: str | None = None) -> AsyncIterator[Seen]:
    watch, client = Seen(kind, namespace), server.client()
    task = asyncio.create_task(watch.run(client))
    try:
        yield watch
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.wait({task})
        await client.close()


def idle(server: Server, requests: int) -> Callable[[], bool]:
    """The script is through, and the watch waits for more."""
    return lambda: not server.script and len(server.requests) >= requests


def one(name: str, version: int, **metadata) -> dict:
    return raw_objects.config_map(name, version=version, **metadata)


async def test_a_list_in_pages_is_taken_in_as_a_whole(server) -> None:
    server.script = [page(one("a", 1), token="more"), page(one("b", 2), version=7)]
    async with watching(server) as watch:
        await until(idle(server, 3), "two pages and a watch")
        assert watch.names == {"a": "1", "b": "2"}
        assert watch.notified == [KEY]
    first, second, following = (dict(request.query) for request in server.requests)
    assert first == {"labelSelector": CONFIG_MAP.selector, "limit": str(PAGE_SIZE)}
    assert second == {**first, "continue": "more"}
    assert following["resourceVersion"] == "7"
    assert following["watch"] == "true"
    assert following["labelSelector"] == CONFIG_MAP.selector
    assert following["allowWatchBookmarks"] == "true"


async def test_lists_are_requested_at_the_pace_of_the_process(server) -> None:
    turns: list[tuple[int, int]] = []
    pauses: list[float] = []

    class NotedPace(ListPace):
        @asynccontextmanager
        async def turn(self) -> AsyncIterator[None]:
            before = len(server.requests)
            yield
            turns.append((before, len(server.requests)))

        async def pause(self, seconds: float) -> None:
            pauses.append(seconds)

    server.script = [page(one("a", 1), token="more"), page(one("b", 2), version=7)]
    cache = ObjectCache((), lambda key: None, lambda kind: None, pace=NotedPace())
    watch = next(watch for watch in cache.watches if watch.kind == CONFIG_MAP)
    client = server.client()
    task = asyncio.create_task(watch.run(client))
    await until(idle(server, 3), "two pages and a watch")
    task.cancel()
    await asyncio.wait({task})
    await client.close()
    assert turns == [(0, 2)]
    assert len(pauses) == 1
    assert 0 < pauses[0] < PATIENCE


async def test_a_page_that_is_too_large_is_requested_in_smaller_pages(server, monkeypatch) -> None:
    """A few ConfigMaps of 1 MiB each, whose characters have to be escaped, would exhaust the memory at every start."""
    monkeypatch.setattr(list_pages, "MAX_PAGE_BYTES", 1000)
    large = one("large", 1, annotations={"text": "x" * 1000})
    server.script = [
        page(large, token="x"),
        page(large, token="x"),
        *[page(one(name, 1), token="x") for name in "abcdef"],
        page(one("g", 2), version=7),
    ]
    async with watching(server) as watch:
        await until(idle(server, 10), "two pages that are too large, seven others, and a watch")
        assert watch.names == dict.fromkeys("abcdef", "1") | {"g": "2"}
    limits = [dict(request.query).get("limit") for request in server.requests]
    assert limits == [*map(str, [PAGE_SIZE, 25, 6, 12, 24, 48, 96, PAGE_SIZE, PAGE_SIZE]), None]


async def test_a_page_whose_token_has_expired_begins_the_list_again(server) -> None:
    server.script = [page(one("a", 1), token="more"), refuses(410), page(one("b", 9), version=9)]
    async with watching(server) as watch:
        await until(idle(server, 4), "a new list")
        assert watch.names == {"b": "9"}
    assert "continue" not in server.requests[2].query


async def test_a_list_of_null_is_empty(server) -> None:
    server.script = [says({"metadata": {"resourceVersion": "5"}, "items": None})]
    async with watching(server) as watch:
        await asyncio.wait_for(watch.synced.wait(), PATIENCE)
        assert watch.names == {}


async def test_events_change_the_store_and_tell_whom_it_concerns(server) -> None:
    events = [
        event("ADDED", one("b", 11)),
        event("ADDED", one("c", 12, training="other")),
        event("MODIFIED", one("b", 13)),
        event("DELETED", one("a", 14)),
    ]
    server.script = [page(one("a", 10), version=10), stream(*events, stays=True)]
    async with watching(server) as watch:
        await until(lambda: len(watch.notified) == 5, "all events")
        assert watch.names == {"b": "13"}
        assert watch.notified == [KEY, KEY, ("team", "other"), KEY, KEY]


async def test_a_label_that_is_moved_notifies_both_trainings(server) -> None:
    moved = event("MODIFIED", one("a", 11, training="other"))
    server.script = [page(one("a", 10), version=10), stream(moved, stays=True)]
    async with watching(server) as watch:
        await until(lambda: len(watch.notified) == 3, "all events")
        assert watch.names == {}
        assert set(watch.notified[1:]) == {KEY, ("team", "other")}


async def test_the_end_of_an_object_is_reported_to_the_training_that_had_it(server) -> None:
    """Its label was moved while the watch was cut, and the move was not seen."""
    server.script = [
        page(one("a", 10), version=10),
        stream(event("DELETED", one("a", 12, training="other")), stays=True),
    ]
    async with watching(server) as watch:
        await until(lambda: len(watch.notified) == 2, "all events")
        assert watch.notified == [KEY, KEY]


async def test_earlier_events_notify_nobody(server) -> None:
    events = [event("ADDED", one("a", 10)), event("MODIFIED", one("a", 9)), event("ADDED", one("b", 11))]
    server.script = [page(one("a", 10), version=10), stream(*events, stays=True)]
    async with watching(server) as watch:
        await until(lambda: "b" in watch.names, "the last event")
        assert watch.notified == [KEY, KEY]


async def test_after_the_end_of_a_stream_it_continues_from_the_last_bookmark(server) -> None:
    server.script = [page(version=10), stream(event("ADDED", one("a", 11)), bookmark(40)), stream(stays=True)]
    async with watching(server) as watch:
        await until(idle(server, 3), "a second watch")
        assert watch.names == {"a": "11"}
        assert watch.starts == 0  # an ordinary end is not an error
    assert server.requests[2].query["resourceVersion"] == "40"


async def test_a_cut_in_the_middle_of_an_event_loses_nothing(server) -> None:
    half = b'{"type": "MODIFIED", "object": {"metadata": {"na'
    after = stream(event("MODIFIED", one("a", 12)), stays=True)
    server.script = [page(version=10), stream(event("ADDED", one("a", 11)), last=half), after]
    async with watching(server) as watch:
        await until(lambda: watch.names == {"a": "12"}, "the event again")
    assert server.requests[2].query["resourceVersion"] == "11"


async def test_after_a_cut_what_was_seen_is_not_asked_for_again(server) -> None:
    gone = [event("ADDED", one("a", 11)), event("DELETED", one("a", 12))]
    server.script = [page(version=10), stream(*gone, cut=True), stream(stays=True)]
    async with watching(server) as watch:
        await until(idle(server, 3), "a second watch")
        assert watch.notified == [KEY, KEY]
        assert watch.synced.is_set()
    assert server.requests[2].query["resourceVersion"] == "12"


async def test_a_silent_stream_is_given_up(server, monkeypatch) -> None:
    monkeypatch.setattr(client_module, "READ_IDLE_SECONDS", 1.0)  # time enough to read the bookmark on a busy machine
    server.script = [
        page(version=10),
        stream(bookmark(20), stays=True),
        stream(event("ADDED", one("a", 21)), stays=True),
    ]
    async with watching(server) as watch:
        await until(lambda: watch.names == {"a": "21"}, "a second watch")
    assert server.requests[2].query["resourceVersion"] == "20"


LOST = {
    "as an answer": refuses(410, "too old"),
    "as an event": stream(event("ERROR", {"kind": "Status", "code": 410, "message": "too old"})),
}


@pytest.mark.parametrize("lost", LOST.values(), ids=LOST)
async def test_when_the_place_is_lost_a_list_delivers_what_was_missed(server, lost) -> None:
    server.script = [page(one("a", 5), one("b", 6), version=10), lost, page(one("b", 6), one("c", 30), version=40)]
    async with watching(server) as watch:
        await until(idle(server, 4), "a watch after the second list")
        assert watch.names == {"b": "6", "c": "30"}
        assert watch.synced.is_set()
        assert watch.problem is None
    assert server.requests[3].query["resourceVersion"] == "40"


async def test_an_error_that_passes_is_waited_out(server) -> None:
    error = stream(event("ERROR", {"code": 500, "message": "etcd"}))
    server.script = [
        page(version=10),
        error,
        refuses(500),
        refuses(429),
        stream(event("ADDED", one("a", 11)), stays=True),
    ]
    async with watching(server) as watch:
        await until(lambda: watch.names == {"a": "11"}, "the event")
        assert watch.problem is None
    assert [request.query.get("resourceVersion") for request in server.requests[1:]] == ["10"] * 4


async def test_without_permission_it_says_who_must_grant_what_and_sees_again_when_granted(server, monkeypatch) -> None:
    monkeypatch.setattr(module, "MAX_BACKOFF_SECONDS", 1.0)
    server.script = [refuses(403, "pods is forbidden"), page(raw_objects.pod("p"), version=3), stream(stays=True)]
    async with watching(server, POD, "team") as watch:
        await asyncio.wait_for(watch.settled.wait(), PATIENCE)
        assert not watch.synced.is_set()
        assert watch.problem.path == "pods"
        assert "pods is forbidden" in watch.problem.message
        assert watch.problem.fix == "Grant get, list and watch on pods in namespace team to the operator."
        await until(watch.synced.is_set, "a watch")
        assert watch.problem is None
        assert watch.recoveries == 1
        assert watch.names == {"p": "1"}
    assert server.requests[0].path == "/api/v1/namespaces/team/pods"


async def test_without_permission_for_a_kind_that_few_trainings_need_it_serves_all_others(server) -> None:
    budget = {"metadata": raw_objects.metadata("demo")}
    server.script = [*[refuses(403, "forbidden")] * 3, page(budget, version=3), stream(stays=True)]
    async with watching(server, DISRUPTION_BUDGET, "team") as watch:
        await asyncio.wait_for(watch.synced.wait(), PATIENCE)
        assert (watch.settled.is_set(), watch.problem, watch.names) == (True, None, {})
        assert (
            watch.limitation.fix
            == "Grant get, list and watch on poddisruptionbudgets.policy in namespace team to the operator."
        )
        await until(lambda: watch.names == {"demo": "1"}, "the object, once it may be watched")
        await until(lambda: watch.limitation is None, "no limitation any more")
        assert (watch.losses, watch.recoveries, watch.problem) == (1, 1, None)


async def test_without_the_permission_any_more_it_tries_rarely_and_keeps_what_it_knows(server, monkeypatch) -> None:
    """An object that must go can then still be deleted, if that is permitted."""
    monkeypatch.setattr(module, "OPTIONAL_SECONDS", 60.0)
    budget = {"metadata": raw_objects.metadata("demo")}
    server.script = [page(budget, version=3), stream(), refuses(403, "forbidden")]
    async with watching(server, DISRUPTION_BUDGET, "team") as watch:
        await until(lambda: watch.limitation is not None, "the limitation")
        assert (watch.names, watch.synced.is_set(), watch.problem) == ({"demo": "1"}, True, None)
        seen = len(server.requests)
        await asyncio.sleep(0.2)
        assert len(server.requests) == seen, "it tries again after OPTIONAL_SECONDS only"


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_a_few_refusals_are_an_api_server_that_has_just_started(server, monkeypatch, status) -> None:
    monkeypatch.setattr(module, "MAX_REFUSALS", 3)
    server.script = [refuses(status), refuses(status), page(one("a", 2), version=3), stream(stays=True)]
    async with watching(server, RAY_JOB) as watch:
        await until(watch.synced.is_set, "a list")
        assert (watch.problem, watch.recoveries) == (None, 0)


async def test_a_token_that_is_not_accepted_does_not_count_as_a_missing_permission(server) -> None:
    """The kubelet renews it, or the authentication webhook comes back: the kind stays available, however often that happens."""
    server.script = [page(one("a", 2), version=3), *[refuses(401, "Unauthorized")] * 3, stream(stays=True)]
    async with watching(server, RAY_JOB) as watch:
        await until(idle(server, 5), "the next watch")
        assert (watch.problem, watch.losses) == (None, 0)
        assert watch.synced.is_set()


async def test_a_version_from_the_future_is_listed_again(server) -> None:
    """etcd was restored from a backup."""
    server.script = [
        page(one("a", 2), version=300),
        says({"message": "Too large resource version: 300, current: 40"}, 504),
        page(one("b", 30), version=40),
        stream(stays=True),
    ]
    async with watching(server, RAY_JOB):
        await until(idle(server, 4), "another list")
    assert [request.query.get("resourceVersion") for request in server.requests] == [None, "300", None, "40"]


async def test_a_watch_waits_as_long_as_the_api_server_requests(server) -> None:
    server.script = [page(version=3), says({"message": "busy"}, 429, **{"Retry-After": "1"}), stream(stays=True)]
    async with watching(server):
        began = asyncio.get_running_loop().time()
        await until(idle(server, 3), "the next try")
        assert asyncio.get_running_loop().time() - began >= 1


async def test_a_permission_that_is_taken_away_ends_the_sight(server) -> None:
    server.script = [page(version=3), refuses(403, "no more"), refuses(403, "no more")]
    async with watching(server) as watch:
        await until(idle(server, 4), "the next try")
        assert not watch.synced.is_set()
        assert "in all namespaces" in watch.problem.fix
        assert watch.losses == 1


async def test_who_may_list_and_not_watch_is_blind_until_both_are_granted(server) -> None:
    refused = [page(one("a", 2), version=3), refuses(403, "cannot watch")]
    server.script = [*refused * 3]
    async with watching(server) as watch:
        await until(idle(server, 7), "the next try")
        assert "cannot watch" in watch.problem.message
        assert not watch.synced.is_set()
        assert watch.recoveries == 0


async def test_without_kuberay_it_says_so_and_sees_it_once_it_is_there(server) -> None:
    server.script = [refuses(404), page(raw_objects.ray_job("demo-1"), version=4), stream(stays=True)]
    async with watching(server, RAY_JOB) as watch:
        await asyncio.wait_for(watch.settled.wait(), PATIENCE)
        assert watch.problem.path == "rayjobs.ray.io"
        assert "KubeRay is not installed" in watch.problem.message
        await until(watch.synced.is_set, "a watch")
        assert watch.problem is None
        assert watch.recoveries == 1
        assert watch.names == {"demo-1": "1"}


async def test_kuberay_that_is_removed_is_missed(server) -> None:
    server.script = [page(raw_objects.ray_job("demo-1"), version=4), refuses(404), refuses(404)]
    async with watching(server, RAY_JOB) as watch:
        await until(idle(server, 4), "the next try")
        assert "KubeRay" in watch.problem.message
        assert not watch.synced.is_set()


async def test_a_server_that_is_away_is_nobodys_problem_to_mend(server) -> None:
    server.script = [page(one("a", 3), version=3), refuses(503), refuses(503)]
    async with watching(server) as watch:
        await until(idle(server, 4), "the next try")
        assert watch.problem is None
        assert watch.synced.is_set()  # what was seen still counts; decisions are guarded by versions


def messages(caplog: pytest.LogCaptureFixture, level: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == level]


async def test_an_error_is_logged_once_until_the_watch_has_worked_and_that_it_works_again_too(server, caplog) -> None:
    caplog.set_level("INFO")
    refused = (refuses(403, "no maps"),) * 3
    works = stream(event("ADDED", one("a", 9)))
    server.script = [*refused, page(version=3), works, *refused, page(version=3), stream(stays=True)]
    async with watching(server, namespace="team") as watch:
        await until(idle(server, 10), "the second stream")
        assert watch.starts == 6
    warnings = messages(caplog, "WARNING")
    assert len(warnings) == 2
    assert all("watching configmaps in namespace team: 403" in warning for warning in warnings)
    assert messages(caplog, "INFO") == ["watching configmaps in namespace team works again"]


async def test_errors_that_take_turns_are_each_logged_once(server, caplog) -> None:
    server.script = [refuses(403, "a"), refuses(403, "b")] * 3
    async with watching(server):
        await until(idle(server, 7), "the next try")
    assert len(messages(caplog, "WARNING")) == 2


async def test_a_stream_that_opens_and_then_reports_an_error_has_not_worked(server, monkeypatch, caplog) -> None:
    caplog.set_level("INFO")
    error = stream(event("ERROR", {"code": 500, "message": "unable to decode"}))
    server.script = [page(version=10), *(error,) * 5, stream(stays=True)]
    monkeypatch.setattr(module, "LASTING_SECONDS", 100.0)
    async with watching(server) as watch:
        await until(idle(server, 7), "the last stream")
        assert watch._failures > 5
    assert (len(messages(caplog, "WARNING")), messages(caplog, "INFO")) == (1, [])


async def test_a_stream_that_lasts_without_an_event_has_worked(server, monkeypatch, caplog) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(module, "LASTING_SECONDS", 0.0)
    server.script = [page(version=10), refuses(500), stream(), stream(stays=True)]
    async with watching(server):
        await until(idle(server, 4), "the last stream")
    assert messages(caplog, "INFO") == ["watching configmaps in all namespaces works again"]


ODD = {
    "a list without metadata": [says({})],
    "a list of something else": [says({"metadata": {"resourceVersion": "5"}, "items": [{}]})],
    "a version that is not a number": [says({"metadata": {"resourceVersion": "new"}, "items": []})],
    "an event without an object": [page(version=5), stream({"type": "ADDED"})],
    "an event of another type": [page(version=5), stream({"type": "MOVED", "object": one("a", 7)})],
    "a bookmark without a version": [page(version=5), stream(event("BOOKMARK", {}))],
    "a list as an event": [page(version=5), stream([])],
    "a line of a page": [page(version=5), stream(last=b"<html>\n")],
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
async def test_an_answer_that_is_not_of_the_api_is_logged_and_followed_by_a_new_list(server, caplog, odd) -> None:
    server.script = [*odd, page(one("a", 8), version=9), stream(stays=True)]
    async with watching(server, namespace="team") as watch:
        await until(lambda: watch.names == {"a": "8"}, "the new list")
    [warning] = messages(caplog, "WARNING")
    assert "watching configmaps in namespace team: 200: /api/v1/namespaces/team/configmaps:" in warning


async def test_a_bug_in_one_watch_is_logged_with_its_place_and_ends_no_other(server, monkeypatch, caplog) -> None:
    failures = [KeyError("a bug")]
    server.script = [page(one("a", 3), version=3), page(one("a", 4), version=4), stream(stays=True)]
    replace = Store.replace

    def failing(store: Store, *arguments: object) -> set[TrainingKey]:
        if failures:
            raise failures.pop()
        return replace(store, *arguments)

    monkeypatch.setattr(Store, "replace", failing)
    async with watching(server) as watch:
        await until(lambda: watch.names == {"a": "4"}, "the next list")
    assert "this is a bug" in caplog.text
    assert "Traceback" in caplog.text


async def test_a_foreign_object_with_our_label_is_passed_over(server, caplog) -> None:
    strange = raw_objects.pod("strange", pool="theirs", version=12)
    server.script = [
        page(raw_objects.pod("listed", pool="theirs"), version=10),
        stream(event("ADDED", strange), event("ADDED", raw_objects.pod("p", version=13)), stays=True),
    ]
    async with watching(server, POD) as watch:
        await until(lambda: watch.names, "our pod")
        assert watch.names == {"p": "13"}
        assert watch.notified == [KEY]
    assert "Pod team/listed is ignored" in caplog.text
    assert "Pod team/strange is ignored" not in caplog.text  # a tenant can make many
    assert watch._ignored == 1


async def test_an_object_whose_times_cannot_be_represented_hides_no_other(server, caplog) -> None:
    impossible = {"deletionTimestamp": "0001-01-01T00:00:00Z", "deletionGracePeriodSeconds": 30}
    server.script = [
        page(raw_objects.pod("listed", **impossible), raw_objects.pod("p", version=9), version=10),
        stream(event("MODIFIED", raw_objects.pod("q", version=11, **impossible)), bookmark(12), stays=True),
    ]
    async with watching(server, POD) as watch:
        await until(lambda: watch._version == "12", "the bookmark")
        assert watch.names == {"p": "9"}
    assert "this is a bug" not in caplog.text


async def test_a_watch_that_nobody_answers_for_long_is_blind_and_sees_again(server, monkeypatch) -> None:
    server.script = [page(version=3), *(refuses(503),) * 3]
    cluster = ObjectCache((), lambda key: None, lambda kind: None)
    async with watching(server) as watch:
        await until(idle(server, 4), "the next try")
        monkeypatch.setattr(cluster, "_watches", {None: [watch]})
        assert cluster.incomplete(None) == []
        watch.seen_at -= module.MAX_SILENT_SECONDS
        [problem] = cluster.incomplete(None)
        assert problem.path == "configmaps"
        assert "has not answered its watch of all namespaces for 60" in problem.message
        assert cluster.silent_seconds()["configmaps", None] >= 600


async def test_an_answer_ends_the_silence(server) -> None:
    server.script = [page(version=3), stream(stays=True)]
    async with watching(server) as watch:
        began = watch.seen_at
        await until(idle(server, 2), "a watch")
        await until(lambda: watch.seen_at > began, "an answer")
        assert module.blind(RAY_JOB, None, watch.seen_at) is None


async def test_of_some_kinds_only_metadata_are_read(server) -> None:
    assert ROLE in METADATA_ONLY
    server.script = [page(version=1)]
    async with watching(server, ROLE):
        await until(idle(server, 2), "a watch")
    assert [request.headers["Accept"] for request in server.requests] == [METADATA_LIST, METADATA]


async def test_a_stream_that_always_ends_immediately_is_asked_for_with_pauses(server, monkeypatch) -> None:
    monkeypatch.setattr(module, "FIRST_BACKOFF_SECONDS", 0.4)
    ends = 50
    server.script = [page(version=1), *(stream() for _ in range(ends))]
    async with watching(server) as watch:
        await until(lambda: len(server.requests) >= 3, "two ends")
        assert len(server.requests) < ends / 5
        assert watch.starts == 0


async def test_waits_grow_while_watches_are_refused_or_end_immediately_and_are_short_again_after_an_event(
    server, monkeypatch
) -> None:
    monkeypatch.setattr(module, "FIRST_BACKOFF_SECONDS", 0.2)
    monkeypatch.setattr(module, "MAX_BACKOFF_SECONDS", 1.0)
    waits: list[float] = []
    sleep = asyncio.sleep

    async def slept(seconds: float) -> None:
        waits.append(seconds)
        await sleep(0)

    monkeypatch.setattr(module.random, "uniform", lambda low, high: 1.0)
    monkeypatch.setattr(module.asyncio, "sleep", slept)
    cut = event("ADDED", one("a", 2)), event("ERROR", {"code": 500, "message": "cut"})
    server.script = [page(version=1), *(refuses(500),) * 2, *(stream(),) * 2, stream(*cut)]
    async with watching(server):
        async with asyncio.timeout(PATIENCE):
            while not idle(server, 7)():
                await sleep(0.01)
    assert [wait for wait in waits if wait in (0.2, 0.4, 0.8, 1.0)] == [0.4, 0.8, 1.0, 1.0, 0.2]


def test_every_kind_is_watched_in_every_namespace() -> None:
    changed: list[TrainingKey] = []
    everywhere = ObjectCache((), changed.append, lambda kind: None)
    two = ObjectCache(("a", "b"), changed.append, lambda kind: None)
    assert [(watch.kind, watch.namespace) for watch in everywhere.watches] == [(kind, None) for kind in WATCHED]
    assert {(watch.kind, watch.namespace) for watch in two.watches} == {(kind, at) for kind in WATCHED for at in "ab"}
    assert all(watch.store is two.stores[watch.kind] for watch in two.watches)


def test_what_is_not_listed_yet_is_one_problem_of_each_namespace() -> None:
    cluster = ObjectCache(("a", "b"), lambda key: None, lambda kind: None)
    [problem] = cluster.incomplete("b")
    assert problem.message == "not listed yet in namespace b."
    assert problem.path.split(", ") == sorted({kind.resource for kind in WATCHED}, key=problem.path.index)
    by_namespace = {namespace for _, namespace in cluster.silent_seconds()}
    assert by_namespace == {"a", "b"}, "a namespace without a Role must not hide another one"


class CountedName(str):
    """The name of a namespace, which counts how often it is compared with another name."""

    __slots__ = ()
    comparisons = 0

    def __eq__(self, other: object) -> bool:
        CountedName.comparisons += 1
        return super().__eq__(other)

    __hash__ = str.__hash__


def test_the_problems_of_a_namespace_are_found_without_a_look_at_all_others() -> None:
    """Every probe requests those of each namespace, so the work would grow with the square of their number."""
    names = [CountedName(f"n{number}") for number in range(50)]
    cluster, trainings = ObjectCache(names, lambda key: None, lambda kind: None), Trainings(names)
    for name in names:
        assert cluster.incomplete(name)
        assert trainings.obstacles(name)
        assert cluster.problems(name) == ()
    assert CountedName.comparisons < 10 * len(names)


class OneBrokenNamespace:
    """A client for which the ConfigMaps of the namespace `bad` cannot be listed while there is an `error`."""

    def __init__(self, error: ApiError) -> None:
        self.error: ApiError | None = error

    async def get_list(self, path: str, query: Query, each: object, *, accept: str, max_bytes: int) -> JsonObject:
        if self.error is not None and "/namespaces/bad/configmaps" in path:
            raise self.error
        return {"metadata": {"resourceVersion": "5"}, "items": []}

    @asynccontextmanager
    async def lines(self, path: str, query: Query, *, accept: str) -> AsyncIterator[AsyncIterator[bytes]]:
        async def silence() -> AsyncIterator[bytes]:
            await asyncio.Event().wait()
            yield b""

        yield silence()


@pytest.mark.parametrize("error", [Unavailable(500, "no key"), Unavailable(0, "no answer"), Unexpected(200, "HTML")])
async def test_a_namespace_that_cannot_be_listed_blocks_only_its_own_trainings_until_it_is_listed(error) -> None:
    recoveries: list[str | None] = []
    cluster = ObjectCache(("good", "bad"), lambda key: None, lambda kind: None, recoveries.append)
    client = OneBrokenNamespace(error)
    task = asyncio.create_task(cluster.run(client))
    await asyncio.wait_for(cluster.settled(), PATIENCE)
    assert (cluster.problems("good"), cluster.incomplete("good")) == ((), [])
    broken = [watch.kind for watch in cluster.watches if watch.namespace == "bad" and watch.kind.plural == "configmaps"]
    assert list(cluster.problems("bad")) == cluster.incomplete("bad") == [not_listed((kind,), "bad") for kind in broken]
    assert recoveries == []
    client.error = None
    await until(lambda: not cluster.problems("bad"), "a list")
    assert cluster.incomplete("bad") == []
    assert recoveries == ["bad"] * len(broken), "all trainings of the namespace are enqueued again, and no others"
    task.cancel()
    await asyncio.wait({task})


async def test_a_list_shows_that_objects_can_be_listed_although_the_watch_fails(server, monkeypatch) -> None:
    monkeypatch.setattr(module, "MAX_FAILURES", 1)
    server.script = [refuses(400), page(one("a", 2), version=3), refuses(400)]
    async with watching(server, namespace="team") as watch:
        await asyncio.wait_for(watch.settled.wait(), PATIENCE)
        assert watch.problem == not_listed((CONFIG_MAP,), "team")
        await until(watch.synced.is_set, "a list")
        assert (watch.problem, watch.recoveries) == (None, 1)


async def test_a_cluster_has_settled_when_every_watch_has_and_names_the_problems_of_a_namespace() -> None:
    cluster = ObjectCache(("a", "b"), lambda key: None, lambda kind: None)
    settling = asyncio.ensure_future(cluster.settled())
    for watch in cluster.watches[1:]:
        watch.settled.set()
        watch.synced.set()
    await asyncio.sleep(0)
    assert not settling.done()
    blind = cluster.watches[0]
    assert blind.namespace == "a"
    assert cluster.incomplete("a") == [not_listed((blind.kind,), "a")]
    blind.problem = Problem("rayjobs.ray.io", "no", "install")
    blind.settled.set()
    assert cluster.incomplete("a") == [blind.problem]
    assert cluster.incomplete("b") == []
    await asyncio.wait_for(settling, PATIENCE)
    assert cluster.problems("a") == (blind.problem,)
    assert cluster.problems("b") == ()
