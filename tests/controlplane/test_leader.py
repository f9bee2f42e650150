"""Two operators: one acts, the other takes over, and nothing is done twice."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qwen35_operator.kube.kinds import LEASE
from qwen35_operator.kube.lease import DURATION
from tests.controlplane import operator_process
from tests.controlplane.operator_process import OperatorProcess
from tests.controlplane.story import Story
from tests.testbed.control_plane import ControlPlane


@pytest.fixture
def replicas(control_plane: ControlPlane, operator_rights: Path) -> Iterator[list[OperatorProcess]]:
    """Two, the leader first."""
    both = [operator_process.process(control_plane, operator_rights, name=f"operator-{one}") for one in "ab"]
    try:
        for one in both:
            one.start()
        wait(lambda: any(leads(one) for one in both), "one of the two leads")
        yield sorted(both, key=leads, reverse=True)
    finally:
        for one in both:
            one.stop()


def leads(operator: OperatorProcess) -> bool:
    return operator.metrics()["qwen35_leading"] == 1


def wait(holds: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until, f"never: {what}"
        time.sleep(0.1)


def writes(operator: OperatorProcess) -> float:
    """Changes that this replica has made to anything but the Lease."""
    changes = [
        value
        for name, value in operator.metrics().items()
        if name.startswith("qwen35_api_requests_total") and 'verb="GET"' not in name and '"leases"' not in name
    ]
    return sum(changes)


def test_only_the_leader_acts(control_plane: ControlPlane, replicas: list[OperatorProcess], namespace: str):
    leader, standby = replicas
    story = Story(control_plane, namespace).apply()
    story.until_pods("rollout", 2)
    story.report()
    story.until_condition("Ready", "True", "Running")
    story.edit(rollout={"nodes": 3})
    story.until_pods("rollout", 3)
    assert writes(leader) > 5
    assert writes(standby) == 0


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_the_other_takes_over(control_plane: ControlPlane, replicas: list[OperatorProcess], namespace: str, end: str):
    leader, standby = replicas
    first = Story(control_plane, namespace, "first").apply()
    first.until_job()
    jobs = {one["metadata"]["uid"] for one in first.mine("rayjobs")}

    began = time.monotonic()
    getattr(leader, end)()
    second = Story(control_plane, namespace, "second").apply()
    second.until_job()
    took = time.monotonic() - began
    print(json.dumps({"end": end, "seconds until the other acts": round(took, 1)}))
    # A leader that ends well releases its Lease: nobody waits until that is over.
    assert took < {"kill": 15, "stop": DURATION}[end], f"hand-over took {took:.1f} s"

    # What the first leader began goes on, and is not begun again.
    first.report()
    first.until_state("Running")
    assert {one["metadata"]["uid"] for one in first.mine("rayjobs")} == jobs
    assert [one["number"] for one in first.attempts] == [1]
    assert leads(standby)


def test_when_the_lease_is_deleted_there_are_never_two_leaders(
    control_plane: ControlPlane, replicas: list[OperatorProcess], namespace: str
):
    first = Story(control_plane, namespace, "first").apply()
    first.until_job()
    control_plane.api.request("DELETE", LEASE.path(operator_process.LEASE_NAMESPACE, operator_process.USER))
    deleted = time.monotonic()

    def leaders() -> int:
        # Between the end of one and the beginning of the next one there are seconds: two readings see no more than there are.
        count = sum(leads(one) for one in replicas)
        assert count <= 1
        return count

    wait(lambda: leaders() == 0, "the leader stops")
    stopped = time.monotonic() - deleted
    wait(lambda: leaders() == 1, "one of them leads again")
    took = time.monotonic() - deleted
    print(json.dumps({"seconds until it stopped": round(stopped, 1), "until one leads again": round(took, 1)}))
    assert took >= DURATION
    second = Story(control_plane, namespace, "second").apply()
    second.until_job()
    assert [one["number"] for one in first.attempts] == [1]


def test_a_leader_that_ends_by_a_signal_ends_well(
    control_plane: ControlPlane, replicas: list[OperatorProcess], namespace: str
):
    leader, _ = replicas
    supervisor = control_plane.processes.running[leader.name]
    leader.stop()
    assert supervisor.returncode == 0
    assert "Traceback" not in leader.log
