"""The status: conditions, pools, numbers, and how often it is written."""

from dataclasses import replace

import pytest

from qwen35_operator.api.v1alpha1 import TrainingStatus
from qwen35_operator.desired.spec_hash import spec_hash
from qwen35_operator.reconcile.new_status import progress_interval
from qwen35_operator.status.conditions import CONDITIONS, REASONS
from qwen35_trainer.contract import CheckpointReport
from qwen35_trainer.manifest import Problem
from tests.operator.reconcile.world import World


def kstatus(status: TrainingStatus, generation: int) -> str:
    """The rules of sigs.k8s.io/cli-utils for kinds it does not know."""
    by_type = {condition.type: condition.status for condition in status.conditions}
    if status.observedGeneration != generation:
        return "InProgress"
    if by_type.get("Stalled") == "True":
        return "Failed"
    if by_type.get("Reconciling") == "True" or by_type.get("Ready") in ("False", "Unknown"):
        return "InProgress"
    return "Current"


@pytest.fixture
def world() -> World:
    return World()


def test_a_running_training_is_current_so_that_gitops_does_not_wait(world):
    world.until_running()
    assert kstatus(world.status, world.generation) == "Current"


def test_a_starting_one_is_in_progress(world):
    world.settle(2)
    assert world.status.state == "Starting"
    assert kstatus(world.status, world.generation) == "InProgress"


def test_a_suspended_one_is_current(world):
    world.edit(suspend=True)
    world.settle(2)
    assert kstatus(world.status, world.generation) == "Current"


def test_a_failed_one_is_failed_and_a_succeeded_one_current(world):
    world.until_running()
    other = World()
    other.until_running()
    world.report("Failed", reason="DataError", message="x")
    other.report("Succeeded")
    world.reconcile(), other.reconcile()
    assert kstatus(world.status, 1) == "Failed"
    assert kstatus(other.status, 1) == "Current"


def test_a_spec_that_cannot_run_lists_every_reason(world):
    world.edit(rollout={"minNodes": 3}, train={"parallelism": {"tensor": 3}})
    world.reconcile()
    accepted = world.condition("Accepted")
    assert accepted.status == "False"
    assert "spec.rollout.minNodes" in accepted.message
    assert "spec.train.parallelism" in accepted.message
    assert not world.jobs
    assert kstatus(world.status, world.generation) == "Failed"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"train": {"engine": "Megatron", "lora": {}}}, "spec.train.lora"),
        ({"algorithm": {"advantage": "GAE"}}, "spec.algorithm.advantage"),
        (
            {"accelerator": {"devicesPerNode": 2}, "train": {"parallelism": {"tensor": 2}}},
            "spec.train.parallelism.tensor",
        ),
        ({"publication": {"transport": "SharedMemory"}}, "spec.publication.transport"),
        ({"publication": {"transport": "Folder", "folder": "publications"}}, "spec.publication.folder"),
    ],
)
def test_what_this_release_cannot_run_is_not_accepted_and_gets_no_job(world, changes, field):
    world.edit(**changes)
    world.reconcile()
    accepted = world.condition("Accepted")
    assert (accepted.status, accepted.reason) == ("False", "Invalid")
    assert accepted.message.startswith(f"{field}: "), accepted.message
    assert not world.jobs
    assert not world.children
    assert kstatus(world.status, world.generation) == "Failed"


def test_a_corrected_spec_continues(world):
    world.edit(rollout={"minNodes": 3})
    world.reconcile()
    world.edit(rollout={"minNodes": 1})
    world.until_running()
    assert world.is_true("Accepted")


def test_an_edit_that_cannot_run_leaves_the_running_attempt_alone(world):
    world.until_running()
    world.edit(rollout={"minNodes": 3})
    world.reconcile()
    assert not world.is_true("Accepted")
    assert world.status.state == "Running"
    assert world.jobs["demo-1"].deleting is None


EARLIER = {
    "a lane that fills minNodes": ({"minNodes": 1}, "spec.rollout.minNodes"),
    "a lane that is not larger": (
        {"tensorParallel": 4, "lane": {"tensorParallel": 4}},
        "spec.rollout.stragglerLane.tensorParallel",
    ),
    "a lane that nothing reaches": ({"lane": {"afterTokens": 9999}}, "spec.rollout.stragglerLane.afterTokens"),
    "a lane of Torch replicas": ({"engine": "Torch"}, "spec.rollout.stragglerLane"),
}
"""What an earlier release accepted → the field that this one names when a new training has it."""


@pytest.mark.parametrize(("change", "path"), EARLIER.values(), ids=EARLIER)
def test_what_an_earlier_release_accepted_is_refused_in_a_new_training_and_continued_in_one_that_runs(change, path):
    lane = {"nodes": 1, "tensorParallel": 8, "afterTokens": 9}
    rollout = {"engine": "VLLM", "nodes": 3, "minNodes": 2, "stragglerLane": lane}
    earlier = {**rollout, **change, "stragglerLane": lane | change.get("lane", {})}
    earlier.pop("lane", None)

    new = World()
    new.edit(rollout=earlier)
    new.reconcile()
    assert new.condition("Accepted").reason == "Invalid"
    assert f"{path}: " in new.condition("Accepted").message
    assert not new.jobs

    begun = World()
    begun.edit(rollout=rollout)
    begun.until_running()
    begun.edit(rollout=earlier)  # stands for the operator's upgrade: the job is of this spec
    begun.jobs["demo-1"] = replace(begun.jobs["demo-1"], spec_hash=spec_hash(begun.observe().training))
    begun.reconcile()
    assert begun.is_true("Accepted")
    assert [attempt.outcome for attempt in begun.status.attempts] == ["Running"]
    begun.edit(suspend=True)
    begun.reconcile()
    begun.obey()
    begun.settle()
    assert begun.status.state == "Suspended"
    begun.edit(suspend=False)
    begun.until_running()
    assert [attempt.outcome for attempt in begun.status.attempts] == ["Suspended", "Running"]


LARGE = {"name": "Qwen/Qwen3.5-397B-A17B", "source": {"path": "/models/397b"}}


def test_a_training_that_does_not_fit_is_refused_if_it_is_new_and_continued_if_it_has_begun():
    new = World()
    new.edit(model=LARGE)
    new.reconcile()
    accepted = new.condition("Accepted")
    assert (accepted.status, accepted.reason) == ("False", "Invalid")
    assert [part for part in ("spec.train: ", "spec.rollout: ") if part in accepted.message] == [
        "spec.train: ",
        "spec.rollout: ",
    ]
    assert not new.jobs
    new.edit(pods={"sizing": "Profile"})
    new.until_running()

    begun = World()
    begun.until_running()
    begun.edit(model=LARGE)  # stands for an upgrade to a release that plans more: the job is of this spec
    begun.jobs["demo-1"] = replace(begun.jobs["demo-1"], spec_hash=spec_hash(begun.observe().training))
    begun.reconcile()
    assert begun.is_true("Accepted")
    assert [attempt.outcome for attempt in begun.status.attempts] == ["Running"]


def test_an_accepted_training_says_what_is_not_checked(world):
    world.edit(model={"name": "my/own"}, checkpoint={"storage": None})
    world.reconcile()
    assert world.is_true("Accepted")
    message = world.condition("Accepted").message
    assert message.index("no checkpoints, because") < message.index("model.name my/own is not in the catalog")


def test_a_kind_that_cannot_be_watched_stops_everything_and_is_named(world):
    world.unavailable = (Problem("rayjobs.ray.io", "the cluster has no such kind.", "Install KubeRay 1.5.1 or newer."),)
    world.reconcile()
    assert not world.children
    assert "Install KubeRay" in world.condition("Ready").message
    assert world.condition("Accepted").status == "Unknown"
    assert kstatus(world.status, world.generation) == "InProgress"
    world.unavailable = ()
    world.until_running()


def test_a_foreign_object_with_a_childs_name_is_reported_and_never_touched(world):
    world.foreign = {("ConfigMap", "demo-config")}
    world.reconcile()
    assert world.condition("Accepted").reason == "NameTaken"
    assert not world.status.attempts
    assert not world.jobs
    world.foreign = set()
    world.until_running()


def test_a_refusal_while_running_degrades_and_keeps_the_state(world):
    world.until_running()
    world.foreign = {("NetworkPolicy", "demo")}
    world.children = {key: child for key, child in world.children.items() if key[0] != "NetworkPolicy"}
    world.reconcile()
    assert world.status.state == "Running"
    assert world.is_true("Ready")
    assert world.condition("Degraded").reason == "NameTaken"


def test_pools_are_counted_from_the_pods(world):
    world.until_running()
    world.fault("rollout", "OOMKilled", 137)
    world.reconcile()
    assert [(pool.name, pool.desired, pool.ready, pool.unhealthy) for pool in world.status.pools] == [
        ("head", 1, 1, 0),
        ("rollout", 2, 1, 1),
        ("train", 2, 2, 0),
    ]
    assert world.is_true("RolloutReady")
    assert world.is_true("Ready")
    assert world.is_true("Degraded")
    assert world.status.rolloutNodes == 2, "both exist: the scale subresource does not say which of them work"


def test_a_lost_train_node_is_not_ready(world):
    world.until_running()
    world.fault("train", "NodeLost")
    world.reconcile()
    assert not world.is_true("TrainReady")
    assert not world.is_true("Ready")
    assert world.is_true("Reconciling")


def test_numbers_have_the_digits_that_people_read(world):
    world.until_running()
    world.wait(10)
    world.report(update=2, accuracy=0.123456, heldOutReward=1.234567, secondsPerUpdate=1.23456, tokensPerSecond=1234.56)
    world.reconcile()
    shown = world.status.progress
    assert (shown.accuracy, shown.heldOutReward) == (0.1235, 1.2346)
    assert (shown.secondsPerUpdate, shown.tokensPerSecond) == (1.23, 1234.6)


def test_numbers_are_copied_at_most_every_ten_seconds(world):
    world.until_running()
    world.wait(10)
    world.report(update=2, version=2)
    world.reconcile()
    assert world.status.progress.update == 2
    before = world.writes
    for second in range(9):
        world.wait(1)
        world.report(update=3 + second, version=3 + second)
        world.reconcile()
    assert world.writes == before
    assert world.wanted_after == pytest.approx(1.0)
    world.wait(1)
    world.reconcile()
    assert world.status.progress.update == 11


def test_with_many_running_trainings_numbers_are_copied_less_often(world):
    """All trainings together make at most 10 copies per second: 5,000 of them one each in 500 seconds."""
    world.running = 5000
    world.until_running()
    world.wait(500)
    world.report(update=2)
    world.reconcile()
    assert world.status.progress.update == 2
    world.wait(499)
    world.report(update=3)
    world.reconcile()
    assert world.status.progress.update == 2
    assert world.wanted_after == pytest.approx(1.0)
    world.wait(1)
    world.reconcile()
    assert world.status.progress.update == 3


def test_a_checkpoint_is_shown_immediately_and_with_its_numbers(world):
    world.until_running()
    world.wait(10)
    world.report(update=2)
    world.reconcile()
    world.wait(3)
    saved = CheckpointReport(uri="/checkpoints/update-000003", update=3, time=world.now.timestamp())
    world.report(update=3, checkpoint=saved)
    world.reconcile()
    assert (world.status.progress.update, world.status.lastCheckpoint.update) == (3, 3)
    world.wait(9)
    world.report(update=4, checkpoint=saved)
    world.reconcile()
    assert (world.status.progress.update, world.wanted_after) == (3, pytest.approx(1.0))


def _fail_over(world, seconds):
    """Another process begins to lead 500 trainings, these seconds after the numbers of update 2 were copied. It finds update 3."""
    world.running = 500
    world.until_running()
    world.wait(50)
    world.report(update=2)
    world.reconcile()
    world.wait(seconds)
    world.reports_since = world.now
    world.report(update=3)
    world.reconcile()
    assert world.status.progress.update == 2


def test_a_new_leader_copies_overdue_numbers_one_after_the_other_and_checkpoints_immediately(world):
    _fail_over(world, seconds=60)
    assert 0 < world.wanted_after < 10
    saved = CheckpointReport(uri="/checkpoints/update-000004", update=4, time=world.now.timestamp())
    world.report(update=4, checkpoint=saved)
    world.reconcile()
    assert (world.status.progress.update, world.status.lastCheckpoint.update) == (4, 4)
    world.wait(60)
    world.report(update=5, checkpoint=saved)
    world.reconcile()
    assert world.status.progress.update == 5


def test_numbers_that_become_due_after_the_fail_over_wait_for_no_turn(world):
    """Only those that were overdue before are due together."""
    _fail_over(world, seconds=49)
    assert world.wanted_after == pytest.approx(1.0)
    world.wait(1)
    world.reconcile()
    assert world.status.progress.update == 3


def test_equal_numbers_of_a_new_attempt_get_a_new_time(world):
    """By this time `stop` knows that the trainer of the attempt has reported, if somebody deletes `-progress`."""
    world.settle(4)
    world.report(update=0)
    world.reconcile()
    world.report("Failed", reason="Error")
    world.settle()
    world.wait(3600)
    world.settle()
    before = world.status.progress.time
    world.report(update=0)
    world.reconcile()
    assert (world.status.state, world.status.attempts[-1].number) == ("Running", 2)
    assert world.status.progress.time > before


@pytest.mark.parametrize(("running", "seconds"), [(0, 10), (100, 10), (101, 10.1), (5000, 500)])
def test_the_rate_of_copies_is_bounded_from_one_hundred_running_trainings_on(running, seconds):
    assert progress_interval(running) == pytest.approx(seconds)


def test_a_state_that_changes_does_not_wait_for_the_ten_seconds(world):
    world.until_running()
    world.report("Succeeded", update=9)
    world.reconcile()
    assert world.status.progress.update == 9


def test_a_heartbeat_is_not_a_write(world):
    world.until_running()
    world.wait(60)
    world.report(update=5)
    world.reconcile()
    before = world.writes
    for _ in range(5):
        world.wait(60)
        world.report()
        world.reconcile()
    assert world.writes == before


def test_a_report_that_cannot_be_read_is_reported_and_the_last_numbers_stay(world):
    world.until_running()
    world.report(update=5, version=5)
    world.wait(10)
    world.reconcile()
    world.unreadable = "progress.json is not a ProgressReport"
    world.reconcile()
    assert world.condition("Degraded").reason == "ProgressUnreadable"
    assert (world.status.progress.update, world.status.attempts[0].outcome) == (5, "Running")
    world.unreadable = None
    world.report(update=6, version=6)
    world.wait(10)
    world.reconcile()
    assert world.condition("Degraded").reason == "AsExpected"
    assert world.status.progress.update == 6


def test_transition_times_move_only_with_the_status(world):
    world.until_running()
    first = world.condition("Ready").lastTransitionTime
    world.wait(100)
    world.report(update=50, phase="evaluating")
    world.reconcile()
    assert world.condition("Ready").lastTransitionTime == first


def test_every_condition_and_reason_is_documented(world):
    world.until_running()
    world.edit(suspend=True)
    world.settle()
    for condition in world.status.conditions:
        assert condition.type in CONDITIONS
        assert condition.reason in REASONS


def test_supervised_training_has_no_rollout_pool(world):
    world.spec = {**world.spec, "mode": "SFT", "rewards": []}
    del world.spec["rollout"]
    world.reconcile()
    assert [pool.name for pool in world.status.pools] == ["head", "train"]
    assert "RolloutReady" not in {condition.type for condition in world.status.conditions}
    assert world.status.rolloutSelector is None


def test_a_training_that_is_being_deleted_is_left_alone(world):
    world.until_running()
    world.deleting = True
    world.children.clear()
    before = world.writes
    world.reconcile()
    assert (world.writes, world.children) == (before, {})


def test_a_report_of_an_attempt_that_does_not_exist_is_reported_and_the_last_numbers_stay(world):
    world.until_running()
    world.report(update=5, version=5)
    world.wait(10)
    world.reconcile()
    world.report("Succeeded", attempt=2, update=9, version=9)
    world.wait(10)
    world.reconcile()
    condition = world.condition("Degraded")
    assert condition.reason == "ProgressUnreadable"
    assert condition.message == "progress.json: attempt: 2 does not exist; the latest attempt is 1"
    assert (world.status.progress.update, world.status.attempts[0].outcome) == (5, "Running")
    world.report(update=6, version=6)
    world.wait(10)
    world.reconcile()
    assert world.condition("Degraded").reason == "AsExpected"
