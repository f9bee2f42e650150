"""Suspending: the trainer saves, says so, and nothing is left running; resuming goes on from there."""

from tests.controlplane.story import Story
from tests.testbed.ray_head import RayHead


def assert_nothing_runs(story: Story) -> None:
    story.until_state("Suspended")
    for kind in ("rayclusters", "pods"):
        assert story.mine(kind) == []
    story.until(lambda: not story.mine("rayjobs"), "its job, which is over, is gone as well")
    assert story.condition("Suspended") == story.condition("Ready") == ("True", "Suspended")
    assert story.condition("Reconciling")[0] == "False"


def test_a_real_job_saves_stops_and_goes_on_where_it_was(story: Story, ray_head: RayHead):
    story.apply(script=[[{"publish": 2}, "obey"], [{"report": {"update": 2}}, {"succeed": "all done"}]])
    story.until_state("Running")
    story.until(lambda: story.status["progress"]["update"], "it trains")
    story.edit(suspend=True)
    assert_nothing_runs(story)
    assert story.status["lastCheckpoint"]["update"] == 2
    (attempt,) = story.attempts
    assert (attempt["outcome"], attempt["reason"], attempt["counted"]) == ("Suspended", "Suspend", False)
    story.edit(suspend=False)
    story.until_state("Succeeded")
    assert [one["outcome"] for one in story.attempts] == ["Suspended", "Succeeded"]
    assert story.restarts == 0


def test_the_trainer_is_given_time_to_answer(story: Story):
    story.apply(checkpoint={"graceSeconds": 600})
    story.until_job()
    story.report()
    story.until_state("Running")
    story.edit(suspend=True)
    story.until_condition("Reconciling", "True", "Stopping")
    assert story.job() is not None
    order = story.order
    assert order is not None
    assert order["reason"] == "Suspend"
    story.report(stopAcknowledged=order["id"], phase="saving")
    story.until(lambda: "is saving" in story.told("Reconciling")["message"], "the acknowledgement is seen")
    assert story.job() is not None
    saved = {"uri": "/checkpoints/update-1", "update": 1, "time": order["time"]}
    story.report("Stopped", stopAcknowledged=order["id"], checkpoint=saved)
    assert_nothing_runs(story)
    assert story.status["lastCheckpoint"]["uri"] == "/checkpoints/update-1"


def test_an_answer_to_an_earlier_order_is_none(story: Story):
    story.apply(checkpoint={"graceSeconds": 600})
    story.until_job()
    story.report(stopAcknowledged="0-Suspend")
    story.until_state("Running")
    story.edit(suspend=True)
    story.until_condition("Reconciling", "True", "Stopping")
    assert "has not answered yet" in story.told("Reconciling")["message"]


def test_a_silent_trainer_is_stopped_when_its_grace_is_over(story: Story):
    story.apply(checkpoint={"graceSeconds": 2})
    story.until_job()
    story.report()
    story.until_state("Running")
    story.edit(suspend=True)
    assert_nothing_runs(story)
    assert "graceSeconds 2 are over" in story.attempts[0]["message"]


def test_before_the_trainer_has_spoken_there_is_nothing_to_wait_for(story: Story):
    story.apply(checkpoint={"graceSeconds": 600})
    story.until_job()
    story.edit(suspend=True)
    assert_nothing_runs(story)
    assert "before the trainer had started" in story.attempts[0]["message"]


def test_a_training_may_be_created_suspended(story: Story):
    story.apply(suspend=True)
    story.until_state("Suspended")
    assert story.mine("rayjobs") == []
    assert story.attempts == []
    story.edit(suspend=False)
    story.until_job()


def test_a_suspension_taken_back_ends_the_attempt_all_the_same(story: Story):
    story.apply(checkpoint={"graceSeconds": 3})
    story.until_job()
    story.report()
    story.until_state("Running")
    story.edit(suspend=True)
    story.until(lambda: story.order, "it is asked to stop")
    story.edit(suspend=False)
    story.until_job(2)
    assert story.attempts[0]["outcome"] == "Suspended"
    assert story.restarts == 0


def test_a_training_in_backoff_can_be_suspended(story: Story):
    story.apply(failurePolicy={"maxRestarts": 3, "backoffSeconds": 600})
    story.until_job()
    story.report("Failed", reason="WorkerLost", message="a rank is gone")
    story.until_condition("Reconciling", "True", "Backoff")
    story.plane.api.request("DELETE", story.path("rayjobs", "demo-1"))
    story.edit(suspend=True)
    assert_nothing_runs(story)
    assert (story.attempts[0]["outcome"], story.restarts) == ("Failed", 1)


def test_a_failure_while_stopping_is_a_stop(story: Story):
    story.apply(checkpoint={"graceSeconds": 600})
    story.until_job()
    story.report()
    story.until_state("Running")
    story.edit(suspend=True)
    story.until_state("Suspending")
    story.report("Failed", reason="WorkerLost", message="a rank is gone")
    assert_nothing_runs(story)
    assert (story.attempts[0]["outcome"], story.restarts) == ("Suspended", 0)
    assert "WorkerLost while stopping" in story.attempts[0]["message"]


def test_an_unreadable_report_does_not_cost_the_checkpoint(story: Story):
    story.apply(checkpoint={"graceSeconds": 600})
    story.until_job()
    story.report()
    story.until_state("Running")
    story.write("garbage")
    story.until_condition("Degraded", "True", "ProgressUnreadable")
    story.edit(suspend=True)
    story.until_condition("Reconciling", "True", "Stopping")
    assert story.job() is not None
    assert story.order is not None


def test_a_changed_spec_waits_for_the_next_attempt(story: Story):
    story.apply(suspend=True)
    story.until_state("Suspended")
    story.edit(suspend=False, train={"updates": 7})
    story.until_job()
    config = story.get("configmaps", "demo-config")["data"]["training.yaml"]
    assert "updates: 7" in config
