"""The run of a head pod, on a Ray whose nodes have the labels of pods."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.forks.start import start
from tests.patience import PATIENCE

from .conftest import ENVIRONMENT


@pytest.fixture(scope="module")
def in_pods(write, tmp_path_factory):
    folder = tmp_path_factory.mktemp("in-pods")
    lane = {"nodes": 1, "tensorParallel": 1, "afterTokens": 2}
    changes = {"rollout.nodes": 2, "rollout.stragglerLane": lane, "train.updates": 6, "checkpoint": {"everyUpdates": 2}}
    file = write(folder, changes)
    command = [str(path) for path in (Path(__file__).with_name("in_pods.py"), file, folder / "out")]
    stdout, errors = folder / "said", folder / "errors"
    with stdout.open("wb") as out, errors.open("wb") as err:
        process = start(command, env=os.environ | ENVIRONMENT, stdout=out, stderr=err, stdin=subprocess.DEVNULL)
    try:
        assert process.wait(PATIENCE) == 0, errors.read_text()
    finally:
        process.kill()
        process.wait()
    return folder / "out", json.loads(stdout.read_text().splitlines()[-1])


def test_each_worker_takes_all_cpus_of_the_one_node_of_its_pool_that_is_free(in_pods):
    """There is a worker for each device, and a node here has one: a worker of another pool, or of the lane, would take its place."""
    _, messages = in_pods
    assert messages["outcome"] == "Succeeded", messages["message"]
    assert messages["left"].get("CPU", 0) == 0


@pytest.mark.parametrize("profile", ["NVIDIA", "Ascend"])
def test_without_a_cluster_each_worker_sees_an_accelerator_of_its_own(in_pods, profile):
    _, messages = in_pods
    assert sorted(messages["visible"][profile]) == ["0", "1"]


def test_a_replica_of_several_nodes_takes_all_of_its_nodes_or_none(in_pods):
    """Of two replicas of two nodes each on three nodes, one waits, and the third node stays free meanwhile."""
    _, messages = in_pods
    large, of_the_train_pool, of_the_third_node = messages["large"], 2.0, 2.0
    assert len(set(large["first"])) == len(set(large["second"])) == 2
    assert large["free"] == of_the_train_pool + of_the_third_node


def test_nothing_is_kept_where_pods_share_no_folder(in_pods):
    folder, _ = in_pods
    assert not (folder / "checkpoints").exists()
    assert (folder / "report.html").exists()
