"""What Prometheus and the kubelet are answered."""

import asyncio
import shutil
import socket
import ssl
from pathlib import Path

import aiohttp
import pytest

from qwen35_operator import metrics_certificate
from qwen35_operator.metrics import Metrics
from qwen35_operator.metrics_access import AccessAnswer, MetricsAccess
from qwen35_operator.operator_settings import SettingsRefused
from qwen35_operator.probes import Obstacles, readiness, serving
from qwen35_trainer.manifest import Problem
from tests.patience import PATIENCE
from tests.testbed.certificates import Authority
from tests.testbed.processes import free_ports


@pytest.fixture
def ports() -> dict[str, int]:
    return dict(zip(("metrics_port", "health_port"), free_ports(2), strict=True))


def served() -> Obstacles:
    """There is nothing that keeps the trainings of all namespaces from being served."""
    return {None: []}


async def get(port: int, path: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}") as answer:
        return answer.status, await answer.text()


async def test_it_is_ready_when_everything_has_been_seen_and_says_what_has_not(ports) -> None:
    unseen = [Problem("pods", "not listed yet.", "Wait."), Problem("rayjobs.ray.io", "there is none.", "Install it.")]
    async with serving(Metrics(), lambda: {None: unseen}, **ports):
        assert await get(ports["health_port"], "/healthz") == (200, "ok")
        message = "pods: not listed yet. Wait.\nrayjobs.ray.io: there is none. Install it."
        assert await get(ports["health_port"], "/readyz") == (503, message)
        before, unseen = unseen, []
        assert await get(ports["health_port"], "/readyz") == (200, "ok")
        unseen = before[1:]
        assert (await get(ports["health_port"], "/readyz"))[0] == 503


UNSEEN = Problem("pods", "not allowed in namespace b.", "Grant it.")


@pytest.mark.parametrize(
    ("obstacles", "answer"),
    [
        ({"a": []}, (200, "ok")),
        ({"a": [], "b": [UNSEEN]}, (200, "ok\npods: not allowed in namespace b. Grant it.")),
        ({"b": [UNSEEN]}, (503, "pods: not allowed in namespace b. Grant it.")),
        ({None: [UNSEEN]}, (503, "pods: not allowed in namespace b. Grant it.")),
    ],
)
def test_it_is_ready_while_it_can_serve_one_namespace_and_names_the_others(obstacles, answer) -> None:
    """A tenant may take the operator's rights in his namespace away. That must not keep nodes from being drained."""
    assert readiness(obstacles) == answer


async def test_metrics_are_served_on_their_own_port(ports) -> None:
    metrics = Metrics()
    metrics.restarted("Pod")
    async with serving(metrics, served, **ports):
        status, text = await get(ports["metrics_port"], "/metrics")
        assert status == 200
        assert 'qwen35_watch_restarts_total{kind="Pod"} 1.0' in text
        assert (await get(ports["health_port"], "/metrics"))[0] == 404
        assert (await get(ports["metrics_port"], "/readyz"))[0] == 404


@pytest.mark.parametrize("absent", ["metrics_port", "health_port"])
async def test_port_0_serves_nothing(ports, absent) -> None:
    async with serving(Metrics(), served, **{**ports, absent: 0}):
        with pytest.raises(aiohttp.ClientConnectionError):
            await get(ports[absent], "/metrics")
        (other,) = set(ports) - {absent}
        assert (await get(ports[other], "/metrics" if other == "metrics_port" else "/healthz"))[0] == 200


async def test_a_port_that_is_taken_is_an_error_and_the_other_is_given_back(ports) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", ports["health_port"]))
        taken.listen()
        with pytest.raises(OSError, match=str(ports["health_port"])):
            async with serving(Metrics(), served, **ports):
                pytest.fail("it is not served")
    async with serving(Metrics(), served, **ports):
        assert (await get(ports["metrics_port"], "/metrics"))[0] == 200


class Porter(MetricsAccess):
    """Lets the token `good` pass, and refuses others with a status that the test chooses."""

    def __init__(self, refusal: AccessAnswer) -> None:
        self.refusal = refusal

    async def check(self, authorization: str | None) -> AccessAnswer:
        return AccessAnswer(200) if authorization == "Bearer good" else self.refusal


@pytest.mark.parametrize(
    "refusal", [AccessAnswer(401, "no token"), AccessAnswer(403, "no right"), AccessAnswer(503, "x")]
)
async def test_metrics_with_authentication_need_a_token_and_the_probes_do_not(ports, refusal) -> None:
    url = f"http://127.0.0.1:{ports['metrics_port']}/metrics"
    async with serving(Metrics(), served, **ports, access=Porter(refusal)), aiohttp.ClientSession() as session:
        for method in ("GET", "HEAD"):
            async with session.request(method, url) as answer:
                text = await answer.text()
                assert answer.status == refusal.status
                assert "qwen35" not in text
                assert answer.headers.get("WWW-Authenticate") == ("Bearer" if refusal.status == 401 else None)
        assert await get(ports["metrics_port"], "/metrics") == (refusal.status, refusal.message)
        async with session.get(url, headers={"Authorization": "Bearer good"}) as answer:
            assert answer.status == 200
            assert "qwen35_leading" in await answer.text()
        assert await get(ports["health_port"], "/healthz") == (200, "ok")
        assert await get(ports["health_port"], "/readyz") == (200, "ok")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.create(tmp_path / "authority")


def as_secret(authority: Authority, name: str, folder: Path) -> Path:
    """A new certificate of this name, in the files of a Secret of type kubernetes.io/tls."""
    issued = authority.issue(name, name, names="IP:127.0.0.1")
    folder.mkdir(exist_ok=True)
    shutil.copy(issued.certificate, folder / "tls.crt")
    shutil.copy(issued.key, folder / "tls.key")
    return folder


async def subject(port: int, trusted: ssl.SSLContext) -> str:
    """The name in the certificate that a new connection to the metrics gets."""
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusted)
    certificate = writer.get_extra_info("peercert")
    writer.close()
    await writer.wait_closed()
    return dict(pair for part in certificate["subject"] for pair in part)["commonName"]


async def test_metrics_are_served_over_https_with_a_certificate_that_may_be_renewed(
    ports, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metrics_certificate, "RELOAD_SECONDS", 0.01)
    folder = as_secret(authority, "first", tmp_path / "secret")
    trusted = ssl.create_default_context(cafile=str(authority.ca))
    async with asyncio.timeout(PATIENCE), serving(Metrics(), served, **ports, certificate=folder):
        assert await subject(ports["metrics_port"], trusted) == "first"
        url = f"https://127.0.0.1:{ports['metrics_port']}/metrics"
        async with aiohttp.ClientSession() as session, session.get(url, ssl=trusted) as answer:
            assert "qwen35_leading" in await answer.text()
        assert await get(ports["health_port"], "/healthz") == (200, "ok")
        with pytest.raises(aiohttp.ClientError):
            await get(ports["metrics_port"], "/metrics")
        other = as_secret(authority, "other", tmp_path / "other")
        for damaged in ("damaged", (other / "tls.crt").read_text()):  # the second one does not match the key
            (folder / "tls.crt").write_text(damaged)
            caplog.clear()
            while "The metrics keep their certificate" not in caplog.text:  # noqa: ASYNC110  # there is no event
                await asyncio.sleep(0.01)
            assert await subject(ports["metrics_port"], trusted) == "first"
        as_secret(authority, "second", folder)
        while await subject(ports["metrics_port"], trusted) != "second":  # noqa: ASYNC110  # there is no event
            await asyncio.sleep(0.01)


async def test_a_certificate_that_cannot_be_used_is_refused_by_the_name_of_its_option(ports, tmp_path: Path) -> None:
    with pytest.raises(SettingsRefused, match=r"--metrics-certificate .*tls\.crt and tls\.key"):
        async with serving(Metrics(), served, **ports, certificate=tmp_path):
            pytest.fail("it is not served")
