"""Back-offs, grace periods, deadlines and hand-overs of minutes: exact, because the time is virtual."""

from collections.abc import Callable
from typing import Any

import pytest

from qwen35_operator.kube.lease import LEASE_SECONDS, RENEW_SECONDS
from qwen35_operator.reconcile.leftovers import POLL_SECONDS
from tests.controlplane.live_training import LiveTraining
from tests.controlplane.story_place import StoryPlace
from tests.virtual.line import VirtualLine
from tests.virtual.operators import VirtualOperator
from tests.virtual.plane import VirtualPlane

pytestmark = pytest.mark.worlds("memory", only=True)

QUEUE = {"kueue.x-k8s.io/queue-name": "rl"}
SLACK = 2.0
"""Seconds in which what is due has happened: times are whole seconds, and every step of the cluster takes a moment."""
LONG = 300.0
"""Seconds. A Lease is renewed every two seconds, which makes hours cost real time."""

UPDATE = 20.0
"""Seconds of an update."""


@pytest.fixture
def plane(world: StoryPlace) -> VirtualPlane:
    assert isinstance(world.plane, VirtualPlane)
    return world.plane


def begin(live_training: LiveTraining, labels: dict[str, str] | None = None, **sections: Any) -> LiveTraining:
    """A training that runs."""
    live_training.apply(labels=labels, **sections)
    live_training.until_pods("train", 1)
    live_training.report()
    live_training.until_condition("Ready", "True", "Running")
    return live_training


def fail(live_training: LiveTraining, attempt: int) -> float:
    """The attempt fails. Returns when the operator recorded it."""
    live_training.report("Failed", attempt=attempt, reason="WorkerLost", message="rank 3 is gone")
    live_training.until(lambda: live_training.attempts[-1]["outcome"] == "Failed", "the failure is recorded")
    return live_training.plane.monotonic()


def test_the_next_attempt_starts_when_the_backoff_is_over_and_each_backoff_is_twice_as_long(
    live_training: LiveTraining, plane: VirtualPlane
):
    begin(live_training, failurePolicy={"maxRestarts": 3, "backoffSeconds": 60})
    for attempt, seconds in ((1, 60), (2, 120), (3, 240)):
        failed = fail(live_training, attempt)
        plane.wait_until(failed + seconds - SLACK)
        assert live_training.job(attempt + 1) is None
        plane.wait_until(failed + seconds + SLACK)
        assert live_training.job(attempt + 1) is not None
    fail(live_training, 4)
    live_training.until_condition("Failed", "True", "RestartsExhausted")


def test_a_silent_trainer_gets_all_of_its_grace(live_training: LiveTraining, plane: VirtualPlane):
    begin(live_training, checkpoint={"graceSeconds": 300})
    requested = plane.monotonic()
    live_training.edit(suspend=True)
    plane.wait_until(requested + LONG - SLACK)
    assert live_training.mine("rayjobs")
    assert live_training.state == "Suspending"
    plane.wait_until(requested + LONG + SLACK)
    assert live_training.mine("rayjobs") == []
    assert live_training.state == "Suspended"


def test_the_children_stay_until_their_time_to_live_is_over(live_training: LiveTraining, plane: VirtualPlane):
    begin(live_training, cleanupSecondsAfterFinished=int(LONG))
    live_training.report("Succeeded", message="enough")
    live_training.until_state("Succeeded")
    ended = plane.monotonic()
    plane.wait_until(ended + LONG - SLACK)
    assert live_training.mine("configmaps")
    plane.wait_until(ended + LONG + SLACK)
    assert live_training.mine("configmaps") == []


def test_a_deadline_counts_both_attempts_and_not_the_time_between_them(
    live_training: LiveTraining, plane: VirtualPlane
):
    begin(live_training, activeDeadlineSeconds=int(LONG), checkpoint={"graceSeconds": 1})
    started = plane.monotonic()
    plane.wait(LONG / 2)
    live_training.edit(suspend=True)
    live_training.until_state("Suspended")
    first = plane.monotonic() - started
    plane.wait(LONG)
    live_training.edit(suspend=False)
    live_training.until_job(2)
    live_training.report(attempt=2)
    resumed = plane.monotonic()
    plane.wait_until(resumed + LONG - first - 3 * SLACK)
    assert live_training.state in ("Starting", "Running")
    plane.wait_until(resumed + LONG - first + 3 * SLACK)
    assert live_training.condition("Failed") == ("True", "DeadlineExceeded")


def test_a_stall_is_twenty_times_an_update_and_not_nineteen_times(live_training: LiveTraining, plane: VirtualPlane):
    begin(live_training, failurePolicy={"stallFactor": 20, "maxRestarts": 1, "backoffSeconds": 60})
    published = plane.now()
    for updates in (1, 10, 19):
        plane.wait(published + updates * UPDATE - plane.now())
        live_training.report(update=2, versionTime=published, versionSeconds=UPDATE)
        plane.wait(SLACK)
        assert live_training.state == "Running"
    plane.wait(published + 20 * UPDATE + SLACK - plane.now())
    live_training.until(lambda: live_training.first["outcome"] == "Failed", "it is a stall")
    assert live_training.first["reason"] == "Stalled"


def test_an_api_server_that_is_away_for_longer_than_a_stall_ends_no_attempt(
    live_training: LiveTraining, operator: VirtualOperator, plane: VirtualPlane
):
    """No report can arrive meanwhile. The trainer reports again soon after."""
    limit = 5 * UPDATE
    begin(live_training, failurePolicy={"stallFactor": 5, "maxRestarts": 1, "backoffSeconds": 60})
    plane.wait(SLACK)
    live_training.report(update=2, versionTime=plane.now(), versionSeconds=UPDATE)
    plane.wait(SLACK)
    operator.transport.away = True
    plane.wait(2 * limit)
    operator.transport.away = False
    plane.wait(limit / 2)
    assert live_training.state == "Running"
    live_training.report(update=3, versionTime=plane.now(), versionSeconds=UPDATE)
    plane.wait(limit - SLACK)
    assert [item["outcome"] for item in live_training.attempts] == ["Running"]
    plane.wait(2 * SLACK)
    assert live_training.first["reason"] == "Stalled"


def lose_pods(live_training: LiveTraining, plane: VirtualPlane) -> float:
    """Delete the RayJob while the kubelets are away. Returns when its pods are being deleted, on `plane.monotonic`."""
    plane.api.request("DELETE", live_training.path("rayjobs", "demo-1"))
    live_training.until(lambda: not live_training.pods("train"), "its pods are being deleted")
    return plane.monotonic()


def nodes_of_train_pods(live_training: LiveTraining, plane: VirtualPlane) -> set[str]:
    pods = plane.api.get(live_training.path("pods", None))["items"]
    return {
        pod["spec"]["nodeName"]
        for pod in pods
        if pod["metadata"]["labels"].get("rl.qwen35.io/pool") in ("train", "head")
    }


def taint(plane: VirtualPlane, node: str) -> None:
    path = f"/api/v1/nodes/{node}"
    body = plane.api.get(path)
    body.setdefault("spec", {})["taints"] = [
        {"key": "node.kubernetes.io/out-of-service", "value": "nodeshutdown", "effect": "NoExecute"}
    ]
    plane.api.request("PUT", path, body)


PROOFS: dict[str, Callable[[LiveTraining, VirtualPlane], None]] = {
    "their nodes are deleted": lambda live, plane: [
        plane.api.request("DELETE", f"/api/v1/nodes/{node}") for node in nodes_of_train_pods(live, plane)
    ],
    "their nodes are out of service": lambda live, plane: [
        taint(plane, node) for node in nodes_of_train_pods(live, plane)
    ],
    "the user says so": lambda live, plane: live.patch(
        live.path("qwen35trainings", "demo"), {"metadata": {"annotations": {"rl.qwen35.io/force-start": "2"}}}
    ),
}


@pytest.mark.parametrize("proof", PROOFS)
def test_pods_on_nodes_that_do_not_answer_hold_up_the_next_attempt_until_there_is_a_proof(
    live_training: LiveTraining, operator: VirtualOperator, plane: VirtualPlane, proof: str
):
    begin(live_training)
    with plane.kubelets_away():
        lost = lose_pods(live_training, plane)
        plane.wait_until(lost + LONG)
        assert live_training.job(2) is None
        assert live_training.condition("Reconciling") == ("True", "PodsNotEnded")
        assert live_training.condition("Degraded") == ("True", "PodsNotEnded")
        assert "force-start=2" in live_training.whole_condition("Degraded")["message"]
        PROOFS[proof](live_training, plane)
        plane.wait(POLL_SECONDS + SLACK)
        assert live_training.job(2) is not None
    assert operator.refused_requests() == {}


def test_pods_that_end_at_last_hold_up_nothing_any_more(live_training: LiveTraining, plane: VirtualPlane):
    begin(live_training)
    with plane.kubelets_away():
        plane.wait_until(lose_pods(live_training, plane) + LONG)
        assert live_training.job(2) is None
    live_training.until_job(2)


def test_six_preemptions_keep_the_attempt_and_cost_no_restart(live_training: LiveTraining, plane: VirtualPlane):
    begin(live_training, QUEUE, failurePolicy={"maxRestarts": 5, "backoffSeconds": 1})
    for update in range(2, 8):
        live_training.hold_in_queue(suspended=True)
        live_training.until_state("Queued")
        live_training.until(lambda: not live_training.mine("pods"), "its pods are gone")
        plane.wait(LONG / 4)
        live_training.hold_in_queue(suspended=False)
        live_training.until_pods("train", 1)
        live_training.report(update=update, version=update, versionTime=plane.now(), versionSeconds=1.0)
        live_training.until_state("Running")
    assert [(item["number"], item["outcome"]) for item in live_training.attempts] == [(1, "Running")]
    assert live_training.restarts == 0


def test_what_happens_while_the_api_server_is_away_is_learnt_from_a_new_list(
    live_training: LiveTraining, operator: VirtualOperator, plane: VirtualPlane
):
    """The watches cannot continue where they were cut: the API server has forgotten the changes since."""
    begin(live_training)
    operator.transport.away = True
    plane.wait(20.0)
    pods = live_training.pods("rollout")
    plane.api.request("DELETE", live_training.path("pods", pods[0]))
    plane.api.request("DELETE", live_training.path("configmaps", "demo-control"))
    plane.wait(90.0)
    plane.server.objects.compact()
    operator.transport.away = False
    live_training.until(lambda: live_training.find("configmaps", "demo-control"), "the child is made again")
    live_training.until_condition("Ready", "True", "Running")
    assert [item["outcome"] for item in live_training.attempts] == ["Running"]


def test_a_killed_leader_is_followed_when_its_lease_is_over_and_not_before(world: StoryPlace, namespace: str):
    assert world.operators is not None
    line = VirtualLine(world.operators.plane.loop)
    first, second = world.operators.operator(disturber=line), world.operators.operator()
    plane = world.operators.plane
    first.start()
    live_training = LiveTraining(plane, namespace)
    live_training.until(lambda: leads(first), "the first leads")
    second.start()
    begin(live_training)
    killed = plane.monotonic()
    line.die()
    live_training.until(lambda: leads(second), "the second leads")
    took = plane.monotonic() - killed
    # The last renewal came up to RENEW_SECONDS before, and the second looks every RENEW_SECONDS.
    assert LEASE_SECONDS - RENEW_SECONDS <= took <= LEASE_SECONDS + 2 * RENEW_SECONDS
    live_training.edit(rollout={"nodes": 3})
    live_training.until_pods("rollout", 3)
    assert [item["number"] for item in live_training.attempts] == [1]


def test_a_leader_that_ends_well_is_followed_when_the_next_one_looks(world: StoryPlace, namespace: str):
    assert world.operators is not None
    first, second = world.operators.operator(), world.operators.operator()
    plane = world.operators.plane
    first.start()
    live_training = LiveTraining(plane, namespace)
    live_training.until(lambda: leads(first), "the first leads")
    second.start()
    begin(live_training)
    ended = plane.monotonic()
    first.stop()
    live_training.until(lambda: leads(second), "the second leads")
    assert plane.monotonic() - ended <= RENEW_SECONDS + SLACK


def leads(operator: VirtualOperator) -> bool:
    return operator.metrics().get("qwen35_leading") == 1
