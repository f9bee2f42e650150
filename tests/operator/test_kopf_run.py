"""A run of kopf that ends or is stopped."""

import asyncio
import signal

import kopf
from kopf._core.reactor import running

from qwen35_operator import kopf_run
from qwen35_operator.kopf_run import KopfRun
from qwen35_operator.kube.list_pace import ListPace
from qwen35_operator.kube.trainings import TrainingWatch


async def test_an_event_that_arrives_when_its_run_has_been_stopped_is_not_applied(monkeypatch) -> None:
    """A thread of kopf may take longer to end than the operator waits."""

    async def operate(*_: object) -> None: ...

    monkeypatch.setattr(kopf_run, "_operate", operate)
    applied: list[dict] = []
    run = KopfRun(TrainingWatch(None), applied.append, ListPace(), pod_first=False)
    [handler] = run._handlers._watching.get_all_handlers()
    run.start()
    await handler.fn(event={"type": "ADDED"})
    await asyncio.sleep(0)
    await handler.fn(event={"type": "MODIFIED"})  # on its way
    await run.stop()
    await handler.fn(event={"type": "DELETED"})
    await asyncio.sleep(0)
    assert applied == [{"type": "ADDED"}]


async def test_a_kopf_that_does_not_end_after_an_error_does_not_kill_the_process(monkeypatch) -> None:
    """By default, it does so in its code 10 minutes after its tasks were cancelled."""
    kills: list[object] = []
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "call_later", lambda _, function, *arguments: kills.append((function, *arguments)))
    for chosen, count in ((kopf_run.settings(), 0), (kopf.OperatorSettings(), 1)):
        task = asyncio.create_task(running.ultimate_termination(settings=chosen, stop_flag=None))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        assert [signal.SIGKILL in kill for kill in kills] == [True] * count
