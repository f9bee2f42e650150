"""Parts taken away from a training in pods while it trains: what stays inside an attempt, and what takes the next one.

One training, disturbed in one way after the other and given time to train on in between; at its end every prompt has
trained exactly once.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.release import Release
from tests.cluster.training import PER_UPDATE, PodTraining
from tests.patience import PATIENCE

LONG, REST = 1000, 20
"""Updates: more than the disturbances need, and how many more there are when they are over."""
TRAIN_POD_LOST, HEAD_POD_LOST, EVICTED = {"WorkerLost"}, {"HeadLost", "Interrupted"}, {"Evicted"}
"""What docs/failure-modes.md has as reasons."""


@pytest.fixture(scope="class")
def training(cluster: Cluster, shared_namespace: str) -> Iterator[PodTraining]:
    # A replica that comes anew takes longer than many updates of so small a model: no stall.
    policy = {"maxRestarts": 3, "backoffSeconds": 0, "stallFactor": 1000.0}
    training = PodTraining.begin(cluster, shared_namespace, "disturbed", LONG, failurePolicy=policy)
    training.until_trained(2)
    yield training
    training.delete_and_see_that_nothing_is_left()


@pytest.mark.timeout(1800)
class TestDisturbed:
    def test_another_replica_takes_the_place_of_one_whose_pod_is_killed(self, training: PodTraining) -> None:
        lost = training.delete_pod("rollout")
        training.until(lambda: training.pods("rollout") not in ([], [lost]), "another rollout pod")
        _trains_on(training)

    def test_the_next_operator_goes_on_where_the_last_one_was_killed(
        self, training: PodTraining, release: Release
    ) -> None:
        release.kill_operator()
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

    def test_the_next_attempt_follows_when_a_train_pod_is_killed(self, training: PodTraining) -> None:
        with _the_next_attempt(training, counted=True, reasons=TRAIN_POD_LOST):
            training.delete_pod("train")

    def test_the_next_attempt_follows_when_the_head_pod_is_killed(self, training: PodTraining) -> None:
        with _the_next_attempt(training, counted=True, reasons=HEAD_POD_LOST):
            training.delete_pod("head")

    def test_the_next_attempt_follows_uncounted_when_the_node_is_drained(
        self, training: PodTraining, cluster: Cluster
    ) -> None:
        with _the_next_attempt(training, counted=False, reasons=EVICTED), _drained(cluster, training):
            training.until(lambda: "Unschedulable" in training.told("Degraded").get("message", ""), "it waits")
            assert training.condition("Degraded") == ("True", "PodFault")
            assert training.condition("ClusterReady")[0] == "False"

    def test_it_succeeds_at_last_and_each_prompt_has_trained_once(self, training: PodTraining) -> None:
        training.edit(suspend=True)
        training.until_state("Suspended")
        last = training.trained()[-1].update + REST
        training.edit(suspend=False, train={"updates": last})
        training.until_state("Succeeded")
        assert [attempt["outcome"] for attempt in training.attempts[-2:]] == ["Suspended", "Succeeded"]
        assert [record.update for record in training.trained()] == list(range(1, last + 1))
        end = training.last_progress()
        # Prompts that were under way at the end are left over.
        assert end["position"] - len(end["pending"]) == last * PER_UPDATE, "a prompt is missing, or came twice"


def _trains_on(training: PodTraining) -> None:
    """In the same attempt."""
    attempts, restarts = len(training.attempts), training.restarts
    training.until_trained()
    assert (len(training.attempts), training.restarts) == (attempts, restarts)


@contextmanager
def _the_next_attempt(training: PodTraining, *, counted: bool, reasons: Collection[str]) -> Iterator[None]:
    """What happens meanwhile ends the attempt for one of these reasons, and the next one goes on from the checkpoint."""
    training.until(lambda: "lastCheckpoint" in training.status, "a checkpoint")
    before, restarts, saved = len(training.attempts), training.restarts, training.status["lastCheckpoint"]["update"]
    yield
    training.until(lambda: len(training.attempts) == before + 1, "the next attempt")
    training.until(lambda: training.state == "Running", "it trains")
    training.until(lambda: training.reported(before + 1) >= saved, "it has resumed")
    resumed = training.reported(before + 1)
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
