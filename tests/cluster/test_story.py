"""One training in pods, from its first update to its end, and all that is asked of it and done to it in between.

trains ─► one more rollout pod, one less ─► parts are killed and restarted: the attempt continues
       ─► a train pod (or the head) is killed, the node is drained: the next attempt continues from the checkpoint
       ─► suspended, resumed ─► ends; each prompt has trained exactly once, and the reward is learned
"""

import subprocess
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import pytest

from qwen35_trainer.progress.records import EvaluationRecord
from tests.cluster.cluster import Cluster
from tests.cluster.node import REPOSITORY
from tests.cluster.release import Release
from tests.cluster.training import TRAIN_PODS, PodTraining
from tests.patience import PATIENCE
from tests.profiles import SOAK

pytestmark = pytest.mark.timeout(1800)
LONG, REST = 1000, 5
"""Updates: more than all that is done to it needs, and how many more there are when that is over."""
EVICTED = {"Evicted"}
KILLED = {"train": {"WorkerLost"}, "head": {"HeadLost", "Interrupted"}}
"""By pool, what docs/failure-modes.md has as reasons."""
CALL = """
import os, sys, urllib.error, urllib.request
token = {"with": os.environ["RAY_AUTH_TOKEN"], "wrong": "0" * 44}.get(sys.argv[1])
headers = {"Authorization": f"Bearer {token}"} if token else {}
try:
    print(urllib.request.urlopen(urllib.request.Request("http://127.0.0.1:8265/api/jobs/", headers=headers)).status)
except urllib.error.HTTPError as refused:
    print(refused.code)
except urllib.error.URLError as away:
    print(away.reason)
"""
"""Requests the jobs from Ray's dashboard, from within a pod, and prints the HTTP status."""
RANKS = "import glob; print(sum(open(file).read().startswith('ray::Train') for file in glob.glob('/proc/[0-9]*/comm')))"
"""Prints how many train workers a pod has."""


def pools_killed() -> list[str]:
    """Both in soak. Otherwise one, which depends on the sources alone: changes take turns, and a run can be repeated."""
    if SOAK:
        return list(KILLED)
    completed = subprocess.run(
        ["git", "rev-parse", "HEAD^{tree}"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    return [list(KILLED)[int(completed.stdout or "0", 16) % 2]]


@pytest.fixture(scope="class")
def training(cluster: Cluster, shared_namespace: str) -> Iterator[PodTraining]:
    # A new replica starts more slowly than many updates of this small model: that is not a stall.
    policy = {"maxRestarts": 3, "backoffSeconds": 0, "stallFactor": 1000.0}
    training = PodTraining.begin(cluster, shared_namespace, "disturbed", LONG, failurePolicy=policy)
    training.until_trained(2)
    yield training
    training.delete_and_see_that_nothing_is_left()


class TestOneTraining:
    """In this order."""

    def test_two_train_pods_train_as_one_with_a_users_reward_function(self, training: PodTraining) -> None:
        pods = training.pods("train")
        assert len(pods) == TRAIN_PODS
        assert [training.kubectl("exec", pod, "--", "python", "-c", RANKS).strip() for pod in pods] == ["1", "1"]
        training.until_saved()
        assert len(list(training.checkpoint.glob("random-*.pt"))) == TRAIN_PODS, "each rank saves what is its own"
        assert all(record.reward_errors == 0 for record in training.trained())
        assert any(record.reward_mean for record in training.trained())

    def test_ray_answers_only_calls_with_the_clusters_token(self, training: PodTraining) -> None:
        (head,) = training.pods("head")
        answers = {
            token: training.kubectl("exec", head, "--", "python", "-c", CALL, token).strip()
            for token in ("without", "wrong", "with")
        }
        assert answers == {"without": "401", "wrong": "403", "with": "200"}

    def test_a_second_rollout_node_works_along(self, training: PodTraining) -> None:
        training.kubectl("scale", "qwen35training", training.name, "--replicas=2")
        training.until(lambda: len(training.generating()) == 2, "two replicas")
        assert training.generating() == set(training.pods("rollout"))
        _trains_on(training)

    def test_and_leaves_without_a_pause(self, training: PodTraining) -> None:
        training.kubectl("scale", "qwen35training", training.name, "--replicas=1")
        training.until(lambda: len(training.pods("rollout")) == 1, "one rollout pod")
        training.until(lambda: len(training.generating()) == 1, "one replica")
        assert training.generating() == set(training.pods("rollout"))
        _trains_on(training)

    def test_another_replica_takes_the_place_of_one_whose_pod_is_killed(self, training: PodTraining) -> None:
        lost = training.delete_pod("rollout")
        training.until(lambda: training.pods("rollout") not in ([], [lost]), "another rollout pod")
        training.until(lambda: training.generating() == set(training.pods("rollout")), "another replica")
        _trains_on(training)

    def test_the_next_operator_continues_where_the_last_one_was_killed(
        self, training: PodTraining, release: Release
    ) -> None:
        release.kill_operator()
        heard = training.update
        with training.quick():
            training.until(lambda: training.update > heard, "the next operator hears of an update")
        _trains_on(training)

    def test_pods_train_on_while_the_kubelet_restarts(self, training: PodTraining, cluster: Cluster) -> None:
        before = [training.pods(pool) for pool in ("head", "rollout", "train")]
        cluster.node.kubelet.stop()
        try:
            training.until_trained()
        finally:
            cluster.node.kubelet.start()
        _trains_on(training)
        assert [training.pods(pool) for pool in ("head", "rollout", "train")] == before

    def test_pods_train_on_while_the_api_server_restarts(self, training: PodTraining, cluster: Cluster) -> None:
        cluster.restart_api_server()
        _trains_on(training)

    @pytest.mark.parametrize("pool", pools_killed())
    def test_the_next_attempt_follows_when_a_pod_is_killed(self, training: PodTraining, pool: str) -> None:
        with _the_next_attempt(training, counted=True, reasons=KILLED[pool]):
            training.delete_pod(pool)

    def test_the_next_attempt_follows_uncounted_when_the_node_is_drained(
        self, training: PodTraining, cluster: Cluster
    ) -> None:
        with _the_next_attempt(training, counted=False, reasons=EVICTED), _drained(cluster, training):
            training.until(
                lambda: "Unschedulable" in training.whole_condition("Degraded").get("message", ""), "it waits"
            )
            assert training.condition("Degraded") == ("True", "PodFault")
            assert training.condition("ClusterReady")[0] == "False"

    def test_suspended_it_has_no_pods_and_a_checkpoint_of_all_it_trained(self, training: PodTraining) -> None:
        training.edit(suspend=True)
        training.until_state("Suspended")
        training.until(lambda: not training.mine("pods"), "no pods")
        assert training.status["lastCheckpoint"]["update"] == training.trained()[-1].update

    def test_a_resumed_training_continues_and_each_prompt_trains_exactly_once(self, training: PodTraining) -> None:
        before, saved = len(training.attempts), training.status["lastCheckpoint"]["update"]
        training.edit(suspend=False, train={"updates": saved + REST})
        with training.quick():
            training.until_state("Succeeded")
        assert [attempt["outcome"] for attempt in training.attempts[before - 1 :]] == ["Suspended", "Succeeded"]
        training.assert_each_prompt_trained_once(saved + REST)

    def test_by_then_it_has_learned_what_the_reward_function_rewards(self, training: PodTraining) -> None:
        before, after = (record for record in training.records() if isinstance(record, EvaluationRecord))
        assert before.update == 0
        assert before.accuracy < 0.2
        assert training.status["progress"]["accuracy"] == after.accuracy
        assert after.accuracy >= 0.9


def _trains_on(training: PodTraining) -> None:
    """In the same attempt."""
    attempts, restarts = len(training.attempts), training.restarts
    training.until_trained()
    assert (len(training.attempts), training.restarts) == (attempts, restarts)


@contextmanager
def _the_next_attempt(training: PodTraining, *, counted: bool, reasons: Collection[str]) -> Iterator[None]:
    """A disturbance ends the attempt for one of these reasons, and the next attempt continues from the checkpoint."""
    training.until_saved()
    before, restarts, saved = len(training.attempts), training.restarts, training.status["lastCheckpoint"]["update"]
    yield
    training.until(lambda: len(training.attempts) == before + 1, "the next attempt")
    training.until(lambda: training.state == "Running", "it trains")
    training.until(lambda: training.reported(before + 1) >= saved, "it has resumed")
    resumed = training.reported(before + 1)
    with training.quick():
        training.until(lambda: training.reported(before + 1) > resumed, "an update after the checkpoint")
    lost = training.attempts[before - 1]
    assert (lost["outcome"], lost["reason"] in reasons) == ("Failed", True), lost
    assert training.restarts == restarts + counted
    assert training.announced("AttemptFailed")


@contextmanager
def _drained(cluster: Cluster, training: PodTraining) -> Iterator[None]:
    """Its pods are evicted from the node, which takes no new ones: as before maintenance."""
    pods = f"--pod-selector=rl.qwen35.io/training={training.name}"
    try:
        cluster.kubectl("drain", cluster.node.name, pods, "--delete-emptydir-data", f"--timeout={PATIENCE:.0f}s")
        yield
    finally:
        cluster.kubectl("uncordon", cluster.node.name)
