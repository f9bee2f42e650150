"""Ray's start on this machine, which may take longer than Ray allows."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray

from qwen35_trainer.contract.shared_names import LANE_LABEL, POOL_LABEL
from qwen35_trainer.manifest import TrainingSpec
from qwen35_trainer.runtime import site

TIMED_OUT = "The current node timed out during startup. This could happen because some of the raylet failed to startup"
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


class Starts:
    """Stands in for `ray.init`. Each call starts a process and an agent, and raises the next failure until none is left."""

    def __init__(self, *failures: str) -> None:
        self.failures = list(failures)
        self.decoys: list[subprocess.Popen[bytes]] = []
        self.agents: list[psutil.Process] = []

    def __call__(self, **options: object) -> None:
        self.decoys.append(subprocess.Popen([*SLEEP, f"{Path(ray.__file__).parent}/raylet"]))
        # Not a child of this process, as an agent whose raylet has ended.
        raylet = os.environ | {"RAY_RAYLET_PID": str(self.decoys[-1].pid)}
        agent = subprocess.run(
            ["sh", "-c", '"$@" >/dev/null 2>&1 & echo $!', "sh", *SLEEP], env=raylet, capture_output=True, check=True
        )
        self.agents.append(psutil.Process(int(agent.stdout)))
        if self.failures:
            raise Exception(self.failures.pop(0))  # noqa: TRY002  # as Ray does


@pytest.fixture
def starts(monkeypatch):
    made: list[Starts] = []

    def fails(*failures: str) -> Starts:
        made.append(Starts(*failures))
        monkeypatch.setattr(ray, "init", made[0])
        monkeypatch.setattr(ray, "shutdown", lambda: None)
        return made[0]

    yield fails
    for process in made[0].decoys:
        process.kill()
        process.wait()
    for agent in made[0].agents:
        with contextlib.suppress(psutil.NoSuchProcess):
            agent.kill()


def test_a_ray_that_is_not_up_in_time_is_ended_and_started_again(starts):
    tried = starts(TIMED_OUT)
    bystander = subprocess.Popen(SLEEP)
    try:
        with site.connected(in_cluster=False):
            (first, second), agents = tried.decoys, tried.agents
            assert (_runs(psutil.Process(second.pid)), _runs(agents[1])) == (True, True)
            assert not psutil.pid_exists(first.pid)
            assert not _runs(agents[0])
            assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_it_is_not_tried_for_ever(starts):
    tried = starts(*[TIMED_OUT] * site.MAX_RAY_STARTS)
    with pytest.raises(Exception, match="timed out during startup"), site.connected(in_cluster=False):
        pass
    assert len(tried.decoys) == site.MAX_RAY_STARTS


def test_another_failure_is_not_tried_again(starts):
    tried = starts("no space left on device")
    with pytest.raises(Exception, match="no space left"), site.connected(in_cluster=False):
        pass
    assert len(tried.decoys) == 1


def _runs(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


LANE = {"nodes": 1, "tensorParallel": 4, "afterTokens": 9}
POOL_PODS, LANE_PODS = ({POOL_LABEL: "rollout", LANE_LABEL: value} for value in ("false", "true"))
NO_LANE, TRAIN = ({POOL_LABEL: pool} for pool in ("rollout", "train"))


def job_in_cluster(lane: dict[str, int] | None) -> Any:
    spec = {
        "accelerator": {"profile": "NVIDIA", "devicesPerNode": 4},
        "model": {"name": "tiny", "source": {"random": {}}},
        "data": {"train": [{"name": "sums", "gym": {"task": "chain_sum", "size": 8}}]},
        "rewards": [{"type": "Gym"}],
        "rollout": {"engine": "VLLM", "nodes": 2, "tensorParallel": 2, "stragglerLane": lane},
    }
    return SimpleNamespace(in_cluster=True, spec=TrainingSpec.model_validate(spec))


@pytest.mark.parametrize(
    ("lane", "worker", "devices", "labels"),
    [
        (LANE, {"pool": "rollout"}, 2, POOL_PODS),
        (LANE, {"pool": "rollout", "lane": True}, 4, LANE_PODS),
        (LANE, {"pool": "train"}, 1, TRAIN),
        (None, {"pool": "rollout"}, 2, NO_LANE),
    ],
)
def test_in_a_cluster_a_worker_goes_to_a_pod_of_its_part_of_the_pool(monkeypatch, lane, worker, devices, labels):
    """Otherwise small replicas could take some devices of every pod, and leave no pod for a replica of the lane."""
    pods = [{"Alive": True, "Resources": {"CPU": 32.0}, "Labels": each} for each in (POOL_PODS, LANE_PODS, TRAIN)]
    monkeypatch.setattr(ray, "nodes", lambda: pods if lane else [pods[2], pods[0] | {"Labels": NO_LANE}])
    options = site.worker_options(job_in_cluster(lane), **worker)
    assert (options["num_gpus"], options["num_cpus"]) == (devices, 8 * devices)
    assert options["label_selector"] == labels


def rank_on(node: str, device: str) -> site.WorkerLocation:
    return site.WorkerLocation(f"pod-{node}", node, device)


TWO_PODS = [rank_on(*place) for place in (("b", "10"), ("a", "1"), ("b", "9"), ("a", "0"))]
"""Of train workers, as Ray may start them."""


def test_replicas_share_the_devices_of_the_train_workers_node_by_node():
    assert site.shared_places(TWO_PODS, [2, 2]) == [
        site.SharedPlace("a", ("0", "1")),
        site.SharedPlace("b", ("9", "10")),
    ]
    assert [place.devices for place in site.shared_places(TWO_PODS, [1, 1, 2])] == [("0",), ("1",), ("9", "10")]
    assert site.shared_places([rank_on("a", "")] * 2, [1, 1]) == [site.SharedPlace("a", ())] * 2, "processors"


@pytest.mark.parametrize("sizes", [[1, 2, 1], [4], [2, 2, 1]], ids=["across nodes", "too large", "too many"])
def test_no_replica_shares_devices_of_two_nodes(sizes):
    with pytest.raises(ValueError, match=r"spec\.rollout\.tensorParallel: replica \d needs \d devices of one node"):
        site.shared_places(TWO_PODS, sizes)


@pytest.mark.parametrize("in_cluster", [True, False])
def test_a_replica_that_shares_devices_takes_none_from_ray(in_cluster):
    """In a cluster it therefore needs no pod of its own, and the train workers have asked for all devices of theirs."""
    job = SimpleNamespace(in_cluster=in_cluster, spec=job_in_cluster(None).spec)
    options = site.worker_options(job, "rollout", place=site.SharedPlace("00" * 28, ("0", "1")))
    strategy = options.pop("scheduling_strategy")
    assert (strategy.node_id, strategy.soft) == ("00" * 28, False)
    assert options == {"num_cpus": 0, "max_restarts": 0, "enable_task_events": False}
