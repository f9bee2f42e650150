"""The PodDisruptionBudget is there while the spec wants it and it protects pods of the open attempt, and no longer."""

from dataclasses import replace
from datetime import timedelta

import pytest

from qwen35_operator.desired.object_names import LAST_CHECKPOINT
from qwen35_operator.kube.object_records import Child, OwnWrite
from qwen35_operator.reconcile.decide import decide
from qwen35_operator.reconcile.decision import Decision
from qwen35_operator.reconcile.disruptions import RETRY_SECONDS
from qwen35_operator.reconcile.writes import Apply, Create, Delete
from qwen35_trainer.manifest import Problem
from tests.operator.reconcile.world import START, UID, World

BUDGET = ("PodDisruptionBudget", "demo-disruptions")


def protected(world: World) -> bool:
    return BUDGET in world.children


@pytest.fixture
def world() -> World:
    world = World()
    world.edit(disruptionBudget="HeadAndTrain")
    return world


def test_it_comes_with_the_pods_and_goes_with_them(world) -> None:
    world.reconcile()
    assert not protected(world)
    world.until_running()
    assert protected(world)
    world.edit(suspend=True)
    world.settle(3)
    assert world.pods
    assert protected(world), "the pods still save a checkpoint"
    world.wait(400)
    world.settle(6)
    assert world.status.state == "Suspended"
    assert not protected(world)
    world.edit(suspend=False)
    world.until_running()
    assert protected(world)
    assert world.status.attempts[-1].number == 2


def test_it_protects_nothing_while_a_queue_holds_the_attempt_back(world) -> None:
    world.labels = {"kueue.x-k8s.io/queue-name": "team"}
    world.settle(3)
    assert world.status.state == "Queued"
    assert not protected(world)
    world.admit()
    assert protected(world)
    world.evict()
    world.settle(3)
    assert not world.pods
    assert not protected(world)


@pytest.mark.parametrize("state", ["Succeeded", "Failed"])
def test_it_goes_when_the_training_ends_although_the_other_children_stay(world, state) -> None:
    world.edit(failurePolicy={"maxRestarts": 0})
    world.until_running()
    world.report(state)
    world.reconcile()
    world.finish_job(ok=state == "Succeeded")
    world.settle(5)
    assert world.status.state == state
    assert not world.pods
    assert not protected(world)
    assert ("NetworkPolicy", "demo") in world.children


def test_it_comes_and_goes_with_the_spec_while_the_attempt_runs() -> None:
    world = World()
    world.until_running()
    assert not protected(world)
    world.edit(disruptionBudget="HeadAndTrain")
    world.settle(2)
    assert protected(world)
    world.edit(disruptionBudget="None")
    world.settle(2)
    assert not protected(world)
    assert (len(world.status.attempts), world.status.state) == (1, "Running")


def test_a_spec_that_cannot_be_read_takes_no_protection_away(world) -> None:
    world.until_running()
    world.edit(mode="Sideways")
    world.settle(3)
    assert world.condition("Accepted").status == "False"
    assert protected(world)


def test_an_edited_one_is_applied_again(world) -> None:
    world.until_running()
    drifted = replace(world.observe(), drifted=frozenset({BUDGET}))
    (write,) = decide(drifted, world.settings, world.now).writes
    child, manifest = world.children[BUDGET]
    assert write == Apply(manifest, child.uid, is_repair=True)


def test_the_pods_of_an_attempt_that_stops_stay_protected_in_their_old_number(world) -> None:
    """A size changes together with `suspend`. The attempt still saves its last checkpoint."""
    world.until_running()
    _, before = world.children[BUDGET]
    assert before["spec"]["minAvailable"] == 3
    world.edit(suspend=True, train={"nodes": 1})
    world.settle(3)
    assert world.status.state == "Suspending"
    assert world.children[BUDGET][1] == before


def test_a_refused_spec_changes_nothing(world) -> None:
    world.until_running()
    _, before = world.children[BUDGET]
    world.edit(train={"nodes": 1}, publication={"transport": "SharedMemory"})
    world.settle(3)
    assert world.condition("Accepted").status == "False"
    assert world.children[BUDGET][1] == before


def test_pods_that_are_being_deleted_or_are_not_ready_need_none(world) -> None:
    world.until_running()
    running = dict(world.pods)
    for change in ({"deleting": world.now}, {"ready": False}):
        world.pods = {name: pod if pod.pool == "rollout" else replace(pod, **change) for name, pod in running.items()}
        world.reconcile()
        assert not protected(world), change
        world.pods = running
        world.reconcile()
        assert protected(world)


@pytest.mark.parametrize("seconds", [0, 2])
def test_after_the_end_nobody_creates_it_again_for_pods_that_are_slow_to_go(world, seconds) -> None:
    world.edit(cleanupSecondsAfterFinished=seconds)
    world.until_running()
    world.report("Succeeded")
    for _ in range(6):
        deletions = [
            write for write in decide(world.observe(), world.settings, world.now).writes if isinstance(write, Delete)
        ]
        names = [(write.kind, write.name) for write in deletions]
        assert len(names) == len(set(names)), "each once"
        world.reconcile()
        world.wait(1)
    assert world.pods
    assert not protected(world)


@pytest.mark.parametrize("finalizers", [(LAST_CHECKPOINT,), (LAST_CHECKPOINT, "foregroundDeletion")])
def test_it_is_not_created_again_while_the_training_is_deleted(world, finalizers) -> None:
    world.finalizers = finalizers
    world.until_running()
    world.delete()
    del world.children[BUDGET]
    world.settle(3)
    assert not protected(world)


REFUSED = OwnWrite("", START, None, ("Forbidden", "the operator may not write it"))


def decided(world: World, *, seconds: float, **seen) -> Decision:
    """What follows this long after the API server has refused a write of the budget. seen: further fields of Observed."""
    world.now = START + timedelta(seconds=seconds)
    observed = replace(world.observe(), budget_try=REFUSED, **seen)
    return decide(observed, world.settings, world.now)


def degraded(decision: Decision) -> tuple[str, str, str | None]:
    (condition,) = (item for item in decision.status.conditions if item.type == "Degraded")
    return condition.status, condition.reason, condition.message


@pytest.mark.parametrize("write", [Create, Delete])
def test_a_refused_write_is_repeated_after_a_minute_and_named_meanwhile(world, write) -> None:
    world.until_running()
    if write is Create:
        del world.children[BUDGET]
    else:
        world.edit(disruptionBudget="None")
    soon = decided(world, seconds=20)
    assert soon.writes == ()
    assert soon.after is not None
    assert soon.after <= RETRY_SECONDS - 20
    assert degraded(soon) == ("True", *REFUSED.refusal)
    later = decided(world, seconds=RETRY_SECONDS)
    assert degraded(later)[0] == "False", "it is named again if this try is refused too"
    (again,) = later.writes
    assert isinstance(again, write)
    assert again.is_repair, "no other write waits for it"


def test_an_old_refusal_is_not_reported_once_the_budget_is_as_the_spec_wants(world) -> None:
    world.until_running()
    assert degraded(decided(world, seconds=20))[0] == "False"
    world.edit(disruptionBudget="None")
    world.settle(2)
    assert degraded(decided(world, seconds=30))[0] == "False"


def test_a_refused_creation_does_not_hold_up_the_repair_of_one_that_exists(world) -> None:
    world.until_running()
    (write,) = decided(world, seconds=20, drifted=frozenset({BUDGET})).writes
    assert isinstance(write, Apply)


def test_one_that_is_being_deleted_is_not_deleted_again(world) -> None:
    """Somebody may have given it a finalizer."""
    world.until_running()
    world.edit(disruptionBudget="None")
    child, manifest = world.children[BUDGET]
    world.children[BUDGET] = replace(child, deleting=world.now), manifest
    assert not [
        write for write in decide(world.observe(), world.settings, world.now).writes if isinstance(write, Delete)
    ]


def test_a_training_that_needs_one_says_that_the_operator_does_not_see_it(world) -> None:
    """Somebody may have deleted it since."""
    limited = {"limitations": (Problem("poddisruptionbudgets.policy", "may not be watched.", "Grant it."),)}
    world.until_running()
    reported = degraded(decided(world, seconds=100, **limited))
    assert reported == ("True", "Forbidden", "poddisruptionbudgets.policy: may not be watched. Grant it.")
    world.edit(disruptionBudget="None")
    world.settle(2)
    assert degraded(decided(world, seconds=100, **limited))[0] == "False"


def test_a_changed_network_policy_that_cannot_be_repaired_is_more_important(world) -> None:
    world.until_running()
    del world.children[BUDGET]
    unrepaired = (("Rejected", "NetworkPolicy demo: denied"),)
    assert degraded(decided(world, seconds=20, unrepaired=unrepaired)) == ("True", *unrepaired[0])


def test_an_object_with_another_name_is_not_the_operators(world) -> None:
    """Somebody may give it the labels and the owner of the operator's objects."""
    world.edit(disruptionBudget="None")
    world.until_running()
    copy = Child("PodDisruptionBudget", "mine", "team", "u", "1", UID, None, None)
    world.children["PodDisruptionBudget", "mine"] = copy, {}
    world.settle(2)
    assert ("PodDisruptionBudget", "mine") in world.children


def test_a_budget_of_somebody_else_is_named_and_the_attempt_continues(world) -> None:
    world.foreign = {BUDGET}
    world.until_running()
    assert world.status.state == "Running"
    assert world.is_true("Degraded")
    assert world.condition("Degraded").reason == "NameTaken"


def test_that_it_cannot_be_created_hides_no_other_problem_of_the_attempt(world) -> None:
    world.foreign = {BUDGET}
    world.until_running()
    world.unreadable = "no JSON"
    world.settle(2)
    assert world.condition("Degraded").reason == "ProgressUnreadable"
