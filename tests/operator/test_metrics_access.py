"""The API server decides which requests may read the metrics. It gets few requests, and a flood of tokens takes bounded memory."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml

from qwen35_operator.kube.api_errors import Forbidden, Unavailable
from qwen35_operator.kube.kinds import SUBJECT_ACCESS_REVIEW, TOKEN_REVIEW
from qwen35_operator.metrics_access import (
    ALLOWED_SECONDS,
    MAX_ALLOWED_TOKENS,
    MAX_REFUSED_TOKENS,
    MAX_WAITING_REQUESTS,
    REFUSED_SECONDS,
    MetricsAccess,
)

RULES = Path(__file__).parents[2] / "helm" / "qwen35-operator" / "files" / "metrics-rules.yaml"
PROMETHEUS = {
    "username": "system:serviceaccount:monitoring:prometheus",
    "uid": "1",
    "groups": ["system:serviceaccounts", "system:authenticated"],
    "extra": {"authentication.kubernetes.io/pod-name": ["prometheus-0"]},
}
NOTEBOOK = {"username": "system:serviceaccount:team:notebook", "groups": ["system:authenticated"]}


class Reviews:
    """An API server that answers reviews: of tokens by a table of users, and of users by a set of names."""

    def __init__(self) -> None:
        self.users: dict[str, dict[str, Any]] = {"prometheus": PROMETHEUS, "notebook": NOTEBOOK}
        self.allowed = {PROMETHEUS["username"]}
        self.posted: list[tuple[str, dict[str, Any]]] = []
        self.error: Exception | None = None
        self.open = asyncio.Event()
        self.open.set()
        self.running = self.most_running = 0

    async def post(self, path: str, body: dict[str, Any], query: object = None) -> dict[str, Any]:
        assert query is None
        self.posted.append((path, body))
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        await self.open.wait()
        self.running -= 1
        if self.error is not None:
            raise self.error
        spec = body["spec"]
        if path == TOKEN_REVIEW.path():
            assert body["kind"] == "TokenReview"
            user = self.users.get(spec["token"])
            return body | {"status": {"error": "invalid"} if user is None else {"authenticated": True, "user": user}}
        assert (path, body["kind"]) == (SUBJECT_ACCESS_REVIEW.path(), "SubjectAccessReview")
        assert spec["nonResourceAttributes"] == {"path": "/metrics", "verb": "get"}
        return body | {"status": {"allowed": spec["user"] in self.allowed}}


class Gate:
    """The object under test, with a clock of its own."""

    def __init__(self) -> None:
        self.reviews = Reviews()
        self.now = 1000.0
        self.access = MetricsAccess(self.reviews, lambda: self.now)  # type: ignore[arg-type]  # only `post` is used

    async def status(self, token: str) -> int:
        return (await self.access.check(f"Bearer {token}")).status


@pytest.fixture
async def gate() -> Gate:
    return Gate()


async def test_a_token_whose_user_may_get_metrics_is_allowed_and_the_whole_user_is_reviewed(gate: Gate) -> None:
    assert await gate.status("prometheus") == 200
    (_, token), (_, subject) = gate.reviews.posted
    assert token["spec"] == {"token": "prometheus"}
    user = {key: subject["spec"][key] for key in ("uid", "groups", "extra")} | {"username": subject["spec"]["user"]}
    assert user == PROMETHEUS


async def test_a_user_without_the_right_is_named_together_with_the_fix(gate: Gate) -> None:
    answer = await gate.access.check("Bearer notebook")
    assert answer.status == 403
    assert NOTEBOOK["username"] in answer.message
    assert "-metrics-reader" in answer.message


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Basic dTpw", "prometheus", "Bearer pr\udcffx"])
async def test_a_request_without_a_token_is_refused_without_a_review(gate: Gate, header: str | None) -> None:
    assert (await gate.access.check(header)).status == 401
    assert gate.reviews.posted == []


async def test_the_scheme_is_not_case_sensitive(gate: Gate) -> None:
    assert (await gate.access.check("bearer prometheus")).status == 200


async def test_an_unknown_token_is_refused_before_any_right_is_reviewed(gate: Gate) -> None:
    assert await gate.status("invented") == 401
    assert [path for path, _ in gate.reviews.posted] == [TOKEN_REVIEW.path()]


async def test_an_answer_is_kept_for_a_short_time(gate: Gate) -> None:
    assert await gate.status("prometheus") == 200
    gate.reviews.allowed.clear()
    gate.now += ALLOWED_SECONDS - 1
    assert await gate.status("prometheus") == 200
    gate.now += 1
    assert await gate.status("prometheus") == 403
    gate.reviews.allowed.add(PROMETHEUS["username"])
    gate.now += REFUSED_SECONDS - 1
    assert await gate.status("prometheus") == 403
    gate.now += 1
    assert await gate.status("prometheus") == 200


async def test_invented_tokens_take_bounded_memory_and_displace_no_allowed_one(gate: Gate) -> None:
    assert await gate.status("prometheus") == 200
    for number in range(2 * MAX_REFUSED_TOKENS):
        assert await gate.status(f"invented-{number}") == 401
    assert len(gate.access._refused.answers) == MAX_REFUSED_TOKENS
    before = len(gate.reviews.posted)
    assert await gate.status("prometheus") == 200
    assert await gate.status(f"invented-{2 * MAX_REFUSED_TOKENS - 1}") == 401
    assert len(gate.reviews.posted) == before
    assert await gate.status("invented-0") == 401
    assert len(gate.reviews.posted) == before + 1


async def test_allowed_tokens_are_bounded_too(gate: Gate) -> None:
    for number in range(MAX_ALLOWED_TOKENS + 1):
        gate.reviews.users[f"token-{number}"] = PROMETHEUS
        assert await gate.status(f"token-{number}") == 200
    assert len(gate.access._allowed.answers) == MAX_ALLOWED_TOKENS


async def test_tokens_themselves_are_not_kept(gate: Gate) -> None:
    await gate.status("prometheus")
    await gate.status("notebook")
    kept = [*gate.access._allowed.answers, *gate.access._refused.answers]
    assert len(kept) == 2
    assert not any(token in key for key in kept for token in (b"prometheus", b"notebook"))


async def test_one_review_takes_place_at_a_time_and_a_flood_is_refused(gate: Gate) -> None:
    gate.reviews.open.clear()
    waiting = [asyncio.create_task(gate.status(f"invented-{number}")) for number in range(MAX_WAITING_REQUESTS)]
    await asyncio.sleep(0)
    assert await gate.status("another") == 503
    gate.reviews.open.set()
    assert await asyncio.gather(*waiting) == [401] * MAX_WAITING_REQUESTS
    assert gate.reviews.most_running == 1
    assert await gate.status("prometheus") == 200


async def test_invented_tokens_do_not_keep_out_one_that_was_allowed_before(gate: Gate) -> None:
    assert await gate.status("prometheus") == 200
    gate.now += ALLOWED_SECONDS
    gate.reviews.open.clear()
    flood = [asyncio.create_task(gate.status(f"invented-{number}")) for number in range(MAX_WAITING_REQUESTS)]
    await asyncio.sleep(0)
    scrapes = [asyncio.create_task(gate.status("prometheus")) for _ in range(MAX_WAITING_REQUESTS)]
    await asyncio.sleep(0)
    assert await gate.status("another") == await gate.status("prometheus") == 503
    gate.reviews.open.set()
    assert await asyncio.gather(*scrapes) == [200] * MAX_WAITING_REQUESTS
    await asyncio.wait(flood)


async def test_concurrent_requests_with_one_token_need_one_review(gate: Gate) -> None:
    assert await asyncio.gather(*(gate.status("prometheus") for _ in range(5))) == [200] * 5
    assert len(gate.reviews.posted) == 2


async def test_a_request_that_is_cancelled_frees_its_place(gate: Gate) -> None:
    gate.reviews.open.clear()
    waiting = [asyncio.create_task(gate.status("prometheus")) for _ in range(MAX_WAITING_REQUESTS)]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    gate.reviews.open.set()
    assert await gate.status("prometheus") == 200


@pytest.mark.parametrize("error", [Unavailable(503, "etcd is away"), Forbidden(403, "tokenreviews is forbidden")])
async def test_a_failed_review_refuses_and_is_tried_again(
    gate: Gate, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    gate.reviews.error = error
    assert await gate.status("prometheus") == 503
    assert str(error) in caplog.text
    assert ("Grant the operator create on tokenreviews" in caplog.text) == isinstance(error, Forbidden)
    assert "prometheus" not in caplog.text
    gate.reviews.error = None
    assert await gate.status("prometheus") == 200


async def test_the_chart_grants_exactly_the_reviews_that_are_posted(gate: Gate) -> None:
    await gate.status("prometheus")
    kinds = {kind.path(): kind for kind in (TOKEN_REVIEW, SUBJECT_ACCESS_REVIEW)}
    posted = [kinds[path] for path, _ in gate.reviews.posted]
    used = [{"apiGroups": [kind.group], "resources": [kind.plural], "verbs": ["create"]} for kind in posted]
    assert yaml.safe_load(RULES.read_text()) == used
