"""What Prometheus and the kubelet are answered."""

import socket

import aiohttp
import pytest

from qwen35_operator.metrics import Metrics
from qwen35_operator.probes import serving
from qwen35_trainer.manifest import Problem
from tests.testbed.processes import free_ports


@pytest.fixture
def ports() -> dict[str, int]:
    return dict(zip(("metrics_port", "health_port"), free_ports(2), strict=True))


async def get(port: int, path: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}") as answer:
        return answer.status, await answer.text()


async def test_it_is_ready_when_everything_has_been_seen_and_says_what_has_not(ports) -> None:
    unseen = [Problem("pods", "not listed yet.", "Wait."), Problem("rayjobs.ray.io", "there is none.", "Install it.")]
    async with serving(Metrics(), lambda: unseen, **ports):
        assert await get(ports["health_port"], "/healthz") == (200, "ok")
        message = "pods: not listed yet. Wait.\nrayjobs.ray.io: there is none. Install it."
        assert await get(ports["health_port"], "/readyz") == (503, message)
        before, unseen = unseen, []
        assert await get(ports["health_port"], "/readyz") == (200, "ok")
        unseen = before[1:]
        assert (await get(ports["health_port"], "/readyz"))[0] == 503


async def test_metrics_are_served_on_their_own_port(ports) -> None:
    metrics = Metrics()
    metrics.restarted("Pod")
    async with serving(metrics, list, **ports):
        status, text = await get(ports["metrics_port"], "/metrics")
        assert status == 200
        assert 'qwen35_watch_restarts_total{kind="Pod"} 1.0' in text
        assert (await get(ports["health_port"], "/metrics"))[0] == 404
        assert (await get(ports["metrics_port"], "/readyz"))[0] == 404


@pytest.mark.parametrize("absent", ["metrics_port", "health_port"])
async def test_port_0_serves_nothing(ports, absent) -> None:
    async with serving(Metrics(), list, **{**ports, absent: 0}):
        with pytest.raises(aiohttp.ClientConnectionError):
            await get(ports[absent], "/metrics")
        (other,) = set(ports) - {absent}
        assert (await get(ports[other], "/metrics" if other == "metrics_port" else "/healthz"))[0] == 200


async def test_a_port_that_is_taken_is_an_error_and_the_other_is_given_back(ports) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", ports["health_port"]))
        taken.listen()
        with pytest.raises(OSError, match=str(ports["health_port"])):
            async with serving(Metrics(), list, **ports):
                pytest.fail("it is not served")
    async with serving(Metrics(), list, **ports):
        assert (await get(ports["metrics_port"], "/metrics"))[0] == 200
