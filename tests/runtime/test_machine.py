"""How many accelerators there are here, and whether they are enough."""

import pytest
from ray._private import accelerators

from qwen35_trainer.manifest import load_manifest
from qwen35_trainer.progress.records import UpdateRecord
from qwen35_trainer.runtime import run_command
from qwen35_trainer.runtime.machine import BACKENDS, DEVICE_TYPES, devices_here, manager_of, too_few_devices
from qwen35_trainer.runtime.site import DEVICE_RESOURCES

VISIBLE = {"NVIDIA": "CUDA_VISIBLE_DEVICES", "Ascend": "ASCEND_RT_VISIBLE_DEVICES"}


@pytest.mark.parametrize("profile", ["NVIDIA", "Ascend"])
@pytest.mark.parametrize(("visible", "count"), [(None, 4), ("1,3", 2), ("", 0), ("0,1,2,3,4,5", 4)])
def test_devices_are_counted_as_ray_counts_them(monkeypatch, profile, visible, count):
    monkeypatch.setattr(manager_of(profile), "get_current_node_num_accelerators", staticmethod(lambda: 4))
    if visible is None:
        monkeypatch.delenv(VISIBLE[profile], raising=False)
    else:
        monkeypatch.setenv(VISIBLE[profile], visible)
    assert devices_here(profile) == count
    counted = accelerators.get_accelerator_manager_for_resource(DEVICE_RESOURCES[profile])
    assert counted is manager_of(profile)


SFT = {"mode": "SFT", "async": {}, "train.batch.microBatchSequences": 4}
CASES = {
    "two of two": ({}, 2, None),
    "one of two": ({}, 1, ("FullyAsync needs 1 + 1 NVIDIA devices, and this machine has 1.", "Set mode to Colocated")),
    "none": ({}, 0, ("and this machine has none.", "set profile to CPU")),
    "taking turns on one": ({"mode": "Colocated", "async": {}}, 1, None),
    "taking turns on none": ({"mode": "Colocated", "async": {}}, 0, ("Colocated needs 1 NVIDIA", "a machine with 1")),
    "more than one node has": (
        {"accelerator.devicesPerNode": 4, "rollout.nodes": 2, "train.batch.microBatchSequences": 4},
        8,
        ("FullyAsync needs 8 + 4 NVIDIA devices, and this machine has 8.", "Set devicesPerNode to 2."),
    ),
    "a lane of replicas of two devices": (
        {"accelerator.devicesPerNode": 2, "rollout.nodes": 2, "train.batch.microBatchSequences": 2}
        | {"rollout.engine": "VLLM", "rollout.stragglerLane": {"nodes": 1, "tensorParallel": 2, "afterTokens": 2}},
        5,
        ("FullyAsync needs 4 + 2 NVIDIA devices, and this machine has 5.", "a machine with 6"),
    ),
    "training alone on one": (SFT, 1, None),
    "training alone on none": (SFT, 0, ("SFT needs 1 NVIDIA devices", "a machine with 1")),
}


@pytest.mark.parametrize("case", CASES)
def test_each_worker_needs_a_device_of_its_own(write, tmp_path, removed, case):
    changes, here, problem = CASES[case]
    if changes.get("mode") == "SFT":
        changes = changes | {"rollout": removed, "rewards": removed}
    spec = load_manifest(write(tmp_path, {"accelerator.profile": "NVIDIA"} | changes)).spec
    shortage = too_few_devices(spec, here)
    assert len(shortage) == (problem is not None)
    if problem is not None:
        assert (problem[0] in shortage[0].message, problem[1] in shortage[0].fix) == (True, True), str(shortage[0])


@pytest.mark.processes
def test_a_run_on_devices_of_this_machine_trains(local, write, tmp_path, monkeypatch):
    """With processors in the place of two accelerators: all else is as it would be."""
    monkeypatch.setattr(run_command, "devices_here", {"NVIDIA": 2}.get)
    monkeypatch.setitem(DEVICE_TYPES, "NVIDIA", "cpu")
    monkeypatch.setitem(BACKENDS, "NVIDIA", "gloo")
    ended = local.run(write(tmp_path, {"accelerator.profile": "NVIDIA"}))
    assert ended.code == 0, ended.err
    assert len(ended.of(UpdateRecord)) == 3
