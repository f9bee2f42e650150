"""kopf itself, against a server that has one kind: which trainings it reports, and what happens when it ends."""

import asyncio
import json
import threading
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import kopf
import pytest
from aiohttp import web
from kopf._core.reactor import running

from qwen35_operator import handlers as module
from qwen35_operator import kopf_run
from qwen35_operator.api.v1alpha1 import GROUP, KIND, PLURAL, VERSION
from qwen35_operator.kube import client as client_module
from qwen35_operator.kube.kinds import TRAINING
from qwen35_operator.kube.list_pace import ListPace
from qwen35_operator.kube.trainings import MAX_SPEC_BYTES, Trainings, TrainingWatch
from qwen35_operator.kube.watch import not_listed
from qwen35_operator.reconcile.observe import TrainingParser
from tests.operator.kube.server import Server, serving, until
from tests.patience import PATIENCE

ROOT = f"/apis/{GROUP}/{VERSION}"
KEY = ("team", "demo")


class Trained(Server):
    """Discovery, the list and the watch of trainings. Everything else is as it is where nothing is installed."""

    def __init__(self) -> None:
        super().__init__()
        self.installed = True
        self.away = False
        self.unauthorized = False
        """Whether kopf's requests, but not those of the probes before it starts, are refused for their token."""
        self.forbidden: set[str] = set()
        """Of "list", "watch", and "kopf", which is everything that kopf requests."""
        self.closed: set[str] = set()
        """Namespaces in which everything is forbidden."""
        self.odd: object = None
        """JSON that is the answer, with status 200, to each question about the namespace `odd`."""
        self.listed: list[dict] = []
        self.streams: defaultdict[str | None, asyncio.Queue[dict | None]] = defaultdict(asyncio.Queue)
        """What the watches of each namespace, or of all namespaces, get; None ends one of them."""
        self.hidden_scans = 0
        """Number of answers to `/apis` that still lack the group of trainings, as those of an API server that is behind."""
        self.lists = self.looks = self.refusals = 0
        """Lists that were given; questions whether the kind is there; answers that something is forbidden."""
        self.methods: set[str] = set()
        self.quick = asyncio.Event()
        """Cleared while lists have to wait for their answer."""
        self.quick.set()

    @property
    def events(self) -> asyncio.Queue[dict | None]:
        """Those of a watch of all namespaces."""
        return self.streams[None]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.methods.add(request.method)
        if self.away:
            return web.json_response({"kind": "Status", "code": 500, "message": "not now"}, status=500)
        hidden = request.path == "/apis" and self.hidden_scans > 0
        self.hidden_scans -= hidden
        discovery = self._discovery(installed=self.installed and not hidden)
        self.looks += request.path == ROOT
        if request.path in discovery:
            return web.json_response(discovery[request.path])
        if not request.path.endswith(PLURAL):
            return web.json_response({"code": 404, "message": "not found"}, status=404)
        probe = request.query.get("limit") == "1" or request.query.get("timeoutSeconds") == "1"
        verb = "watch" if "watch" in request.query else "list"
        if self.unauthorized and not probe:
            return web.json_response({"kind": "Status", "code": 401, "message": "Unauthorized"}, status=401)
        namespace = request.path.split("/")[-2] if "/namespaces/" in request.path else None
        if self.forbidden & {verb, *([] if probe else ["kopf"])} or namespace in self.closed:
            self.refusals += 1
            return web.json_response({"kind": "Status", "code": 403, "message": f"no {verb}"}, status=403)
        if namespace == "odd" and self.odd is not None:
            return web.json_response(self.odd)
        if verb == "list":
            if not probe:
                self.lists += 1
                await self.quick.wait()
            items = [each for each in self.listed if namespace in (None, each["metadata"]["namespace"])]
            listed = {"metadata": {"resourceVersion": "10"}, "items": items}
            return web.Response(text=text_of(listed), content_type="application/json")
        return web.Response() if probe else await self._watch(request, self.streams[namespace])

    def _discovery(self, *, installed: bool) -> dict[str, dict]:
        """kopf waits for namespaces and definitions to be known kinds, whether it looks for any or not."""
        groups = {"apiextensions.k8s.io": "v1", **({GROUP: VERSION} if installed else {})}
        versions = {
            group: {"groupVersion": f"{group}/{version}", "version": version} for group, version in groups.items()
        }
        return {
            "/api": {"versions": ["v1"]},
            "/api/v1": _kinds(namespaces="Namespace", events="Event"),
            "/apis": {
                "groups": [{"name": group, "versions": [v], "preferredVersion": v} for group, v in versions.items()]
            },
            "/apis/apiextensions.k8s.io/v1": _kinds(customresourcedefinitions="CustomResourceDefinition"),
            ROOT: _kinds(**({PLURAL: KIND} if installed else {})),
        }

    async def _watch(self, request: web.Request, events: asyncio.Queue[dict | None]) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while (event := await events.get()) is not None:
            await response.write(text_of(event).encode() + b"\n")
        return response


DEEP = "nested as deeply as an API server accepts"


def text_of(value: object) -> str:
    """Return JSON in which DEEP stands for an object of 9,900 levels, which `json` cannot write."""
    return json.dumps(value).replace(json.dumps(DEEP), '{"a":' * 9_900 + "1" + "}" * 9_900)


def _kinds(**kinds: str) -> dict:
    same = {"singularName": "", "namespaced": True, "verbs": ["list", "watch", "patch"]}
    return {"resources": [{"name": plural, "kind": kind, **same} for plural, kind in kinds.items()]}


def body(version: int, *, uid: str = "u1", namespace: str = "team", **more) -> dict:
    metadata = {"namespace": namespace, "name": "demo", "uid": uid, "resourceVersion": str(version)}
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "metadata": metadata, **more}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch) -> None:
    settings = kopf_run.settings

    def impatient() -> kopf.OperatorSettings:
        chosen = settings()
        chosen.networking.error_backoffs = (0.01,)
        return chosen

    wait = running.aiotasks.wait

    async def impatiently(tasks: set[asyncio.Task], **rest: float) -> tuple[set[asyncio.Task], set[asyncio.Task]]:
        """When kopf ends, it gives tasks that it does not know 5 s: a figure in its code."""
        return await wait(tasks, **rest | ({"timeout": 0.05} if rest.get("timeout") == 5 else {}))

    monkeypatch.setattr(running.aiotasks, "wait", impatiently)
    monkeypatch.setattr(module, "RESTART_SECONDS", 0.1)
    monkeypatch.setattr(kopf_run, "CHECK_SECONDS", 0.05)
    monkeypatch.setattr(kopf_run, "LOGIN_SECONDS", 0.1)
    monkeypatch.setattr(kopf_run, "settings", impatient)


@pytest.fixture
async def server() -> AsyncIterator[Trained]:
    async with serving(Trained()) as server:
        yield server


class Seen:
    """The trainings that the operator knows, and those it was notified of."""

    def __init__(self, *namespaces: str) -> None:
        self.trainings = Trainings(namespaces)
        self.began = self.watch.seen_at
        self.notified: list[tuple[str, str]] = []

    @property
    def watch(self) -> TrainingWatch:
        """That of the first namespace, or of all."""
        return self.trainings.watches[0]

    @property
    def version(self) -> str | None:
        return self.version_of(KEY)

    def version_of(self, key: tuple[str, str]) -> str | None:
        stored = self.trainings.get(key)
        return None if stored is None else stored["metadata"]["resourceVersion"]


@asynccontextmanager
async def following(
    server: Trained, monkeypatch, tmp_path: Path, *namespaces: str, pace: ListPace | None = None
) -> AsyncIterator[Seen]:
    config = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "this", "user": "me"}}],
        "clusters": [{"name": "this", "cluster": {"server": server.url}}],
        "users": [{"name": "me", "user": {"token": "sesame"}}],
    }
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(path))
    seen, client = Seen(*namespaces), server.client()
    task = asyncio.create_task(
        module.follow(str(path), client, seen.trainings, seen.notified.append, pace or ListPace())
    )
    try:
        yield seen
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.wait({task})
        await client.close()


async def test_what_is_listed_and_what_happens_becomes_bodies_and_work(server, monkeypatch, tmp_path) -> None:
    server.listed = [body(5)]
    async with following(server, monkeypatch, tmp_path) as seen:
        await until(lambda: seen.version == "5", "the listed one")
        await until(lambda: seen.watch.seen_at > seen.began, "an answer to kopf")
        server.events.put_nowait({"type": "MODIFIED", "object": body(11, spec={"suspend": True})})
        await until(lambda: seen.version == "11", "the changed one")
        assert seen.trainings.get(KEY)["spec"] == {"suspend": True}
        assert seen.notified == [KEY, KEY]
        server.events.put_nowait({"type": "DELETED", "object": body(12)})
        await until(lambda: seen.version is None, "the end of it")
        assert seen.notified == [KEY, KEY]  # its children go with it: there is nothing to do
        server.events.put_nowait({"type": "ADDED", "object": body(13, uid="u2")})
        await until(lambda: seen.version == "13", "another of its name")


async def test_kopf_pauses_after_each_page_of_a_list_while_another_process_leads(server, monkeypatch, tmp_path) -> None:
    pauses: list[float] = []

    class NotedPace(ListPace):
        async def pause(self, seconds: float) -> None:
            pauses.append(seconds)

    server.listed = [body(5)]
    async with following(server, monkeypatch, tmp_path, pace=NotedPace()) as seen:
        await until(lambda: seen.version == "5", "the listed one")
        assert pauses
        assert 0 < min(pauses) <= max(pauses) < PATIENCE
        listed = len(pauses)
        server.events.put_nowait({"type": "MODIFIED", "object": body(11)})
        await until(lambda: seen.version == "11", "the changed one")
        assert len(pauses) == listed, "events come without a pause"


async def test_an_object_that_is_nested_too_deeply_hides_no_other(server, monkeypatch, tmp_path, caplog) -> None:
    """Neither in the list nor in the watch, although kopf reads both with a parser that fails."""
    deep = {"pods": {"head": {"spec": {"affinity": DEEP}}}}
    hostile = body(5, spec=deep)
    hostile["metadata"] |= {"name": "hostile", "generation": 1, "managedFields": [{"fieldsV1": DEEP}]}
    server.listed = [hostile, body(6)]
    async with following(server, monkeypatch, tmp_path) as seen:
        await until(lambda: seen.version == "6", "the other one of the list")
        server.events.put_nowait(
            {"type": "MODIFIED", "object": {**hostile, "metadata": hostile["metadata"] | {"resourceVersion": "7"}}}
        )
        server.events.put_nowait({"type": "MODIFIED", "object": body(8)})
        await until(lambda: seen.version == "8", "the one that is changed after it")
        training, (problem,) = TrainingParser().parse(seen.trainings.get(("team", "hostile")))
    assert training is None
    assert "levels of objects and lists, but the operator reads at most 64" in problem.message
    assert server.lists == 1
    assert "starting again" not in caplog.text


async def test_kopf_never_keeps_a_spec_that_is_too_large(server, monkeypatch, tmp_path) -> None:
    """It keeps a page of parsed trainings, and events that wait: such specs would take all of the memory."""
    large = {"pods": {"head": {"spec": {"dnsConfig": [{}] * MAX_SPEC_BYTES}}}}
    sizes: dict[str, int] = {}
    put = Trainings.put

    def noted(self: Trainings, raw: dict) -> bool:
        sizes[raw["metadata"]["resourceVersion"]] = len(json.dumps(raw))
        return put(self, raw)

    monkeypatch.setattr(Trainings, "put", noted)
    server.listed = [body(5, spec=large)]
    async with following(server, monkeypatch, tmp_path) as seen:
        await until(lambda: seen.version == "5", "the listed one")
        server.events.put_nowait({"type": "MODIFIED", "object": body(6, spec=large)})
        await until(lambda: seen.version == "6", "the changed one")
        server.events.put_nowait({"type": "MODIFIED", "object": body(7, spec={"suspend": True})})
        await until(lambda: seen.version == "7", "the one that is small again")
    assert sizes.keys() == {"5", "6", "7"}
    assert max(sizes.values()) < 1000


async def test_a_deletion_that_nobody_reported_is_noticed(server, monkeypatch) -> None:
    monkeypatch.setattr(module, "FORGET_SECONDS", 0.01)
    server.listed = [body(5, uid="u2")]
    seen, client = Seen(), server.client()
    for name, uid in (("demo", "u2"), ("ghost", "u3")):
        raw = body(5, uid=uid)
        raw["metadata"]["name"] = name
        seen.trainings.put(raw)
    server.away = True
    task = asyncio.create_task(module.forget_deleted(client, (), seen.trainings))
    try:
        await asyncio.sleep(0.05)
        assert len(seen.trainings) == 2
        server.away = False
        await until(lambda: list(seen.trainings) == [KEY], "one of them")
    finally:
        task.cancel()
        await asyncio.wait({task})
        await client.close()


async def test_an_error_in_one_namespace_keeps_no_deletion_in_another_from_being_noticed(
    server, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(module, "FORGET_SECONDS", 0.01)
    seen, client = Seen("refused", "team"), server.client()
    seen.trainings.put(body(5))
    get_list = client.get_list

    async def failing(path: str, *arguments: object, **options: object) -> dict:
        if "/refused/" in path:
            raise KeyError("a bug")
        return await get_list(path, *arguments, **options)

    monkeypatch.setattr(client, "get_list", failing)
    task = asyncio.create_task(module.forget_deleted(client, ("refused", "team"), seen.trainings))
    await until(lambda: not seen.trainings or task.done(), "the deletion")
    assert not seen.trainings
    assert f"listing {PLURAL}.{GROUP} in namespace refused: this is a bug" in caplog.text
    task.cancel()
    await asyncio.wait({task})
    await client.close()


async def test_credentials_that_are_refused_end_kopf_as_usual(server, monkeypatch, tmp_path, caplog) -> None:
    """kopf would log in again and again if it did not recognise the credentials of a new session."""
    server.unauthorized = True
    async with following(server, monkeypatch, tmp_path) as seen:
        await until(lambda: "Ran out of valid credentials" in caplog.text, "a warning")
        server.unauthorized, server.listed = False, [body(5)]
        await until(lambda: seen.version == "5", "the listed one")


async def test_credentials_that_cannot_be_read_once_are_read_again_soon(server, monkeypatch, tmp_path) -> None:
    """As while the file of a token is replaced."""
    failures, read = [OSError(5, "stale file handle")], kopf.login_with_kubeconfig

    def login(**arguments: object) -> kopf.ConnectionInfo | None:
        if failures:
            raise failures.pop()
        return read(**arguments)

    monkeypatch.setattr(kopf, "login_with_kubeconfig", login)
    assert kopf_run.settings().execution.default_backoff == kopf_run.LOGIN_SECONDS
    server.listed = [body(5)]
    async with following(server, monkeypatch, tmp_path) as seen:
        await until(lambda: seen.version == "5", "the listed one")
    assert failures == []


async def test_nothing_of_kopfs_own_is_written(server, monkeypatch, tmp_path) -> None:
    server.listed = [body(5)]
    async with following(server, monkeypatch, tmp_path) as seen:
        await until(lambda: seen.version == "5", "the listed one")
        # kopf writes what it has to write for one event before it takes the next of the same object.
        for version in (11, 12, 13):
            server.events.put_nowait({"type": "MODIFIED", "object": body(version)})
            await until(lambda version=version: seen.version == str(version), "the changed one")
    assert server.methods == {"GET"}


async def test_without_the_definition_it_says_so_once_and_begins_when_it_is_there(
    server, monkeypatch, tmp_path, caplog
) -> None:
    server.installed = False
    server.listed = [body(5)]
    async with following(server, monkeypatch, tmp_path) as seen:
        assert seen.watch.obstacle() == not_listed((TRAINING,), None)
        await until(lambda: "qwen35 crd" in caplog.text, "advice")
        await until(lambda: server.looks > 3, "further looks")
        assert caplog.text.count("the cluster has no such kind") == 1
        assert seen.watch.problem.message == "the cluster has no such kind."
        assert server.lists == 0
        server.installed = True
        await until(lambda: seen.version == "5", "the listed one")
        assert seen.watch.problem is None


@pytest.mark.parametrize("verb", ["list", "watch"])
async def test_a_missing_permission_is_reported_until_it_is_granted(
    server, monkeypatch, tmp_path, caplog, verb
) -> None:
    server.forbidden = {verb}
    server.listed = [body(5)]
    async with following(server, monkeypatch, tmp_path) as seen:
        await until(lambda: "Grant" in caplog.text, "advice")
        await until(lambda: server.refusals > 3, "further refusals")
        assert caplog.text.count("Grant") == 1
        assert f"no {verb}" in seen.watch.problem.message
        fix = f"Grant get, list and watch on {TRAINING.resource} in all namespaces to the operator."
        assert seen.watch.problem.fix == fix
        server.forbidden = set()
        await until(lambda: seen.version == "5", "the listed one")
        assert seen.watch.problem is None


async def test_a_permission_of_one_namespace_that_is_missing_is_named(server, monkeypatch, tmp_path) -> None:
    server.forbidden = {"list"}
    async with following(server, monkeypatch, tmp_path, "team") as seen:
        await until(lambda: seen.watch.problem is not None, "a problem")
        assert "no list" in seen.watch.problem.message
        assert "in namespace team" in seen.watch.problem.fix


async def test_a_namespace_that_may_not_be_watched_keeps_no_other_from_being_served(
    server, monkeypatch, tmp_path
) -> None:
    server.closed = {"refused"}
    server.listed = [body(5), body(6, namespace="refused")]
    async with following(server, monkeypatch, tmp_path, "refused", "team") as seen:
        await until(lambda: seen.version == "5", "the one of the other namespace")
        await until(lambda: seen.watch.problem is not None, "a problem")
        assert "in namespace refused" in seen.watch.problem.fix
        assert seen.trainings.obstacles("refused") == [seen.watch.problem]
        await until(lambda: seen.trainings.obstacles("team") == [], "no problem of the other namespace")
        server.closed = set()
        await until(lambda: seen.version_of(("refused", "demo")) == "6", "the one of the refused namespace")
        await until(lambda: seen.trainings.obstacles("refused") == [], "no problem")


@pytest.mark.parametrize(
    "odd", [{}, [], {"metadata": {}}, {"metadata": {"resourceVersion": "1"}, "items": [{}]}], ids=str
)
async def test_an_answer_for_one_namespace_that_is_not_a_list_interrupts_no_other(
    server, monkeypatch, tmp_path, caplog, odd
) -> None:
    """As from a proxy in front of the API server."""
    monkeypatch.setattr(client_module, "GET_RETRY_WAITS_SECONDS", ())
    server.odd, server.listed = odd, [body(5), body(6, namespace="odd")]
    async with following(server, monkeypatch, tmp_path, "odd", "team") as seen:
        await until(lambda: seen.version == "5", "the one of the other namespace")
        await until(lambda: "in namespace odd" in caplog.text, "a warning")
        server.odd = None
        await until(lambda: seen.version_of(("odd", "demo")) == "6", "the one of the namespace itself")


async def test_a_kopf_starts_when_earlier_ones_have_listed(server, monkeypatch, tmp_path) -> None:
    """Many that list at the same time would keep the operator from renewing its Lease."""
    monkeypatch.setattr(module, "MAX_STARTING", 1)
    monkeypatch.setattr(module, "START_SECONDS", PATIENCE)
    names = ("a", "b", "c")
    server.listed = [body(5, namespace=name) for name in names]
    server.quick.clear()
    async with following(server, monkeypatch, tmp_path, *names) as seen:
        await until(lambda: server.lists == 1, "the first list")
        assert [thread.name for thread in threading.enumerate()].count("kopf") == 1
        server.quick.set()
        await until(lambda: len(seen.trainings) == len(names), "all lists")


async def test_a_namespace_is_served_from_its_first_list_on_also_while_kopf_is_started_again(
    server, monkeypatch, tmp_path, caplog
) -> None:
    """A namespace whose kopf waits for its turn to list, or lists, is not served yet."""
    monkeypatch.setattr(module, "MAX_STARTING", 1)
    monkeypatch.setattr(module, "START_SECONDS", PATIENCE)
    server.quick.clear()
    async with following(server, monkeypatch, tmp_path, "a", "b") as seen:
        await until(lambda: server.lists == 1, "the first list")
        assert [seen.trainings.obstacles(name) for name in "ab"] == [[not_listed((TRAINING,), name)] for name in "ab"]
        server.quick.set()
        await until(lambda: seen.trainings.obstacles("a") == seen.trainings.obstacles("b") == [], "both lists")
        monkeypatch.setattr(kopf_run, "SILENT_SECONDS", 0.0)
        server.quick.clear()
        await until(lambda: server.lists == 3, "a list of another kopf")
        assert seen.trainings.obstacles("a") == seen.trainings.obstacles("b") == []
        server.quick.set()


async def test_a_kopf_that_does_not_list_holds_others_up_for_a_limited_time(server, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(module, "MAX_STARTING", 1)
    monkeypatch.setattr(module, "START_SECONDS", 0.05)
    server.quick.clear()
    async with following(server, monkeypatch, tmp_path, "a", "b"):
        await until(lambda: server.lists == 2, "the list of the other one")
        server.quick.set()


async def test_a_system_without_a_free_thread_ends_no_watch_of_trainings(server, monkeypatch, tmp_path, caplog) -> None:
    start, failures = kopf_run.KopfRun.start, [RuntimeError("can't start new thread")]

    def failing(run: kopf_run.KopfRun) -> None:
        if failures:
            raise failures.pop()
        start(run)

    monkeypatch.setattr(kopf_run.KopfRun, "start", failing)
    server.listed = [body(5)]
    async with following(server, monkeypatch, tmp_path) as seen:
        await until(lambda: seen.version == "5", "the listed one")
    assert "can't start new thread" in caplog.text


async def test_a_permission_that_is_taken_away_in_one_namespace_interrupts_no_other(
    server, monkeypatch, tmp_path
) -> None:
    server.listed = [body(5), body(6, namespace="refused")]
    async with following(server, monkeypatch, tmp_path, "refused", "team") as seen:
        await until(lambda: seen.version == "5" and seen.version_of(("refused", "demo")) == "6", "both")
        server.closed = {"refused"}
        server.streams["refused"].put_nowait(None)  # the API server ends both watches
        server.streams["team"].put_nowait(None)
        await until(lambda: seen.watch.problem is not None, "a problem")
        server.streams["team"].put_nowait({"type": "MODIFIED", "object": body(11)})
        await until(lambda: seen.version == "11", "a change in the other namespace")
        assert seen.trainings.obstacles("refused") == [seen.watch.problem]
        assert seen.trainings.obstacles("team") == []
        server.closed = set()
        await until(lambda: seen.trainings.obstacles("refused") == [], "no problem")


async def test_a_kopf_that_does_not_find_the_kind_is_stopped_and_started_again(
    server, monkeypatch, tmp_path, caplog
) -> None:
    """kopf looks once. Another API server, behind the same address, may not know the kind yet."""
    monkeypatch.setattr(kopf_run, "LIST_SECONDS", 0.5)
    server.hidden_scans, server.listed = 1, [body(5)]
    async with following(server, monkeypatch, tmp_path) as seen:
        await until(lambda: seen.version == "5", "the listed one")
    assert "kopf has not listed any for" in caplog.text
    assert server.hidden_scans == 0


async def test_a_kopf_whose_watch_is_silent_for_too_long_is_stopped_and_started_again(
    server, monkeypatch, tmp_path, caplog
) -> None:
    monkeypatch.setattr(kopf_run, "SILENT_SECONDS", 0.5)
    server.listed = [body(5)]
    async with following(server, monkeypatch, tmp_path) as seen:
        await until(lambda: seen.version == "5", "the listed one")
        server.listed = [body(6)]
        await until(lambda: seen.version == "6", "one without an event")
    assert "kopf has had no answer to its list or watch for" in caplog.text


@pytest.mark.parametrize(
    ("answered_at", "now", "seconds"),
    [(None, 130.0, 30.0), (None, 160.0, 0.0), (110.0, 160.0, 370.0), (110.0, 530.0, 0.0)],
)
def test_kopf_hangs_without_a_list_after_a_minute_and_without_an_answer_to_its_watch_after_seven(
    answered_at, now, seconds
) -> None:
    assert kopf_run.seconds_until_hung(100.0, answered_at, now) == seconds


async def test_answers_to_other_requests_than_those_for_trainings_do_not_count(server, monkeypatch, tmp_path) -> None:
    server.forbidden = {"kopf"}
    async with following(server, monkeypatch, tmp_path) as seen:
        await until(lambda: server.refusals > 3, "refused lists, after answers to /apis")
        assert seen.watch.seen_at == seen.began


async def test_the_log_says_once_that_watching_trainings_works_again(server, monkeypatch, tmp_path, caplog) -> None:
    caplog.set_level("INFO", "qwen35_operator")
    monkeypatch.setattr(kopf_run, "LASTING_SECONDS", 0.0)
    server.forbidden = {"list"}
    async with following(server, monkeypatch, tmp_path, "team"):
        await until(lambda: "Grant" in caplog.text, "advice")
        server.forbidden = set()
        await until(lambda: "in namespace team works again" in caplog.text, "the end of the problem")


async def test_a_kopf_that_ends_with_the_same_error_each_time_is_one_warning(
    server, monkeypatch, tmp_path, caplog
) -> None:
    monkeypatch.setattr(module, "RESTART_SECONDS", 0.02)
    server.forbidden = {"kopf"}
    async with following(server, monkeypatch, tmp_path):
        await until(lambda: server.refusals > 6, "a third kopf")
    assert caplog.text.count("starting again") == 1


async def test_whatever_ends_kopf_it_is_started_again(server, monkeypatch, tmp_path, caplog) -> None:
    """Also an exception that `except Exception` does not catch."""
    operate, failures = kopf_run._operate, [SystemExit("no more"), asyncio.CancelledError()]

    async def failing(*arguments: object) -> None:
        if failures:
            raise failures.pop()
        await operate(*arguments)

    monkeypatch.setattr(kopf_run, "_operate", failing)
    server.listed = [body(5)]
    async with following(server, monkeypatch, tmp_path) as seen:
        await until(lambda: seen.version == "5", "the listed one")
    assert "SystemExit('no more')" in caplog.text


async def test_when_kopf_ends_it_is_started_again(server, monkeypatch, tmp_path, caplog) -> None:
    server.forbidden = {"kopf"}
    server.listed = [body(5)]
    async with following(server, monkeypatch, tmp_path) as seen:
        await until(lambda: f"watching {PLURAL}" in caplog.text, "a warning")
        server.forbidden = set()
        await until(lambda: seen.version == "5", "the listed one")


async def test_a_permission_that_is_taken_away_is_reported(server, monkeypatch, tmp_path) -> None:
    server.listed = [body(5)]
    async with following(server, monkeypatch, tmp_path) as seen:
        await until(lambda: seen.version == "5", "the listed one")
        server.forbidden = {"list", "watch"}
        server.events.put_nowait(None)  # the API server ends the watch
        await until(lambda: seen.watch.problem is not None, "a problem")
        server.forbidden = set()
        await until(lambda: seen.watch.problem is None, "no problem")


async def test_a_server_that_is_away_takes_no_sight_away(server, monkeypatch, tmp_path, caplog) -> None:
    watch, client = TrainingWatch(None), server.client()
    await module.wait_until_watchable(client, watch)
    assert watch.problem is None
    server.away = True
    task = asyncio.create_task(module.wait_until_watchable(client, watch))
    await until(lambda: "not now" in caplog.text, "a warning")
    assert watch.problem is None
    server.away = False
    await asyncio.wait_for(task, PATIENCE)
    await client.close()


async def test_its_thread_ends_with_it(server, monkeypatch, tmp_path) -> None:
    server.listed = [body(5)]
    async with following(server, monkeypatch, tmp_path) as seen:
        await until(lambda: seen.version == "5", "the listed one")
        assert [thread.name for thread in threading.enumerate()].count("kopf") == 1
    await until(lambda: "kopf" not in [thread.name for thread in threading.enumerate()], "the end of the thread")
