import pytest

from qwen35_trainer.manifest import load_manifest
from qwen35_trainer.manifest.release import cannot_run
from qwen35_trainer.runtime.preflight import unsupported

CLUSTER = {
    "accelerator": {"profile": "NVIDIA", "devicesPerNode": 2},
    "model.source": {"persistentVolumeClaim": {"claimName": "models"}},
    "data.train.0.files.volume": {"persistentVolumeClaim": {"claimName": "prompts"}},
    "rollout": {
        "engine": "VLLM",
        "nodes": 3,
        "tensorParallel": 2,
        "stragglerLane": {"nodes": 2, "tensorParallel": 4, "afterTokens": 2},
    },
    "train": {
        "engine": "Megatron",
        "updates": 3,
        "parallelism": {"tensor": 2},
        "batch": {"promptsPerUpdate": 4, "removePadding": True},
    },
    "checkpoint": {"storage": {"persistentVolumeClaim": {"claimName": "ckpt"}}},
    "algorithm": {"groupSize": 4, "advantage": "GAE"},
    "suspend": True,
}
PLACES = {
    "spec.suspend",
    "spec.model.source.persistentVolumeClaim",
    "spec.checkpoint.storage.persistentVolumeClaim",
    "spec.data.train[0].files.volume",
    "spec.train.batch.removePadding",
    "spec.algorithm.advantage",
}


def test_all_that_needs_a_cluster_or_a_later_release_is_listed_together(write, tmp_path):
    problems = unsupported(load_manifest(write(tmp_path, CLUSTER)))
    assert {problem.path for problem in problems} == PLACES
    assert all(problem.message and problem.fix for problem in problems)


def test_what_runs_anywhere_is_not_refused(write, tmp_path):
    assert unsupported(load_manifest(write(tmp_path))) == []


def test_a_lane_between_replicas_of_more_and_fewer_threads_runs_here(write, tmp_path):
    changes = {"rollout.nodes": 3, "rollout.stragglerLane": {"nodes": 2, "tensorParallel": 2, "afterTokens": 2}}
    assert unsupported(load_manifest(write(tmp_path, changes))) == []


@pytest.mark.parametrize("mode", ["Colocated", "SFT"])
def test_every_mode_runs_here(write, tmp_path, removed, mode):
    changes = {"mode": mode, "async": {}}
    if mode == "SFT":
        changes |= {"rollout": removed, "rewards": removed, "train.batch.microBatchSequences": 4}
    assert unsupported(load_manifest(write(tmp_path, changes))) == []


@pytest.mark.parametrize(("devices", "divides"), [(4, True), (6, False)])
def test_replicas_that_share_devices_divide_those_of_a_node(write, tmp_path, devices, divides):
    accelerator = {"profile": "NVIDIA", "devicesPerNode": devices}
    spec = load_manifest(write(tmp_path)).spec
    shared = spec.model_copy(
        update={
            "mode": "Colocated",
            "accelerator": spec.accelerator.model_copy(update=accelerator),
            "rollout": spec.rollout.model_copy(update={"engine": "VLLM", "tensorParallel": 4}),
        }
    )
    message = f"in mode Colocated, replicas of 4 devices do not divide the {devices} of a node."
    paths = [problem.path for problem in cannot_run(shared) if problem.message == message]
    assert paths == ([] if divides else ["spec.rollout.tensorParallel"])
