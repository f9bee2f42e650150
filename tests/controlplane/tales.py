"""The stories that disturbances are tried on. The trainer's words are written by the test; KubeRay and the pods are real."""

import time

from tests.controlplane.sweep import Tale, Telling


def create(telling: Telling) -> None:
    telling.apply()
    running(telling, 1)


def suspend(telling: Telling) -> None:
    telling.edit(suspend=True)
    telling.until(lambda: telling.order, "the trainer is asked to stop")
    saved = {"uri": "/checkpoints/update-000007", "update": 7, "time": time.time()}
    asked = (telling.order or {})["id"]
    telling.report("Stopped", stopAcknowledged=asked, update=7, checkpoint=saved)
    telling.until_state("Suspended")


def suspended(telling: Telling) -> None:
    create(telling)
    suspend(telling)


def resume(telling: Telling) -> None:
    telling.edit(suspend=False)
    running(telling, 2)


def fail_and_restart(telling: Telling) -> None:
    telling.report("Failed", reason="NCCLError", message="lost a peer")
    telling.end_job(1)
    running(telling, 2)


def scale(telling: Telling) -> None:
    telling.edit(rollout={"nodes": 4})
    telling.until_pods("rollout", 4)
    telling.edit(rollout={"nodes": 1})
    telling.until_pods("rollout", 1)


def delete(telling: Telling) -> None:
    """At once, while it is being created."""
    telling.apply()
    telling.until_job(1)
    telling.delete()
    telling.until(lambda: not any(telling.picture().values()), "all is gone")


def running(telling: Telling, attempt: int) -> None:
    telling.until_job(attempt)
    for pool, count in (("head", 1), ("rollout", 2), ("train", 1)):
        telling.until_pods(pool, count)
    telling.report(attempt=attempt)
    telling.until_state("Running")


TALES = (
    Tale("create", create),
    Tale("suspend", suspend, create),
    Tale("resume", resume, suspended),
    Tale("fail_and_restart", fail_and_restart, create),
    Tale("scale", scale, create),
    Tale("delete", delete),
)
