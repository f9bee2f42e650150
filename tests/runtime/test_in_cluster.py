"""The run of a head pod, on a Ray whose nodes have the labels of pods."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE

from .conftest import ENVIRONMENT


@pytest.fixture(scope="module")
def in_pods(write, tmp_path_factory):
    folder = tmp_path_factory.mktemp("in-pods")
    file = write(folder, {"rollout.nodes": 2, "train.updates": 6, "checkpoint": {"everyUpdates": 2}})
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("in_pods.py"), file, folder / "out"],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder / "out", json.loads(done.stdout.splitlines()[-1])


def test_each_worker_takes_all_cpus_of_the_one_node_of_its_pool_that_is_free(in_pods):
    """There is a worker for each device, and a node here has one: whoever came into another pool would be in the way."""
    _, said = in_pods
    assert said["outcome"] == "Succeeded", said["message"]
    assert said["left"].get("CPU", 0) == 0


def test_nothing_is_kept_where_pods_share_no_folder(in_pods):
    folder, _ = in_pods
    assert not (folder / "checkpoints").exists()
    assert (folder / "report.html").exists()
