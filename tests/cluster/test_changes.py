"""What its user asks of a training while it trains in pods: more nodes, fewer, a pause; and that it goes away."""

from collections.abc import Iterator

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.training import PodTraining

pytestmark = pytest.mark.timeout(1800)
LONG = 1000
"""Updates: more than the tests need."""


@pytest.fixture(scope="class")
def training(cluster: Cluster, shared_namespace: str) -> Iterator[PodTraining]:
    training = PodTraining.begin(cluster, shared_namespace, "asked", LONG, failurePolicy={"maxRestarts": 0})
    training.until_trained(2)
    yield training
    training.delete_and_see_that_nothing_is_left()


class TestWhileItTrains:
    """In this order."""

    def test_a_second_rollout_node_works_along(self, training: PodTraining) -> None:
        training.kubectl("scale", "qwen35training", training.name, "--replicas=2")
        training.until(lambda: len(training.generating()) == 2, "two replicas")
        assert training.generating() == set(training.pods("rollout"))
        training.until_trained()

    def test_and_leaves_without_a_pause(self, training: PodTraining) -> None:
        training.kubectl("scale", "qwen35training", training.name, "--replicas=1")
        training.until(lambda: len(training.pods("rollout")) == 1, "one rollout pod")
        training.until_trained()
        training.until(lambda: len(training.generating()) == 1, "one replica")
        assert training.generating() == set(training.pods("rollout"))
        assert len(training.attempts) == 1

    def test_suspended_it_has_no_pods_and_a_checkpoint_of_all_it_trained(self, training: PodTraining) -> None:
        training.edit(suspend=True)
        training.until_state("Suspended")
        training.until(lambda: not training.mine("pods"), "no pods")
        assert training.status["lastCheckpoint"]["update"] == training.trained()[-1].update

    def test_resumed_it_goes_on_from_there(self, training: PodTraining) -> None:
        saved = training.status["lastCheckpoint"]["update"]
        training.edit(suspend=False)
        training.until(lambda: training.update > saved, "an update after the checkpoint")
        updates = [record.update for record in training.trained()]
        assert updates == list(range(1, len(updates) + 1))
        assert [attempt["outcome"] for attempt in training.attempts] == ["Suspended", "Running"]


@pytest.mark.parametrize("moment", ["at once", "while its pods start"])
def test_deleted_early_it_leaves_nothing(cluster: Cluster, namespace: str, moment: str) -> None:
    training = PodTraining.begin(cluster, namespace, "short-lived", LONG)
    if moment == "while its pods start":
        training.until(lambda: training.pods("train"), "a train pod")
    training.delete_and_see_that_nothing_is_left()
