"""What the operator is not permitted to do: a condition, the probe or the log names it, and it continues once it is permitted."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.controlplane import operator_process
from tests.controlplane.cases import first_on_both
from tests.controlplane.live_training import LiveTraining
from tests.controlplane.operator_process import OperatorProcess
from tests.controlplane.story_place import StoryPlace
from tests.testbed.control_plane import ControlPlane
from tests.virtual.operators import VirtualOperator

pytestmark = pytest.mark.worlds("memory")

type Limited = tuple[OperatorProcess | VirtualOperator, Callable[[], None]]
"""An operator without some of its rights, and a function that grants all of them."""


@pytest.fixture
def live_training(world: StoryPlace, namespace: str) -> LiveTraining:
    """Of an operator that the test itself starts."""
    return LiveTraining(world.plane, namespace)


@contextmanager
def limited(world: StoryPlace, rules: list[dict[str, Any]]) -> Iterator[Limited]:
    """An operator with these rules. It is the same process at the end."""
    if world.operators is not None:
        operator = world.operators.operator(rules=rules)
        operator.start()
        yield operator, lambda: setattr(operator.rights, "rules", operator_process.rules())
        assert operator.pid == 1
        return
    plane = world.plane
    assert isinstance(plane, ControlPlane)
    kubeconfig = operator_process.user(plane, rules)
    with operator_process.running(plane, kubeconfig) as process:
        before = process.pid
        yield process, lambda: allow_all(plane, kubeconfig)
        assert process.pid == before


@pytest.mark.parametrize("resource", first_on_both(["rayjobs", "pods", "configmaps"]))
def test_what_it_may_not_watch_is_named(world: StoryPlace, live_training: LiveTraining, resource: str):
    with limited(world, operator_process.rules(without=resource)) as (_, grant):
        live_training.apply()
        live_training.until_condition("Ready", "False", "Unavailable")
        assert resource in live_training.whole_condition("Ready")["message"]
        assert live_training.mine("rayjobs") == []
        grant()
        live_training.until_job()
        live_training.until_condition("Accepted", "True", "Accepted")


@pytest.mark.worlds("memory", "real")
def test_it_is_not_ready_while_it_may_not_list_trainings(world: StoryPlace, live_training: LiveTraining):
    with limited(world, operator_process.rules(without="qwen35trainings")) as (operator, grant):
        live_training.until(lambda: "may not watch" in operator.readiness()[1], "the probe says why")
        status, message = operator.readiness()
        assert status == 503
        # Next to it is what it has not listed yet.
        (line,) = (line for line in message.splitlines() if "may not watch" in line)
        assert "Grant get, list and watch on qwen35trainings.rl.qwen35.io in all namespaces" in line
        assert line in operator.log
        grant()
        live_training.apply()
        live_training.until_job()
        assert operator.readiness() == (200, "ok")


@pytest.mark.worlds("real")
def test_a_namespace_without_permissions_keeps_no_other_from_being_served(
    world: StoryPlace, live_training: LiveTraining
):
    """As when somebody deletes its Role, or misspells it in the chart's `watchNamespaces`."""
    plane, served = world.plane, live_training.namespace
    assert isinstance(plane, ControlPlane)
    kubeconfig = operator_process.user(plane, operator_process.rules(cluster=False), (served,))
    with operator_process.running(plane, kubeconfig, "--namespace=misspelt", f"--namespace={served}") as operator:
        live_training.apply()
        live_training.until_job()
        status, message = operator.readiness()
    assert status == 200, "one namespace must not keep pods of the operator from being replaced"
    assert "Grant get, list and watch on qwen35trainings.rl.qwen35.io in namespace misspelt" in message
    assert f"in namespace {served}" not in message


@pytest.mark.parametrize("resource", ["rayjobs", "networkpolicies"])
def test_what_it_may_not_create_is_named(world: StoryPlace, live_training: LiveTraining, resource: str):
    with limited(world, only_reading(resource)) as (_, grant):
        live_training.apply()
        live_training.until_condition("Ready", "False", "Forbidden")
        message = live_training.whole_condition("Ready")["message"]
        assert "create" in message
        assert resource in message
        assert live_training.namespace in message
        grant()
        live_training.until_job()
        live_training.until(lambda: live_training.condition("Ready")[1] != "Forbidden", "it continues")


def test_a_kind_that_few_trainings_need_is_named_by_those_and_holds_up_no_other(
    world: StoryPlace, live_training: LiveTraining
):
    """As after an upgrade whose rights an administrator has yet to grant by hand (`rbac.create: false`)."""
    with limited(world, operator_process.rules(without="poddisruptionbudgets")) as (operator, grant):
        live_training.apply()
        live_training.until_pods("train", 1)
        live_training.report()
        live_training.until_condition("Ready", "True", "Running")
        assert operator.readiness() == (200, "ok")
        live_training.edit(disruptionBudget="HeadAndTrain")
        live_training.until_condition("Degraded", "True", "Forbidden")
        live_training.until(
            lambda: "create poddisruptionbudgets.policy" in live_training.whole_condition("Degraded")["message"],
            "the condition names the permission",
        )
        for update in range(120):
            live_training.report(update=update)
            live_training.plane.wait(1)
            assert live_training.condition("Ready") == ("True", "Running")
            assert live_training.condition("Degraded") == ("True", "Forbidden")
        creations = "qwen35_api_requests_total{", 'verb="POST"'
        tried = [
            count for name, count in operator.refused_requests().items() if all(part in name for part in creations)
        ]
        assert 1 <= sum(tried) <= 3
        grant()
        live_training.until(lambda: live_training.mine("poddisruptionbudgets"), "it is created")
        live_training.until_condition("Degraded", "False", "AsExpected")


def test_without_a_permission_to_write_status_the_log_says_so(world: StoryPlace, live_training: LiveTraining):
    with limited(world, operator_process.rules(without="qwen35trainings/status")) as (operator, grant):
        live_training.apply()
        live_training.until(lambda: "qwen35trainings/status" in operator.log, "the log names what is missing")
        grant()
        live_training.until_condition("Accepted", "True", "Accepted")


def only_reading(resource: str) -> list[dict[str, Any]]:
    rules = operator_process.rules()
    return [rule | {"verbs": ["get", "list", "watch"]} if resource in rule["resources"] else rule for rule in rules]


def allow_all(plane: ControlPlane, kubeconfig: Path) -> None:
    """Grant what was withheld, to the same user."""
    name = Path(json.loads(kubeconfig.read_text())["users"][0]["user"]["client-certificate"]).stem
    operator_process.grant(plane, name, operator_process.rules(), None)
