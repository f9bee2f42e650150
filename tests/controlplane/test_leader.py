"""Two operators: one acts, the other takes over, and nothing is done twice."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from qwen35_operator.kube.kinds import LEASE
from qwen35_operator.kube.lease import LEASE_SECONDS, RENEW_SECONDS
from tests.controlplane import operator_process
from tests.controlplane.live_training import LiveTraining
from tests.controlplane.operator_process import OperatorProcess
from tests.patience import PATIENCE
from tests.testbed.control_plane import ControlPlane


@pytest.fixture
def replicas(control_plane: ControlPlane, operator_rights: Path) -> Iterator[list[OperatorProcess]]:
    """Two, the leader first."""
    both = [operator_process.process(control_plane, operator_rights, name=f"operator-{item}") for item in "ab"]
    try:
        for item in both:
            item.start()
        wait(lambda: any(leads(item) for item in both), "one of the two leads")
        yield sorted(both, key=leads, reverse=True)
    finally:
        for item in both:
            item.stop()


def leads(operator: OperatorProcess) -> bool:
    return operator.metrics()["qwen35_leading"] == 1


def wait(holds: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < until, f"never: {what}"
        time.sleep(0.1)


def lease(plane: ControlPlane) -> dict[str, Any]:
    return dict(plane.api.get(LEASE.path(operator_process.LEASE_NAMESPACE, operator_process.USER)))


def until_renewed(plane: ControlPlane) -> float:
    """Waits for a renewal of the Lease. Returns when it had not come yet, a moment before."""
    request_times: list[float] = []

    def version() -> str:
        request_times.append(time.monotonic())
        return str(lease(plane)["metadata"]["resourceVersion"])

    before = version()
    wait(lambda: version() != before, "the leader renews its Lease")
    return request_times[-2]


def writes(operator: OperatorProcess) -> float:
    """Changes that this replica has made to anything but the Lease."""
    changes = [
        value
        for name, value in operator.metrics().items()
        if name.startswith("qwen35_api_requests_total") and 'verb="GET"' not in name and '"leases"' not in name
    ]
    return sum(changes)


@pytest.mark.soak
def test_only_the_leader_acts(control_plane: ControlPlane, replicas: list[OperatorProcess], namespace: str):
    leader, standby = replicas
    live_training = LiveTraining(control_plane, namespace).apply()
    live_training.until_pods("rollout", 2)
    live_training.report()
    live_training.until_condition("Ready", "True", "Running")
    live_training.edit(rollout={"nodes": 3})
    live_training.until_pods("rollout", 3)
    assert writes(leader) > 5
    assert writes(standby) == 0


@pytest.mark.quiet
def test_a_leader_that_ends_well_is_followed_immediately(
    control_plane: ControlPlane, replicas: list[OperatorProcess], namespace: str
):
    leader, standby = replicas
    with work_goes_on(control_plane, namespace):
        holder = lease(control_plane)["spec"].get("holderIdentity")
        supervisor = control_plane.processes.running[leader.name]
        leader.stop()
        ended = time.monotonic()
        assert supervisor.returncode == 0
        assert "Traceback" not in leader.log
        assert lease(control_plane)["spec"].get("holderIdentity") != holder, "it is released"
        wait(lambda: leads(standby), "the other leads")
        took = time.monotonic() - ended
        print(json.dumps({"seconds until the other leads, after an end": round(took, 1)}))
        # Nobody waits until it is over: the other sees it when it looks next, every RENEW_SECONDS.
        assert took < LEASE_SECONDS - RENEW_SECONDS


@pytest.mark.quiet
def test_a_killed_leader_is_followed_when_its_lease_is_over_and_not_before(
    control_plane: ControlPlane, replicas: list[OperatorProcess], namespace: str
):
    leader, standby = replicas
    with work_goes_on(control_plane, namespace):
        assert writes(leader) > 5
        assert writes(standby) == 0
        renewed = until_renewed(control_plane)
        leader.kill()
        ended = time.monotonic()
        wait(lambda: leads(standby), "the other leads")
        now = time.monotonic()
        print(json.dumps({"seconds until the other leads, after a kill": round(now - ended, 1)}))
        assert now - renewed >= LEASE_SECONDS
        assert now - ended < 2 * LEASE_SECONDS


@contextmanager
def work_goes_on(plane: ControlPlane, namespace: str) -> Iterator[None]:
    """The last leader continues the trainings that were started before, starts none of them again, and takes new ones."""
    first = LiveTraining(plane, namespace, "first").apply()
    first.until_job()
    jobs = {job["metadata"]["uid"] for job in first.mine("rayjobs")}
    yield
    second = LiveTraining(plane, namespace, "second").apply()
    second.until_job()
    first.report()
    first.until_state("Running")
    assert {job["metadata"]["uid"] for job in first.mine("rayjobs")} == jobs
    assert [attempt["number"] for attempt in first.attempts] == [1]


@pytest.mark.soak
def test_when_the_lease_is_deleted_there_are_never_two_leaders(
    control_plane: ControlPlane, replicas: list[OperatorProcess], namespace: str
):
    first = LiveTraining(control_plane, namespace, "first").apply()
    first.until_job()
    deleted = time.monotonic()
    control_plane.api.request("DELETE", LEASE.path(operator_process.LEASE_NAMESPACE, operator_process.USER))

    def leaders() -> int:
        # Between the end of one and the beginning of the next one there are seconds: two readings see no more than there are.
        count = sum(leads(item) for item in replicas)
        assert count <= 1
        return count

    wait(lambda: leaders() == 0, "the leader stops")
    stopped = time.monotonic() - deleted
    wait(lambda: leaders() == 1, "one of them leads again")
    took = time.monotonic() - deleted
    print(json.dumps({"seconds until it stopped": round(stopped, 1), "until one leads again": round(took, 1)}))
    assert took >= LEASE_SECONDS
    second = LiveTraining(control_plane, namespace, "second").apply()
    second.until_job()
    assert [attempt["number"] for attempt in first.attempts] == [1]
