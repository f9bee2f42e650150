"""The rules of the failure policy, the user's and the built-in ones."""

from dataclasses import replace

import pytest

from qwen35_operator.reconcile.cleanup import MAX_ENDED_JOBS
from qwen35_operator.reconcile.completion import MAX_UNCOUNTED_IN_A_ROW
from qwen35_operator.reconcile.failure_rules import BUILT_IN, Evidence, apply_rules, backoff
from qwen35_trainer.contract import FailureReason
from qwen35_trainer.manifest.failure import FailureRuleSpec
from tests.operator.reconcile.world import World

# What was seen, and what follows.
CASES = [
    (Evidence("Preempted", pool="rollout"), "RestartAndIgnoreMaxRestarts", "preempted"),
    (Evidence("Evicted", pool="train"), "RestartAndIgnoreMaxRestarts", "preempted"),
    (Evidence("NodeLost", pool="head"), "Restart", "node-lost"),
    (Evidence("DataError"), "Fail", "not-retryable"),
    (Evidence("ManifestError"), "Fail", "not-retryable"),
    (Evidence("ValidationFailed"), "Fail", "invalid-job"),
    (Evidence("OOMKilled", pool="train", trained=False), "Fail", "out-of-memory-at-start"),
    (Evidence("OOMKilled", pool="train", trained=True), "Restart", "out-of-memory"),
    (Evidence("OOMKilled", pool="rollout", trained=False), "Restart", "out-of-memory"),
    *((Evidence(reason), "Fail", "not-retryable") for reason in FailureReason if not reason.retryable),
    (Evidence("OutOfMemory", pool="head", trained=False), "Fail", "out-of-memory-at-start"),
    (Evidence("OutOfMemory", pool="head", trained=True), "Restart", "out-of-memory"),
    (Evidence("Superseded", pool="head"), "RestartAndIgnoreMaxRestarts", "superseded"),
    (Evidence("Stalled"), "Restart", "anything-else"),
    (Evidence("NoFinalState"), "Restart", "anything-else"),
]


@pytest.mark.parametrize(("seen", "action", "rule"), CASES)
def test_what_the_built_in_rules_say(seen, action, rule):
    judged = apply_rules((), [seen])
    assert (judged.action, judged.rule) == (action, rule)


def test_every_built_in_rule_has_a_case():
    assert {rule for _, _, rule in CASES} == {rule.name for rule in BUILT_IN}


def rule(**fields) -> FailureRuleSpec:
    return FailureRuleSpec.model_validate({"name": "mine", "action": "Fail", **fields})


@pytest.mark.parametrize(
    ("own", "matching", "other"),
    [
        ({"onPool": "train"}, Evidence("Error", pool="train"), Evidence("Error", pool="rollout")),
        ({"onExitCodes": [42]}, Evidence("Error", exit_code=42), Evidence("Error", exit_code=1)),
        ({"onReasons": ["OOMKilled"]}, Evidence("OOMKilled"), Evidence("Evicted")),
        (
            {"onMessagePattern": "NCCL .*timeout"},
            Evidence("Error", "NCCL op timeout"),
            Evidence("Error", "HCCL timeout"),
        ),
        (
            {"onPool": "train", "onReasons": ["Error"]},
            Evidence("Error", pool="train"),
            Evidence("Error", pool="head"),
        ),
    ],
)
def test_a_rule_matches_when_all_that_it_names_holds(own, matching, other):
    assert apply_rules([rule(**own)], [matching]).rule == "mine"
    assert apply_rules([rule(**own)], [other]).rule != "mine"


def test_own_rules_come_first_and_in_their_order():
    rules = [rule(name="first", onReasons=["Preempted"]), rule(name="second", action="Restart")]
    assert apply_rules(rules, [Evidence("Preempted")]).rule == "first"
    assert apply_rules(rules, [Evidence("Error")]).rule == "second"


def test_a_rule_may_match_any_piece_of_evidence():
    judged = apply_rules(
        [rule(onReasons=["OOMKilled"])], [Evidence("NoFinalState"), Evidence("OOMKilled", "pod a: 64Gi")]
    )
    assert judged.evidence.message == "pod a: 64Gi"


def test_a_rule_that_names_nothing_matches_everything():
    assert apply_rules([rule()], [Evidence("Anything")]).rule == "mine"


def test_the_backoff_doubles_up_to_an_hour():
    assert [backoff(10, restarts) for restarts in (0, 1, 2, 3, 20)] == [10, 10, 20, 40, 3600]
    assert backoff(7200, 5) == 7200
    assert backoff(0, 5) == 0
    assert [backoff(0, failures) for failures in (6, 7, 8, 40)] == [10, 20, 40, 3600]
    assert backoff(1, 6) == 32, "the longer of both"


def test_a_preemption_does_not_use_up_restarts():
    world = World()
    world.until_running()
    for _ in range(5):
        world.fault("train", "Preempted")
        world.finish_job(ok=False)
        world.reconcile()
        world.wait(600)  # longer than the waits, which double
        world.settle()
        world.report(update=1)
    assert world.status.restarts == 0
    assert world.status.state in ("Running", "Starting")
    assert [attempt.counted for attempt in world.status.attempts[:-1]] == [False] * 5


def test_an_old_attempt_that_finds_itself_superseded_costs_the_new_one_nothing():
    world = World()
    world.until_running()
    world.report("Failed", reason="WorkerLost")
    world.finish_job(ok=False)
    world.reconcile()
    world.wait(600)
    world.settle()
    world.report(attempt=2, update=9)
    world.reconcile()
    restarts = world.status.restarts
    world.report("Failed", attempt=1, reason="Superseded", message="taken over by attempt 2")
    world.reconcile()
    assert [(attempt.number, attempt.outcome) for attempt in world.status.attempts] == [(1, "Failed"), (2, "Running")]
    world.report("Failed", attempt=2, reason="Superseded", message="the operator counts on this one")
    world.reconcile()
    assert world.status.attempts[-1].reason == "Superseded"
    assert (world.status.restarts, world.status.state) == (restarts, "Restarting")


@pytest.mark.parametrize("pool", ["head", "rollout", "train"])
def test_a_preemption_of_a_pod_that_starts_does_not_use_up_restarts(pool):
    world = World()
    world.settle()
    assert world.status.state == "Starting"
    world.fault(pool, "Preempted")
    if pool == "head":  # SIGTERM reaches the trainer before it has begun
        world.report("Stopped", reason="Interrupted", message="ended by a signal before the training began")
    else:
        world.finish_job(ok=False)
    world.reconcile()
    (lost,) = world.status.attempts
    assert (lost.reason, lost.counted) == ("Preempted", False)
    world.wait(60)
    world.settle()
    assert "demo-2" in world.jobs
    assert world.status.restarts == 0


def test_a_fault_outlasts_the_pod_that_had_it():
    world = World()
    world.until_running()
    name = world.fault("train", "OOMKilled", 137)
    world.reconcile()
    assert world.status.attempts[-1].fault.pod == name
    assert world.condition("Degraded").reason == "PodFault"
    del world.pods[name]
    world.wait(200)
    world.finish_job(ok=False, reason="JobStatusCheckTimeoutExceeded", message="no answer")
    world.reconcile()
    assert world.status.attempts[-1].reason == "OOMKilled"


def test_a_fault_that_was_survived_long_ago_explains_nothing():
    world = World()
    world.until_running()
    name = world.fault("rollout", "Preempted")
    world.reconcile()
    del world.pods[name]
    world.wait(3600)
    world.finish_job(ok=False, message="NCCL timed out")
    world.reconcile()
    assert world.status.attempts[-1].reason == "AppFailed"
    assert world.status.restarts == 1


def test_a_lost_head_ends_the_attempt_whatever_kuberay_does_about_it():
    world = World()
    world.until_running()
    world.fault("head", "OOMKilled", 137)
    world.reconcile()
    assert world.status.attempts[-1].reason == "OOMKilled"
    assert world.status.restarts == 1
    world.wait(60)
    world.settle(3)
    assert "demo-1" not in world.jobs
    assert "demo-2" in world.jobs


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|aa)+$", "(.*)*x$", "(a?){500}a{500}$"])
def test_no_expression_of_a_user_holds_up_the_operator(pattern):
    """With Python's `re`, the first of these takes a day for 40 characters."""
    own = rule(onMessagePattern=pattern)
    assert apply_rules([own], [Evidence("Error", "a" * 4000 + "!")]).rule == "anything-else"


def test_a_rule_searches_what_a_trainer_can_say_and_no_more():
    own = rule(onMessagePattern="needle")
    assert apply_rules([own], [Evidence("Error", " " * 4090 + "needle")]).rule == "mine"
    assert apply_rules([own], [Evidence("Error", " " * 4091 + "needle")]).rule == "anything-else"


def test_the_larger_an_expression_the_less_of_all_messages_it_searches():
    """One with 3,000 instructions would take 0.1 s for each message, and there can be 32 rules and a thousand failed pods."""
    many = [Evidence("Error", "a" * 400) for _ in range(1000)]
    large, small = (rule(onMessagePattern=pattern) for pattern in (r"(\w\w?){300}", "a{300}b|needle"))
    assert apply_rules([large], many).rule == "mine"
    assert apply_rules([large], [*[Evidence("Error", ".")] * 1000, many[0]]).rule == "anything-else"
    assert apply_rules([small], [*many[:5], Evidence("Error", "needle")]).rule == "mine"
    assert apply_rules([small], [*many, Evidence("Error", "needle")]).rule == "anything-else"


def test_an_expression_that_only_an_earlier_release_accepted_matches_nothing():
    own = rule(onMessagePattern="(?=look)ahead")
    assert apply_rules([own], [Evidence("Error", "lookahead")]).rule == "anything-else"


def test_an_eviction_that_was_survived_does_not_hide_the_trainers_own_word():
    world = World()
    world.until_running()
    name = world.fault("rollout", "Evicted")
    world.reconcile()
    world.pods[name] = replace(world.pods[name], reason="", ready=True)
    world.wait(300)
    world.report(update=6, version=6)
    world.reconcile()
    world.report("Failed", reason="DataError", message="prompts.jsonl line 7 is not JSON")
    world.reconcile()
    (attempt,) = world.status.attempts
    assert (world.status.state, attempt.reason) == ("Failed", "DataError")


@pytest.mark.parametrize("reported", ["WorkerLost", "Stalled", "UnexpectedError"])
def test_a_preempted_pod_explains_what_its_loss_did_to_the_trainer(reported):
    world = World()
    world.until_running()
    world.fault("train", "Preempted")
    world.report("Failed", reason=reported)
    world.reconcile()
    (attempt,) = world.status.attempts
    assert (attempt.reason, attempt.counted) == ("Preempted", False)


def test_the_pool_that_an_attempt_cannot_live_without_explains_more_than_the_other():
    world = World()
    world.until_running()
    world.fault("rollout", "Preempted")
    world.fault("train", "OOMKilled", 137)
    world.report("Failed", reason="WorkerLost")
    world.reconcile()
    assert (world.status.attempts[0].reason, world.status.restarts) == ("OOMKilled", 1)


def failing(world: World, *, update: int, **fault) -> float:
    """Let the newest attempt reach an update and fail. Returns the wait for the next one."""
    world.report(state="Running", reason=None, update=update)
    world.reconcile()
    if fault:
        world.fault(**fault)
    world.finish_job(ok=False)
    world.reconcile()
    wait = world.wanted_after
    world.wait(wait or 0)
    world.settle(4)
    return wait


def test_restarts_that_do_not_count_wait_longer_and_longer_and_end():
    world = World()
    world.until_running()
    waits = []
    while world.status.state != "Failed" and len(waits) < 100:
        waits.append(failing(world, update=1, pool="train", reason="Evicted"))
    assert waits[:5] == [10, 20, 40, 80, 160]
    assert max(wait for wait in waits if wait) == 3600
    assert (len(world.status.attempts), world.status.restarts) == (MAX_UNCOUNTED_IN_A_ROW + 1, 0)
    assert world.condition("Failed").reason == "RestartsExhausted"
    assert "got no further" in world.condition("Failed").message


def test_evictions_of_a_training_that_gets_on_are_never_too_many():
    world = World()
    world.until_running()
    for update in range(2, 60):
        assert failing(world, update=update, pool="train", reason="Evicted") == 10
    assert world.status.state in ("Starting", "Running")
    assert len(world.jobs) <= MAX_ENDED_JOBS + 1, "old RayJobs do not pile up"


def test_rare_faults_of_a_long_training_do_not_add_up():
    world = World()  # with maxRestarts 2
    world.until_running()
    for week in range(1, 8):
        world.wait(7 * 86_400)
        failing(world, update=1000 * week)
        assert world.status.restarts == 1
    assert world.status.state in ("Starting", "Running")


def test_a_training_that_runs_for_hours_but_gets_no_further_uses_up_its_restarts():
    world = World()
    world.until_running()
    for _ in range(3):
        world.wait(7200)
        failing(world, update=500)
    assert world.condition("Failed").reason == "RestartsExhausted"
