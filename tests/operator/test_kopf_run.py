"""A run of kopf that is stopped."""

import asyncio

from qwen35_operator import kopf_run
from qwen35_operator.kopf_run import KopfRun
from qwen35_operator.kube.trainings import TrainingWatch


async def test_an_event_that_arrives_when_its_run_has_been_stopped_is_not_applied(monkeypatch) -> None:
    """A thread of kopf may take longer to end than the operator waits."""

    async def operate(*_: object) -> None: ...

    monkeypatch.setattr(kopf_run, "_operate", operate)
    applied: list[dict] = []
    run = KopfRun(TrainingWatch(None), applied.append, pod_first=False)
    [handler] = run._handlers._watching.get_all_handlers()
    run.start()
    await handler.fn(event={"type": "ADDED"})
    await asyncio.sleep(0)
    await handler.fn(event={"type": "MODIFIED"})  # on its way
    await run.stop()
    await handler.fn(event={"type": "DELETED"})
    await asyncio.sleep(0)
    assert applied == [{"type": "ADDED"}]
