"""The scenarios that sweeps disturb. The test writes the trainer's reports; KubeRay and the pods are real.

An act ends only when KubeRay and the pods are done too: the status says that all nodes are there, or nothing is left.
"""

from tests.controlplane.sweep import Scenario, ScenarioRun


def create(run: ScenarioRun) -> None:
    run.apply()
    running(run, 1)


def suspend(run: ScenarioRun) -> None:
    attempt = run.newest
    run.edit(suspend=True)
    run.until(lambda: run.order, "the trainer is asked to stop")
    saved = {"uri": "/checkpoints/update-000007", "update": 7, "time": run.plane.now()}
    order_id = (run.order or {})["id"]
    run.report("Stopped", attempt=attempt, stopAcknowledged=order_id, update=7, checkpoint=saved)
    run.until_state("Suspended")
    run.until(lambda: not any(run.mine(kind) for kind in ("rayjobs", "rayclusters", "pods")), "nothing runs")


def suspended(run: ScenarioRun) -> None:
    create(run)
    suspend(run)


def resume(run: ScenarioRun) -> None:
    attempt = run.newest + 1
    run.edit(suspend=False)
    running(run, attempt)


def fail_and_restart(run: ScenarioRun) -> None:
    attempt = run.newest
    run.report("Failed", attempt=attempt, reason="NCCLError", message="lost a peer")
    run.end_job(attempt)
    running(run, attempt + 1)


def scale(run: ScenarioRun) -> None:
    run.edit(rollout={"nodes": 4})
    ready(run, rollout=4)
    run.edit(rollout={"nodes": 1})
    ready(run, rollout=1)


def protect(run: ScenarioRun) -> None:
    """From drains, and no more."""
    for budget, count in (("HeadAndTrain", 1), ("None", 0)):
        run.edit(disruptionBudget=budget)
        run.until(lambda count=count: len(run.mine("poddisruptionbudgets")) == count, f"disruptionBudget is {budget}")


def delete(run: ScenarioRun) -> None:
    run.delete()
    run.until(lambda: not any(run.picture().values()), "all is gone")


def create_and_delete(run: ScenarioRun) -> None:
    """Immediately, while it is being created."""
    run.apply()
    run.until_job(1)
    delete(run)


def running(run: ScenarioRun, attempt: int) -> None:
    run.until_job(attempt)
    for pool, count in (("head", 1), ("rollout", run.body["spec"]["rollout"]["nodes"]), ("train", 1)):
        run.until_pods(pool, count)
    run.report(attempt=attempt)
    run.until_condition("Ready", "True", "Running")
    ready(run, head=1, train=1)


def ready(run: ScenarioRun, **nodes: int) -> None:
    """The pods are there, and the status counts them."""
    for pool, count in nodes.items():
        run.until_pods(pool, count)

    def counted() -> bool:
        pools = {item["name"]: (item["ready"], item["desired"]) for item in run.status["pools"]}
        return all(pools[pool] == (count, count) for pool, count in nodes.items())

    run.until(counted, f"the status counts {nodes}")


LIFE = Scenario("life", (create, scale, suspend, resume, fail_and_restart, delete))
"""All acts, one after the other, of one training."""

SCENARIOS = (
    Scenario("create", (create,)),
    Scenario("suspend", (suspend,), create),
    Scenario("resume", (resume,), suspended),
    Scenario("fail_and_restart", (fail_and_restart,), create),
    Scenario("scale", (scale,), create),
    Scenario("protect", (protect,), create),
    Scenario("delete", (create_and_delete,)),
)
"""Each act alone, for sweeps that disturb one write at a time."""
