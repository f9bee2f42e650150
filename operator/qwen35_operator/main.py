"""Runs the parts of one operator process: kopf, the watches, the work queue, the leader election and the workers.

    kopf ──► trainings ─┐                        ┌─► worker ─► reconcile
    watches ─► stores ──┴─► queue ──► election ──┼─► worker ─► reconcile
                                     (leader)    └─► …

A process that does not lead (a standby) does everything except queue and reconcile, so that it can begin immediately when it
becomes the leader. After SIGTERM the workers finish the reconciles in progress and end. Then the Lease is released, and
then the watches and kopf end.
"""

import asyncio
import gc
import os
import resource
import signal
import time
from collections.abc import Coroutine
from contextlib import suppress

from qwen35_operator import handlers, logs
from qwen35_operator.kube.client import connect
from qwen35_operator.kube.lease import Election
from qwen35_operator.kube.list_pace import ListPace
from qwen35_operator.kube.object_cache import ObjectCache
from qwen35_operator.kube.trainings import Trainings
from qwen35_operator.logs import LogFormat
from qwen35_operator.metrics import Metrics
from qwen35_operator.metrics_access import MetricsAccess
from qwen35_operator.operator_settings import OperatorSettings
from qwen35_operator.probes import Obstacles, serving
from qwen35_operator.reconcile.first_sweep import first_sweep
from qwen35_operator.reconcile.reconciler import Reconciler
from qwen35_operator.reconcile_workers import ReconcileWorkers


def run(
    settings: OperatorSettings, kubeconfig: str | None, log_format: LogFormat = "text", *, verbose: bool = False
) -> None:
    """Run the operator until SIGTERM or SIGINT.

    kubeconfig: path of the file; None for that of KUBECONFIG, else the pod's credentials, else ~/.kube/config. verbose:
    whether to log debug messages too. Raises OSError if a port is taken, and SettingsRefused if there are no valid
    credentials, or if the certificate of the metrics cannot be used.
    """
    logs.begin(log_format, verbose=verbose)
    allow_open_files()
    if kubeconfig is not None:
        os.environ["KUBECONFIG"] = kubeconfig  # kopf's login reads it
    exempt_imports_from_collection()
    asyncio.run(_until_signal(operate(settings, kubeconfig)))


def allow_open_files() -> None:
    """Raise this process's limit of open files as far as it may: each watched namespace needs about 14 of them.

    The usual limit of 1024 would be reached at about 70 namespaces.
    """
    _, maximum = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError):  # macOS accepts less than it reports
        resource.setrlimit(resource.RLIMIT_NOFILE, (maximum, maximum))


def exempt_imports_from_collection() -> None:
    """Exempt all present objects, which are those of the imported modules, from garbage collection.

    They live as long as the process, and are most of its objects: with them, each full collection would hold up all reconciles for 50 to
    135 ms (docs/benchmarks.md, While a tenant attacks).
    """
    gc.collect()
    gc.freeze()


async def _until_signal(operating: Coroutine[None, None, None]) -> None:
    loop = asyncio.get_running_loop()
    task = loop.create_task(operating)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()


async def operate(settings: OperatorSettings, kubeconfig: str | None) -> None:
    """Run all parts of the operator, until cancelled. Raises the exceptions that `run` raises."""
    metrics = Metrics()
    client = await connect(kubeconfig, metrics.requested)
    trainings, workers = Trainings(settings.namespaces), ReconcileWorkers(metrics)

    def enqueue_all(namespace: str | None) -> None:
        for key in trainings.by_urgency():
            if namespace in (None, key[0]):
                workers.add_behind(key)

    pace = ListPace(lambda: election.holds, lambda: election.is_standby)
    cache = ObjectCache(settings.namespaces, workers.add, metrics.restarted, enqueue_all, pace)
    metrics.queued.set_function(lambda: len(workers))
    metrics.count(trainings.states)

    def obstacles() -> Obstacles:
        watched = settings.namespaces or (None,)
        return {namespace: [*cache.incomplete(namespace), *trainings.obstacles(namespace)] for namespace in watched}

    metrics.time_watches(lambda: cache.silent_seconds() | trainings.silent_seconds())
    metrics.watch_namespaces(lambda: {namespace: not problems for namespace, problems in obstacles().items()})

    async def lead() -> None:
        await cache.settled()
        reconciler = Reconciler(
            settings, client, cache, trainings, workers.progressed, election.may_write, election.known_version
        )
        sweep = first_sweep(trainings, cache.stores, election.known_version)
        await workers.run(reconciler, settings.workers, sweep)

    election = Election(client, settings.lease_namespace, settings.lease_name, settings.identity, lead, time.monotonic)
    metrics.leading.set_function(lambda: election.leading)
    try:
        async with serving(
            metrics,
            obstacles,
            metrics_port=settings.metrics_port,
            health_port=settings.health_port,
            access=MetricsAccess(client) if settings.metrics_authentication else None,
            certificate=settings.metrics_certificate,
        ):
            await _run_together(
                election.run(),
                cache.run(client),
                handlers.follow(kubeconfig, client, trainings, workers.add, pace),
                handlers.forget_deleted(client, settings.namespaces, trainings),
            )
    finally:
        await client.close()


async def _run_together(*parts: Coroutine[None, None, None]) -> None:
    """Run all parts until one of them ends or this function is cancelled, then end the others.

    The parts are ended in the order of the arguments, because an earlier part may need the later parts until it has
    ended. Raises the exception of the part that ended first, if any.
    """
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
