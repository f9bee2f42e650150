"""Mistakes in what the operator decides about a training, and in how it writes that to the cluster."""

from functools import partial

from tests.mutants.mutant import Mutant

mutant = partial(Mutant, folders=("tests/operator/reconcile", "tests/upgrade", "tests/operator", "tests/controlplane"))

RECONCILE = (
    mutant(
        name="A deletion names no uid, so that it deletes a later object of the same name.",
        file="operator/qwen35_operator/reconcile/writer.py",
        old='{"propagationPolicy": "Background", "preconditions": {"uid": delete.uid}}',
        new='{"propagationPolicy": "Background"}',
        killer="tests/operator/reconcile/test_writer.py::test_a_later_object_of_the_name_is_not_deleted",
    ),
    mutant(
        name="The status is written over one that has changed since it was read.",
        file="operator/qwen35_operator/reconcile/reconciler.py",
        old='"metadata": {"resourceVersion": observed.version}, "status"',
        new='"status"',
        killer="tests/operator/reconcile/test_reconciler.py::test_the_status_is_written_only_over_the_one_that_was_read",
    ),
    mutant(
        name="An object that another training owns is taken for this training's child.",
        file="operator/qwen35_operator/reconcile/observe.py",
        old="for child in records if isinstance(child, Child) and child.owner == uid}",
        new="for child in records if isinstance(child, Child)}",
        killer="tests/operator/reconcile/test_observe.py::test_what_has_another_owner_is_not_its_child",
    ),
    mutant(
        name="Every attempt that ends counts as a restart, preempted and suspended ones too.",
        file="operator/qwen35_operator/reconcile/attempts.py",
        old='"restarts": restarts + counted,',
        new='"restarts": restarts + 1,',
        killer="tests/operator/reconcile/test_failure_rules.py::test_a_preemption_does_not_use_up_restarts",
    ),
    mutant(
        name="A training gets one restart more than maxRestarts.",
        file="operator/qwen35_operator/reconcile/completion.py",
        old="if counted and restarts >= policy.maxRestarts:",
        new="if counted and restarts > policy.maxRestarts:",
        killer="tests/operator/reconcile/test_completion.py::test_a_job_whose_restarts_are_used_up_has_failed",
    ),
    mutant(
        name="The backoff is doubled once too often.",
        file="operator/qwen35_operator/reconcile/failure_rules.py",
        old="backoff_seconds(failures, first=seconds",
        new="backoff_seconds(failures + 1, first=seconds",
        killer="tests/operator/reconcile/test_failure_rules.py::test_the_backoff_doubles_up_to_an_hour",
    ),
    mutant(
        name="The next attempt starts on a timer, while a train pod of the earlier one may still run and write.",
        file="operator/qwen35_operator/reconcile/leftovers.py",
        old="(_writes(pod) or _deleted_for(pod, now) < LOST_POD_SECONDS)",
        new="_deleted_for(pod, now) < LOST_POD_SECONDS",
        killer="tests/operator/reconcile/test_start.py::test_a_pod_that_may_write_holds_up_the_next_attempt_until_there_is_a_proof_of_its_end",
    ),
    mutant(
        name="The deadline counts the present attempt only.",
        file="operator/qwen35_operator/reconcile/situation.py",
        old="return self.status.activeSeconds + attempts.active_seconds",
        new="return attempts.active_seconds",
        killer="tests/operator/reconcile/test_stop.py::test_the_deadline_counts_all_attempts_and_stops_the_last_one",
    ),
    mutant(
        name="The rollout pool is resized again before its last change has settled.",
        file="operator/qwen35_operator/reconcile/elasticity.py",
        old="unchanged = min(seconds_since(time, situation.now) for time in times if time)",
        new="unchanged = max(seconds_since(time, situation.now) for time in times if time)",
        killer="tests/operator/reconcile/test_elasticity.py::test_after_a_change_it_waits_before_the_next",
    ),
    mutant(
        name="A trainer whose clock is off is corrected in the wrong direction, and taken for stalled.",
        file="operator/qwen35_operator/reconcile/stall.py",
        old="(now - at(progress.versionTime)).total_seconds() - (skew(report) or 0.0)",
        new="(now - at(progress.versionTime)).total_seconds() + (skew(report) or 0.0)",
        killer="tests/operator/reconcile/test_completion.py::test_a_trainer_whose_clock_is_off_is_not_taken_for_stalled",
    ),
)
