"""Any order of anything: the operator crashes between writes, pods fail, users edit, the trainer speaks or does not."""

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.operator.reconcile.world import World
from tests.profiles import examples


class Trainings(RuleBasedStateMachine):
    """One training, every party taking its steps when it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.said_success = False

    @property
    def newest(self):
        return max(self.world.jobs.values(), key=lambda job: job.attempt, default=None)

    @rule(writes=st.none() | st.integers(0, 8))
    def reconcile(self, writes):
        self.world.reconcile(writes=writes)

    @rule()
    def kuberay(self):
        self.world.kuberay()

    @rule(seconds=st.sampled_from([1, 10, 60, 400, 4000]))
    def wait(self, seconds):
        self.world.wait(seconds)

    @rule(suspend=st.booleans())
    def suspend(self, suspend):
        self.world.edit(suspend=suspend)

    @rule(nodes=st.integers(1, 4))
    def scale(self, nodes):
        self.world.edit(rollout={"nodes": nodes})

    @rule(rate=st.sampled_from([1e-6, 2e-6]))
    def change(self, rate):
        self.world.edit(train={"optimizer": {"learningRate": rate}})

    @precondition(lambda self: self.world.jobs)
    @rule(ok=st.booleans(), reason=st.sampled_from(["", "AppFailed", "SubmissionFailed"]))
    def job_ends(self, ok, reason):
        self.world.finish_job(ok=ok, reason=reason)

    @precondition(lambda self: self.world.jobs)
    @rule()
    def job_is_deleted(self):
        job = self.newest
        del self.world.jobs[job.name]
        self.world._forget(job)

    @precondition(lambda self: self.world.pods)
    @rule(
        pool=st.sampled_from(["head", "train"]), reason=st.sampled_from(["OOMKilled", "Preempted", "NodeLost", "Error"])
    )
    def pod_fails(self, pool, reason):
        self.world.fault(pool, reason)

    @precondition(lambda self: self.newest is not None and self.newest.deployment == "Running")
    @rule(state=st.sampled_from(["Running", "Running", "Failed", "Stopped"]), seconds=st.none() | st.floats(0.1, 100))
    def trainer_reports(self, state, seconds):
        self.world.report(state, versionTime=self.world.now.timestamp(), versionSeconds=seconds)

    @precondition(lambda self: self.newest is not None and self.newest.deployment == "Running" and self.world.order)
    @rule()
    def trainer_obeys(self):
        self.world.obey()

    @precondition(lambda self: self.newest is not None and self.newest.deployment == "Running")
    @rule()
    def trainer_succeeds(self):
        self.said_success = True
        self.world.report("Succeeded")

    @invariant()
    def two_attempts_never_have_pods_at_once(self):
        assert len({pod.attempt for pod in self.world.pods.values()}) <= 1

    @invariant()
    def success_is_only_what_was_said(self):
        assert self.said_success or self.world.status.state != "Succeeded"

    @invariant()
    def attempts_count_up_and_only_the_last_is_open(self):
        numbers = [attempt.number for attempt in self.world.status.attempts]
        assert numbers == sorted(set(numbers))
        assert all(attempt.outcome != "Running" for attempt in self.world.status.attempts[:-1])

    @invariant()
    def no_more_restarts_than_allowed(self):
        assert self.world.status.restarts <= 2

    def teardown(self):
        """Left alone, it comes to rest: running, suspended or over, and not a write more."""
        world = self.world
        for _ in range(12):
            world.delete_failed_pods()
            world.settle(8)
            world.wait(4000)
            job = self.newest
            if (
                job is not None
                and job.deployment == "Running"
                and world.status.state in ("Starting", "Running", "Restarting")
            ):
                world.report(update=1)
        world.reconcile()
        assert world.status.state in ("Running", "Suspended", "Succeeded", "Failed"), world.status.state
        before = world.writes
        for _ in range(3):
            world.reconcile()
        assert world.writes == before


TestTrainings = Trainings.TestCase
# Explaining a failure takes minutes and says little of a story of forty steps.
TestTrainings.settings = settings(
    max_examples=examples(30),
    stateful_step_count=30,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)


def test_a_training_starts_after_a_rollout_pod_has_failed_before_all_were_ready():
    """Found by the random stories: KubeRay replaces the pod, and the attempt continues without a restart."""
    story = Trainings()
    story.reconcile(writes=None)
    story.kuberay()
    story.pod_fails(pool="rollout", reason="OOMKilled")
    story.world.reconcile()
    assert story.world.condition("Degraded").reason == "PodFault"
    story.teardown()
    assert (story.world.status.state, story.world.status.restarts) == ("Running", 0)
    assert not story.world.is_true("Degraded")
