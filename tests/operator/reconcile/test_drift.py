"""Which children are applied again, and when."""

from collections import Counter
from dataclasses import replace
from datetime import timedelta
from random import Random
from uuid import UUID

import pytest

from qwen35_operator.kube.object_records import Child, OwnWrite
from qwen35_operator.reconcile.drift import (
    FIRST_READS_SECONDS,
    REPAIR_SECONDS,
    REPORTS_FIRST_SECONDS,
    Start,
    drifted,
    is_as_desired,
)
from qwen35_operator.reconcile.writes import Apply, RefusedWrite
from tests.operator.reconcile.world import START, World

CHILD = Child("NetworkPolicy", "demo", "team", "u", "7", "owner", "hash", None, own_write=OwnWrite("7", START))
KEY = ("NetworkPolicy", "demo")


def test_what_the_operator_wrote_last_has_not_drifted():
    assert drifted([CHILD], START + timedelta(days=1)) == (frozenset(), None)


def test_another_version_is_checked_immediately_if_the_last_write_is_old_enough():
    changed = replace(CHILD, version="9")
    assert drifted([changed], START + timedelta(seconds=REPAIR_SECONDS)) == ({KEY}, None)
    due, after = drifted([CHILD, changed], START + timedelta(seconds=REPAIR_SECONDS - 3))
    assert (due, after) == (frozenset(), 3.0)


def test_what_this_process_has_not_written_is_checked_once():
    assert drifted([replace(CHILD, own_write=None)], START) == ({KEY}, None)


def test_what_is_being_deleted_never_drifts():
    assert drifted([replace(CHILD, deleting=START, own_write=None)], START) == (frozenset(), None)


def test_what_has_lost_the_annotation_with_its_hash_has_drifted():
    assert drifted([replace(CHILD, version="9", hash=None)], START + timedelta(seconds=REPAIR_SECONDS)) == ({KEY}, None)


ALL = frozenset(
    {
        ("ConfigMap", "demo-config"),
        ("ConfigMap", "demo-control"),
        ("ServiceAccount", "demo-trainer"),
        ("Role", "demo-trainer"),
        ("RoleBinding", "demo-trainer"),
        ("NetworkPolicy", "demo"),
    }
)


class Changed(World):
    """A world in which somebody has changed all children."""

    changed = False

    def observe(self):
        return replace(super().observe(), drifted=ALL if self.changed else frozenset(), repair_after=5.0)


def applied(world: World) -> list[tuple[str, str]]:
    """The children that one decision applies, in order."""
    children: list[tuple[str, str]] = []
    before, world.changed = world.apply, True

    def apply(write):
        if isinstance(write, Apply):
            children.append((write.manifest["kind"], write.manifest["metadata"]["name"]))
        return before(write)

    world.apply = apply
    world.reconcile()
    world.apply, world.changed = before, False
    return children


def test_all_children_of_a_running_attempt_are_repaired_once_each_the_network_policy_first():
    world = Changed()
    world.until_running()
    repaired = applied(world)
    assert (repaired[0], len(repaired), set(repaired)) == (KEY, len(ALL), ALL)
    assert world.wanted_after <= 5.0
    assert world.status.state == "Running"


def test_they_are_repaired_while_the_trainer_saves():
    world = Changed()
    world.until_running()
    world.edit(suspend=True)
    world.reconcile()
    assert world.status.state == "Suspending"
    repaired = applied(world)
    assert repaired[:2] == [("ConfigMap", "demo-control"), KEY]  # first the order to stop
    assert set(repaired) == ALL


@pytest.mark.parametrize("key", sorted(ALL - {("ConfigMap", "demo-control")}))
def test_a_child_that_is_deleted_while_the_trainer_saves_is_created_again(key):
    """Without its RoleBinding the trainer could not report that it has saved, and without the NetworkPolicy others could reach it."""
    world = World()
    world.until_running()
    world.edit(suspend=True)
    world.reconcile()
    del world.children[key]
    world.reconcile()
    assert key in world.children
    assert world.status.state == "Suspending"


def test_pods_that_remain_after_a_failure_have_a_network_policy():
    world = World()
    world.until_running()
    world.report("Failed", reason="Error")
    world.reconcile()
    del world.children[KEY]
    world.reconcile()
    assert world.pods
    assert KEY in world.children


def first_reads(kind, running, count=500, time=START):
    """Seconds after the start at which the children of this kind of some running trainings are read."""
    uids = [str(UUID(int=Random(number).getrandbits(128))) for number in range(count)]
    start = Start(time, 7, running)
    return [(start.first_read(replace(CHILD, kind=kind, owner=uid)) - time).total_seconds() for uid in uids]


@pytest.mark.parametrize(
    ("kind", "running", "last"),
    [
        ("NetworkPolicy", 600, FIRST_READS_SECONDS),
        ("Role", 1, FIRST_READS_SECONDS),
        ("Role", 120, FIRST_READS_SECONDS),
        ("Role", 500, 177),
        ("NetworkPolicy", 5000, 344),
    ],
)
def test_running_trainings_are_read_for_the_first_time_within_a_while_after_the_start(kind, running, last):
    """A new leader with 500 of them would otherwise send thousands of requests before it serves their reports."""
    seconds = first_reads(kind, running)
    assert FIRST_READS_SECONDS <= 60 - REPAIR_SECONDS
    assert REPORTS_FIRST_SECONDS <= min(seconds) < REPORTS_FIRST_SECONDS + 1
    assert 0.98 * last < max(seconds) < last
    each_ten_seconds = Counter(second // 10 for second in seconds)
    assert max(each_ten_seconds.values()) < 1.8 * 500 * 10 / (last - REPORTS_FIRST_SECONDS)


def test_the_order_of_the_first_reads_is_another_one_after_each_start():
    """Otherwise frequent fail-overs would keep the children of the same trainings from ever being read."""
    first, second = (first_reads("Role", 500, time=time) for time in (START, START + timedelta(seconds=600)))
    late = [number for number, seconds in enumerate(first) if seconds > 150]
    assert sum(second[number] > 150 for number in late) < 0.5 * len(late)


def test_a_child_that_changes_before_its_first_read_is_read_immediately():
    unknown = replace(CHILD, own_write=None, version="7")
    start, earlier = Start(START, 7, 1), Start(START, 6, 1)
    due_at = start.first_read(unknown)
    assert drifted([unknown], START, start) == (frozenset(), (due_at - START).total_seconds())
    assert drifted([unknown], due_at, start) == ({KEY}, None)
    assert drifted([unknown], START, earlier) == ({KEY}, None)


def test_an_order_to_stop_is_sent_first_and_although_repairs_are_refused():
    world, kinds = Changed(), []
    world.until_running()
    world.edit(suspend=True)
    before, world.changed = world.apply, True

    def apply(write):
        if isinstance(write, Apply):
            kinds.append(write.manifest["kind"])
        if isinstance(write, Apply) and write.manifest["kind"] == "NetworkPolicy":
            return RefusedWrite(write, "Forbidden", "a policy forbids it")
        return before(write)

    world.apply = apply
    world.reconcile()
    assert world.observe().control.stop.reason == "Suspend"
    assert kinds[:2] == ["ConfigMap", "NetworkPolicy"]
    assert world.status.state == "Suspending"
    assert (world.condition("Degraded").reason, world.condition("Degraded").message) == (
        "Forbidden",
        "a policy forbids it",
    )


def test_another_writer_of_the_hash_is_answered_no_faster_than_one_of_other_fields():
    """Within REPAIR_SECONDS of its own write the operator leaves the object: `drifted` does not contain it yet."""
    world = World()
    world.until_running()
    child, manifest = world.children[KEY]
    for digest in (None, "theirs"):
        world.children[KEY] = replace(child, version="2", hash=digest), manifest
        assert applied(world) == []
    own_write = replace(child.own_write, hash="of an earlier spec")
    world.children[KEY] = replace(child, version="2", hash="theirs", own_write=own_write), manifest
    assert applied(world) == [KEY], "the operator wants to change it"


def test_an_attempt_that_starts_after_an_edit_gets_the_config_of_its_spec_although_somebody_wrote_the_old_one_since():
    """As a person who adds an annotation, or a controller that adds a label."""
    world = World()
    world.until_running()
    key = ("ConfigMap", "demo-config")
    child, manifest = world.children[key]
    world.children[key] = replace(child, version="2"), manifest
    world.edit(algorithm={"groupSize": 4})
    world.reconcile()
    world.obey()
    world.settle()
    assert "demo-2" in world.jobs
    assert "groupSize: 4" in world.children[key][1]["data"]["training.yaml"]


def test_a_training_without_pods_needs_no_repairs():
    world = Changed()
    world.until_running()
    world.edit(suspend=True)
    world.reconcile()
    world.obey()
    world.settle()
    assert world.status.state == "Suspended"
    assert applied(world) == []


def test_a_child_whose_desired_content_changes_too_is_applied_once():
    world = Changed()
    world.until_running()
    world.edit(checkpoint={"keep": 9})
    repaired = applied(world)
    assert repaired.count(("ConfigMap", "demo-config")) == 1


OWNER = {"uid": "u", "controller": True}
DESIRED = {
    "kind": "NetworkPolicy",
    "metadata": {"name": "demo", "labels": {"a": "1"}, "ownerReferences": [OWNER]},
    "spec": {"podSelector": {"matchLabels": {"a": "1"}}, "ingress": [{"from": []}]},
    "data": {"k": "v"},
}
ADDITIONS = [
    {"metadata": {"uid": "1", "resourceVersion": "7", "labels": {"a": "1", "b": "2"}, "ownerReferences": [OWNER, {}]}},
    {"data": {"k": "v", "l": "w"}},
    {"immutable": True, "metadata": DESIRED["metadata"] | {"annotations": {"seen": "yes"}}},
]
CHANGES = [
    {"metadata": {"labels": {"a": "2"}, "ownerReferences": [OWNER]}},
    {"metadata": {"ownerReferences": [OWNER]}},
    {"metadata": {"labels": {"a": "1"}}},
    {"metadata": {"labels": {"a": "1"}, "ownerReferences": [{"uid": "u"}]}},
    {"spec": {"podSelector": {"matchLabels": {"a": "1", "b": "2"}}, "ingress": [{"from": []}]}},
    {"spec": {"podSelector": {"matchLabels": {"a": "1"}}, "ingress": [{"from": []}, {}]}},
    {"spec": None},
    {"data": {"k": "w"}},
    {"data": None},
]


@pytest.mark.parametrize("addition", ADDITIONS)
def test_additions_of_others_are_not_drift(addition):
    assert is_as_desired(DESIRED | addition, DESIRED)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_what_the_operator_wrote_is_drift(change):
    assert not is_as_desired(DESIRED | change, DESIRED)
