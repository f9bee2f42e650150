"""One operator process.

    kopf ──► trainings ─┐                        ┌─► worker ─► reconcile
    watches ─► stores ──┴─► queue ──► election ──┼─► worker ─► reconcile
                                     (leader)    └─► …

A standby does all of it but work: when it leads, it has only to begin. SIGTERM ends the workers when they have done what
they have in hand, then the Lease is released, then the watches and kopf end.
"""

import asyncio
import os
import signal
import time
from collections.abc import Coroutine

from qwen35_operator import handlers, logs
from qwen35_operator.kube.client import connect
from qwen35_operator.kube.cluster import Cluster
from qwen35_operator.kube.lease import Election
from qwen35_operator.kube.trainings import Trainings
from qwen35_operator.logs import LogFormat
from qwen35_operator.metrics import Metrics
from qwen35_operator.probes import serving
from qwen35_operator.reconcile.reconciler import Reconciler
from qwen35_operator.settings import Settings
from qwen35_operator.work import Work
from qwen35_trainer.spec import Problem


def run(settings: Settings, kubeconfig: str | None, log_format: LogFormat = "text", *, verbose: bool = False) -> None:
    """Until SIGTERM or SIGINT. Raises OSError for a port that is taken, and SettingsRefused without credentials."""
    logs.begin(log_format, verbose=verbose)
    if kubeconfig is not None:
        os.environ["KUBECONFIG"] = kubeconfig  # where kopf's own login looks
    asyncio.run(_until_signal(operate(settings, kubeconfig)))


async def _until_signal(operating: Coroutine[None, None, None]) -> None:
    loop = asyncio.get_running_loop()
    task = loop.create_task(operating)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()


async def operate(settings: Settings, kubeconfig: str | None) -> None:
    """Everything that one process does."""
    metrics = Metrics()
    client = await connect(kubeconfig, metrics.requested)
    trainings, work = Trainings(), Work(metrics)

    def all_again() -> None:
        for key in trainings:
            work.add(key)

    cluster = Cluster(settings.namespaces, work.add, metrics.restarted, all_again)
    metrics.queued.set_function(lambda: len(work))
    metrics.count(trainings.states)
    reconciler = Reconciler(settings, client, cluster, trainings, work.progressed)

    def unseen() -> list[Problem]:
        return [*cluster.unseen(), *([] if trainings.problem is None else [trainings.problem])]

    async def lead() -> None:
        await cluster.settled()
        all_again()
        await work.run(reconciler, settings.workers)

    election = Election(client, settings.lease_namespace, settings.lease_name, settings.identity, lead, time.monotonic)
    metrics.leading.set_function(lambda: election.leading)
    ports = {"metrics_port": settings.metrics_port, "health_port": settings.health_port}
    try:
        async with serving(metrics, unseen, **ports):
            await _together(
                election.run(),
                cluster.run(client),
                handlers.follow(settings, kubeconfig, client, trainings, work.add),
            )
    finally:
        await client.close()


async def _together(*parts: Coroutine[None, None, None]) -> None:
    """All parts, until one ends or this is cancelled. They end in their order: what comes first may need the rest."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
            await asyncio.wait({task})
    for task in done:
        if not task.cancelled():
            task.result()
