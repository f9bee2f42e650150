"""A restart keeps the trainer image and the version of Ray, whatever the operator's release is meanwhile."""

from dataclasses import replace

import pytest

from qwen35_operator.api.v1alpha1 import TrainingStatus
from qwen35_operator.desired import trainer_release
from qwen35_operator.operator_settings import OperatorSettings
from tests.operator.reconcile.world import World

DIGEST = "ghcr.io/qwen35/trainer-cuda@sha256:" + "a" * 64
LATER = "ghcr.io/qwen35/trainer-cuda:9.0"


@pytest.fixture
def world() -> World:
    begun = World()
    begun.edit(failurePolicy={"maxRestarts": 9, "backoffSeconds": 1})
    begun.until_running()
    return begun


def upgraded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later release of the operator takes over, with another image and another version of Ray."""
    world.settings = OperatorSettings(images={"NVIDIA": LATER, "Ascend": "a", "CPU": "c"})
    monkeypatch.setattr(trainer_release, "RAY_VERSION", "9.9.9")
    world.reconcile()


def restarted(world: World) -> tuple[str, str, str]:
    """The attempt fails, the next one trains. Returns its image with the name of the image, and its version of Ray."""
    world.finish_job(ok=False, message="again")
    world.reconcile()
    return resumed(world)


def resumed(world: World) -> tuple[str, str, str]:
    world.wait(4000)
    number = world.status.attempts[-1].number + 1
    for _ in range(12):
        world.reconcile()
        world.kuberay()
        world.wait(1)
    world.report(update=number, version=number)
    world.reconcile()
    assert (world.status.attempts[-1].number, world.status.state) == (number, "Running")
    job = world.jobs[f"demo-{number}"]
    assert world.status.release.attempt == number
    assert (world.status.release.image, world.status.release.rayVersion) == (job.image, job.ray_version)
    return job.image, job.image_reference, job.ray_version


def first_of(world: World) -> tuple[str, str, str]:
    job = world.jobs["demo-1"]
    return job.image, job.image_reference, job.ray_version


def test_the_first_attempt_takes_the_operators_release_and_nothing_is_available(world):
    release = world.status.release
    assert (release.attempt, release.image, release.reference) == (1, *first_of(world)[:2])
    assert release.image == OperatorSettings().images["NVIDIA"]
    assert release.rayVersion == trainer_release.RAY_VERSION
    assert (world.condition("UpdateAvailable").status, release.available) == ("False", None)


def test_a_restart_after_an_upgrade_keeps_image_and_ray_and_says_what_is_available(world, monkeypatch):
    first = first_of(world)
    upgraded(world, monkeypatch)
    assert world.status.state == "Running"
    message = world.condition("UpdateAvailable").message
    assert world.is_true("UpdateAvailable")
    assert all(text in message for text in (first[0], LATER, "Ray 9.9.9", "rl.qwen35.io/update"))
    assert restarted(world) == first
    assert restarted(world) == first
    assert world.is_true("UpdateAvailable")


def test_suspending_and_resuming_takes_the_update(world, monkeypatch):
    upgraded(world, monkeypatch)
    world.edit(suspend=True)
    world.reconcile()
    world.obey()
    world.settle()
    assert world.status.state == "Suspended"
    world.edit(suspend=False)
    assert resumed(world) == (LATER, LATER, "9.9.9")
    assert not world.is_true("UpdateAvailable")


def test_a_request_is_carried_out_by_the_next_attempt_and_once(world, monkeypatch):
    upgraded(world, monkeypatch)
    world.update_request = "now"
    world.reconcile()
    assert [attempt.outcome for attempt in world.status.attempts] == ["Running"]
    assert restarted(world) == (LATER, LATER, "9.9.9")
    assert world.status.release.request == "now"
    world.settings = OperatorSettings()
    assert restarted(world) == (LATER, LATER, "9.9.9")
    world.update_request = "again"
    assert restarted(world)[0] == OperatorSettings().images["NVIDIA"]


def test_a_restart_runs_the_digest_that_the_nodes_have_pulled(world, monkeypatch):
    world.image_id = DIGEST
    world.kuberay()
    world.reconcile()
    assert world.status.release.image == DIGEST
    assert world.jobs["demo-1"].image != DIGEST
    reference, ray = first_of(world)[1:]
    upgraded(world, monkeypatch)
    assert restarted(world) == (DIGEST, reference, ray)
    world.settings = OperatorSettings()
    world.reconcile()
    assert "Ray" in world.status.release.available
    assert reference not in world.status.release.available


def test_pods_with_different_digests_leave_the_image_as_it_is(world):
    world.image_id = DIGEST
    world.kuberay()
    first = next(iter(world.pods))
    world.pods[first] = replace(world.pods[first], image_id=DIGEST.replace("aa", "bb"))
    world.reconcile()
    assert world.status.release.image == first_of(world)[0]


def test_a_training_whose_trainer_has_never_reported_takes_the_present_image():
    """The image may be the reason: the operator's settings named one that does not exist."""
    world = World()
    world.settings = OperatorSettings(images={"NVIDIA": "misspelt:1", "Ascend": "a", "CPU": "c"})
    world.settle(4)
    assert world.status.release.image == "misspelt:1"
    world.settings = OperatorSettings()
    assert restarted(world)[0] == OperatorSettings().images["NVIDIA"]


def test_an_attempt_of_a_release_that_recorded_none_is_pinned_to_what_it_runs(world, monkeypatch):
    """Releases before 0.2 have no status.release and no annotations at the RayJob; a crash loses the status too."""
    first = first_of(world)
    job = world.jobs["demo-1"]
    world.jobs["demo-1"] = replace(job, image_reference="", update_request="")
    old = world.status.model_dump(mode="json", exclude_none=True)
    del old["release"]
    world.status = TrainingStatus.model_validate(old)
    upgraded(world, monkeypatch)
    assert world.status.release.image == first[0]
    assert restarted(world) == first


def test_an_image_of_the_users_is_pinned_too_and_another_one_replaces_it(monkeypatch):
    world = World()
    world.edit(pods={"image": "mine:1"}, failurePolicy={"maxRestarts": 9, "backoffSeconds": 1})
    world.until_running()
    upgraded(world, monkeypatch)
    assert world.status.release.available == "Ray 9.9.9"
    assert restarted(world)[:2] == ("mine:1", "mine:1")
    world.edit(suspend=True)
    world.reconcile()
    world.obey()
    world.settle()
    world.edit(suspend=False, pods={"image": "mine:2"})
    assert resumed(world)[:2] == ("mine:2", "mine:2")


def test_what_has_ended_needs_no_update(world, monkeypatch):
    world.report("Succeeded")
    world.reconcile()
    before = world.status
    upgraded(world, monkeypatch)
    assert world.status == before
    assert not world.is_true("UpdateAvailable")
