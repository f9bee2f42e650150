"""The link through ConfigMaps, against a server that answers, misbehaves and goes away."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from qwen35_trainer.contract import Control, LiveSettings, StopOrder
from qwen35_trainer.runtime.link.operator_link import LinkDown
from tests.patience import PATIENCE

STOP = Control(attempt=1, stop=StopOrder(id="1-Suspend", reason="Suspend", time=5.0))
LIVE = Control(attempt=1, live=LiveSettings(checkpointEveryUpdates=5, checkpointKeep=2, evaluationEveryUpdates=0))


@asynccontextmanager
async def listening(pod) -> AsyncIterator[asyncio.Queue[Control]]:
    """The orders that a link brings, while the body runs."""
    link, brought = pod.link(), asyncio.Queue()

    async def listen() -> None:
        async for control in link.orders():
            brought.put_nowait(control)

    task = asyncio.create_task(listen())
    try:
        yield brought
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await link.close()


async def brought_by(orders: asyncio.Queue[Control]) -> Control:
    return await asyncio.wait_for(orders.get(), PATIENCE)


async def test_a_report_is_one_key_of_a_merge_patch(pod, report):
    link = pod.link()
    await link.report(report)
    await link.close()
    assert pod.server.patches == [{"data": {"progress.json": report.text()}}]


async def test_a_report_that_is_not_taken_says_why(pod, report):
    link = pod.link()
    pod.server.broken = 1
    with pytest.raises(LinkDown, match="ConfigMap demo-progress was not written: 500: etcd is away"):
        await link.report(report)
    await link.report(report)
    await link.close()
    assert len(pod.server.patches) == 1


async def test_the_token_is_read_again_because_it_is_replaced(pod, report):
    link = pod.link()
    await link.report(report)
    pod.server.token = "second"
    with pytest.raises(LinkDown, match="401: Unauthorized"):
        await link.report(report)
    (pod.account / "token").write_text("second\n")
    await link.report(report)
    await link.close()
    assert len(pod.server.patches) == 2


async def test_a_server_of_another_authority_gets_no_token(pod, report, tmp_path):
    from tests.testbed.certificates import Authority

    (pod.account / "ca.crt").write_text(Authority.create(tmp_path / "other").ca.read_text())
    link = pod.link()
    with pytest.raises(LinkDown, match=r"(?i)certificate verify failed"):
        await link.report(report)
    await link.close()
    assert pod.server.calls == []


async def test_an_absent_server_is_distinguished_from_a_bug(pod, report):
    pod.url = "https://127.0.0.1:9"
    link = pod.link()
    with pytest.raises(LinkDown, match="Cannot connect"):
        await link.report(report)
    await link.close()


async def test_an_order_is_brought_as_it_is_and_then_at_each_change(pod):
    pod.server.ask(LIVE)
    async with listening(pod) as orders:
        assert await brought_by(orders) == LIVE
        await pod.server.until(lambda server: server.watching)
        pod.server.ask(STOP)
        assert await brought_by(orders) == STOP


async def test_an_order_that_comes_into_being_later_is_brought(pod):
    async with listening(pod) as orders:
        await pod.server.until(lambda server: server.watching)
        pod.server.ask(STOP)
        assert await brought_by(orders) == STOP


async def test_a_cut_watch_misses_nothing_and_repeats_nothing(pod):
    pod.server.ask(LIVE)
    async with listening(pod) as orders:
        assert await brought_by(orders) == LIVE
        await pod.server.until(lambda server: server.watching)
        pod.server.cut()
        await pod.server.until(lambda server: not server.watching)
        pod.server.ask(STOP)
        assert await brought_by(orders) == STOP
        assert orders.empty()


async def test_a_version_that_is_too_old_is_followed_by_a_list(pod):
    pod.server.gone = 1
    async with listening(pod) as orders:
        await pod.server.until(lambda server: server.watching)
        assert len(pod.server.calls) == 4  # list, watch that is gone, list, watch
        pod.server.ask(STOP)
        assert await brought_by(orders) == STOP


async def test_a_server_that_is_broken_for_a_while_is_asked_again(pod):
    pod.server.ask(STOP)
    pod.server.broken = 3
    async with listening(pod) as orders:
        assert await brought_by(orders) == STOP
    assert pod.server.calls[:4] == ["GET"] * 4


@pytest.mark.parametrize("garbage", ["{", "[]", json.dumps({"attempt": 0}), ""])
async def test_an_order_that_cannot_be_read_is_passed_over(pod, garbage):
    pod.server.ask(garbage)
    async with listening(pod) as orders:
        await pod.server.until(lambda server: server.watching)
        pod.server.ask(STOP)
        assert await brought_by(orders) == STOP


async def test_an_order_of_a_thousand_leaving_pods_fits(pod):
    many = Control(attempt=1, leaving=tuple(f"demo-1-rollout-worker-{number:040d}" for number in range(1024)))
    async with listening(pod) as orders:
        await pod.server.until(lambda server: server.watching)
        pod.server.ask(many)
        assert await brought_by(orders) == many


async def test_a_history_is_binary_data_of_its_own_object(pod):
    link = pod.link()
    await link.history(b"\x1f\x8b packed")
    await link.close()
    assert pod.server.histories == [{"binaryData": {"history.json.gz": "H4sgcGFja2Vk"}}]
    assert pod.server.patches == []
