"""Suspending: the trainer saves, says so, and nothing is left running; resuming continues from there."""

from functools import partial

import pytest

from qwen35_operator.desired.object_names import LAST_CHECKPOINT
from qwen35_operator.status.times import parse
from tests.controlplane.live_training import LiveTraining

pytestmark = pytest.mark.worlds("memory")


def assert_nothing_runs(live_training: LiveTraining) -> None:
    live_training.until_state("Suspended")
    for kind in ("rayclusters", "pods"):
        assert live_training.mine(kind) == []
    live_training.until(lambda: not live_training.mine("rayjobs"), "its job, which is over, is gone as well")
    assert live_training.condition("Suspended") == live_training.condition("Ready") == ("True", "Suspended")
    assert live_training.condition("Reconciling")[0] == "False"


@pytest.mark.worlds("memory", "real")
def test_a_job_saves_stops_and_continues_where_it_was(live_training: LiveTraining, ray_jobs: None):
    live_training.apply(script=[[{"publish": 2}, "obey"], [{"report": {"update": 2}}, {"succeed": "all done"}]])
    live_training.until_state("Running")
    live_training.until(lambda: live_training.status["progress"]["update"], "it trains")
    live_training.edit(suspend=True)
    assert_nothing_runs(live_training)
    assert live_training.status["lastCheckpoint"]["update"] == 2
    (attempt,) = live_training.attempts
    assert (attempt["outcome"], attempt["reason"], attempt["counted"]) == ("Suspended", "Suspend", False)
    live_training.edit(suspend=False)
    live_training.until_state("Succeeded")
    assert [item["outcome"] for item in live_training.attempts] == ["Suspended", "Succeeded"]
    assert live_training.restarts == 0


def test_the_trainer_is_given_time_to_answer(live_training: LiveTraining):
    live_training.apply(checkpoint={"graceSeconds": 600})
    live_training.until_job()
    live_training.report()
    live_training.until_state("Running")
    live_training.edit(suspend=True)
    live_training.until_condition("Reconciling", "True", "Stopping")
    assert live_training.job() is not None
    order = live_training.order
    assert order is not None
    assert order["reason"] == "Suspend"
    live_training.report(stopAcknowledged=order["id"], phase="saving")
    live_training.until(
        lambda: "is ending" in live_training.whole_condition("Reconciling")["message"], "the acknowledgement is seen"
    )
    assert live_training.job() is not None
    saved = {"uri": "/checkpoints/update-1", "update": 1, "time": order["time"]}
    live_training.report("Stopped", stopAcknowledged=order["id"], checkpoint=saved)
    assert_nothing_runs(live_training)
    assert live_training.status["lastCheckpoint"]["uri"] == "/checkpoints/update-1"


def test_an_answer_to_an_earlier_order_is_none(live_training: LiveTraining):
    live_training.apply(checkpoint={"graceSeconds": 600})
    live_training.until_job()
    live_training.report(stopAcknowledged="0-Suspend")
    live_training.until_state("Running")
    live_training.edit(suspend=True)
    live_training.until_condition("Reconciling", "True", "Stopping")
    assert "has not answered yet" in live_training.whole_condition("Reconciling")["message"]


def test_a_silent_trainer_is_stopped_when_its_grace_is_over(live_training: LiveTraining):
    live_training.apply(checkpoint={"graceSeconds": 2})
    live_training.until_job()
    live_training.report()
    live_training.until_state("Running")
    live_training.edit(suspend=True)
    assert_nothing_runs(live_training)
    assert "graceSeconds 2 are over" in live_training.attempts[0]["message"]


def test_before_the_trainer_has_spoken_there_is_nothing_to_wait_for(live_training: LiveTraining):
    live_training.apply(checkpoint={"graceSeconds": 600})
    live_training.until_job()
    live_training.edit(suspend=True)
    assert_nothing_runs(live_training)
    assert "before the trainer had started" in live_training.attempts[0]["message"]


def test_a_training_may_be_created_suspended(live_training: LiveTraining):
    live_training.apply(suspend=True)
    live_training.until_state("Suspended")
    assert live_training.mine("rayjobs") == []
    assert live_training.attempts == []
    live_training.edit(suspend=False)
    live_training.until_job()


def test_a_suspension_taken_back_still_ends_the_attempt(live_training: LiveTraining):
    live_training.apply(checkpoint={"graceSeconds": 3})
    live_training.until_job()
    live_training.report()
    live_training.until_state("Running")
    live_training.edit(suspend=True)
    live_training.until(lambda: live_training.order, "it is asked to stop")
    live_training.edit(suspend=False)
    live_training.until_job(2)
    assert live_training.attempts[0]["outcome"] == "Suspended"
    assert live_training.restarts == 0


def test_a_training_in_backoff_can_be_suspended(live_training: LiveTraining):
    live_training.apply(failurePolicy={"maxRestarts": 3, "backoffSeconds": 600})
    live_training.until_job()
    live_training.report("Failed", reason="WorkerLost", message="a rank is gone")
    live_training.until_condition("Reconciling", "True", "Backoff")
    live_training.plane.api.request("DELETE", live_training.path("rayjobs", "demo-1"))
    live_training.edit(suspend=True)
    assert_nothing_runs(live_training)
    assert (live_training.attempts[0]["outcome"], live_training.restarts) == ("Failed", 1)


def test_a_failure_while_stopping_is_a_stop(live_training: LiveTraining):
    live_training.apply(checkpoint={"graceSeconds": 600})
    live_training.until_job()
    live_training.report()
    live_training.until_state("Running")
    live_training.edit(suspend=True)
    live_training.until_state("Suspending")
    live_training.report("Failed", reason="WorkerLost", message="a rank is gone")
    assert_nothing_runs(live_training)
    assert (live_training.attempts[0]["outcome"], live_training.restarts) == ("Suspended", 0)
    assert "WorkerLost while stopping" in live_training.attempts[0]["message"]


def test_an_unreadable_report_does_not_cost_the_checkpoint(live_training: LiveTraining):
    live_training.apply(checkpoint={"graceSeconds": 600})
    live_training.until_job()
    live_training.report()
    live_training.until_state("Running")
    live_training.write("garbage")
    live_training.until_condition("Degraded", "True", "ProgressUnreadable")
    live_training.edit(suspend=True)
    live_training.until_condition("Reconciling", "True", "Stopping")
    assert live_training.job() is not None
    assert live_training.order is not None


def test_a_changed_spec_waits_for_the_next_attempt(live_training: LiveTraining):
    live_training.apply(suspend=True)
    live_training.until_state("Suspended")
    live_training.edit(suspend=False, train={"updates": 7})
    live_training.until_job()
    config = live_training.get("configmaps", "demo-config")["data"]["training.yaml"]
    assert "updates: 7" in config


@pytest.mark.worlds("memory", "real")
def test_a_training_saves_before_it_is_deleted_if_its_user_wants_that(live_training: LiveTraining, ray_jobs: None):
    live_training.apply(script=[[{"publish": 2}, "obey"]])
    path = live_training.path("qwen35trainings")
    live_training.patch(path, {"metadata": {"finalizers": [LAST_CHECKPOINT, "test.qwen35.io/kept"]}})
    live_training.until_state("Running")
    live_training.until(lambda: live_training.status["progress"]["update"], "it trains")
    live_training.delete()
    live_training.until(lambda: live_training.body["metadata"]["finalizers"] == ["test.qwen35.io/kept"], "it may go")
    assert live_training.attempts[-1]["reason"] == "Deleted"
    assert live_training.status["lastCheckpoint"]["update"] == 2
    live_training.patch(path, {"metadata": {"finalizers": []}})
    live_training.until(
        lambda: not any(map(live_training.mine, ("rayjobs", "pods", "configmaps"))), "its children go too"
    )


def _has_attempts(live_training: LiveTraining, count: int) -> bool:
    return len(live_training.attempts) == count


def test_a_program_that_suspends_and_resumes_in_a_loop_has_to_wait(live_training: LiveTraining):
    live_training.apply()
    for attempt in range(1, 5):
        live_training.until_job(attempt)
        # Before that, the state is still that of the last suspension.
        live_training.until(partial(_has_attempts, live_training, attempt), f"the status records attempt {attempt}")
        live_training.edit(suspend=True)
        live_training.until_state("Suspended")
        live_training.edit(suspend=False)
    live_training.until_condition("Reconciling", "True", "ChangedTooOften")
    assert live_training.state == "Starting"
    assert live_training.mine("rayjobs") == []
    live_training.until_job(5)
    live_training.until(partial(_has_attempts, live_training, 5), "the status records the attempt")
    stopped, started = live_training.attempts[3]["endTime"], live_training.attempts[4]["startTime"]
    assert (parse(started) - parse(stopped)).total_seconds() >= 10
    assert live_training.restarts == 0
