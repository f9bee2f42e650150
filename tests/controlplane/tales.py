"""The stories that disturbances are tried on. The trainer's words are written by the test; KubeRay and the pods are real.

An act ends only when KubeRay and the pods are done too: the status says that all nodes are there, or nothing is left.
"""

import time

from tests.controlplane.sweep import Tale, Telling


def create(telling: Telling) -> None:
    telling.apply()
    running(telling, 1)


def suspend(telling: Telling) -> None:
    attempt = telling.newest
    telling.edit(suspend=True)
    telling.until(lambda: telling.order, "the trainer is asked to stop")
    saved = {"uri": "/checkpoints/update-000007", "update": 7, "time": time.time()}
    asked = (telling.order or {})["id"]
    telling.report("Stopped", attempt=attempt, stopAcknowledged=asked, update=7, checkpoint=saved)
    telling.until_state("Suspended")
    telling.until(lambda: not any(telling.mine(kind) for kind in ("rayjobs", "rayclusters", "pods")), "nothing runs")


def suspended(telling: Telling) -> None:
    create(telling)
    suspend(telling)


def resume(telling: Telling) -> None:
    attempt = telling.newest + 1
    telling.edit(suspend=False)
    running(telling, attempt)


def fail_and_restart(telling: Telling) -> None:
    attempt = telling.newest
    telling.report("Failed", attempt=attempt, reason="NCCLError", message="lost a peer")
    telling.end_job(attempt)
    running(telling, attempt + 1)


def scale(telling: Telling) -> None:
    telling.edit(rollout={"nodes": 4})
    ready(telling, rollout=4)
    telling.edit(rollout={"nodes": 1})
    ready(telling, rollout=1)


def delete(telling: Telling) -> None:
    telling.delete()
    telling.until(lambda: not any(telling.picture().values()), "all is gone")


def create_and_delete(telling: Telling) -> None:
    """At once, while it is being created."""
    telling.apply()
    telling.until_job(1)
    delete(telling)


def running(telling: Telling, attempt: int) -> None:
    telling.until_job(attempt)
    for pool, count in (("head", 1), ("rollout", telling.body["spec"]["rollout"]["nodes"]), ("train", 1)):
        telling.until_pods(pool, count)
    telling.report(attempt=attempt)
    telling.until_condition("Ready", "True", "Running")
    ready(telling, head=1, train=1)


def ready(telling: Telling, **nodes: int) -> None:
    """The pods are there, and the status counts them."""
    for pool, count in nodes.items():
        telling.until_pods(pool, count)

    def counted() -> bool:
        pools = {one["name"]: (one["ready"], one["desired"]) for one in telling.status["pools"]}
        return all(pools[pool] == (count, count) for pool, count in nodes.items())

    telling.until(counted, f"the status counts {nodes}")


LIFE = Tale("life", (create, scale, suspend, resume, fail_and_restart, delete))
"""All acts, one after the other, of one training."""

TALES = (
    Tale("create", (create,)),
    Tale("suspend", (suspend,), create),
    Tale("resume", (resume,), suspended),
    Tale("fail_and_restart", (fail_and_restart,), create),
    Tale("scale", (scale,), create),
    Tale("delete", (create_and_delete,)),
)
"""Each act alone, for sweeps that disturb one write at a time."""
