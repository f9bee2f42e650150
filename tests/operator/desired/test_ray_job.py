"""The RayJob, against the rules of KubeRay's validation that its schema does not have."""

import re

import pytest

from qwen35_operator.desired import object_names, ray_job
from qwen35_operator.desired.spec_hash import spec_hash
from qwen35_operator.device_profiles import PROFILES
from qwen35_operator.operator_settings import OperatorSettings


@pytest.fixture
def build(make_training):
    def job(changes=None, *, attempt=1, rollout_nodes=2, **fields):
        training = make_training(changes, **fields)
        return ray_job.build(training, OperatorSettings(), attempt=attempt, rollout_nodes=rollout_nodes)

    return job


def groups(job: dict) -> dict[str, dict]:
    return {group["groupName"]: group for group in job["spec"]["rayClusterSpec"]["workerGroupSpecs"]}


SFT = {"mode": "SFT", "rollout": None, "rewards": [], "train.batch": {"promptsPerUpdate": 8}}
COLOCATED = {"mode": "Colocated", "train.nodes": 2}


@pytest.mark.parametrize(
    ("changes", "pools"),
    [({}, {"rollout": 2, "train": 1}), (SFT, {"train": 1}), (COLOCATED, {"train": 2})],
    ids=["FullyAsync", "SFT", "Colocated"],
)
def test_each_mode_has_its_worker_groups(changes, pools, build):
    assert {name: group["replicas"] for name, group in groups(build(changes)).items()} == pools


def test_the_rollout_pool_starts_with_the_size_it_is_given(build):
    group = groups(build({"rollout": {"nodes": 4, "minNodes": 2, "maxNodes": 8}}, rollout_nodes=6))["rollout"]
    assert (group["minReplicas"], group["replicas"], group["maxReplicas"]) == (2, 6, 8)


def test_a_size_beyond_the_bounds_widens_them(build):
    """KubeRay clamps replicas to the bounds without a word."""
    group = groups(build({"rollout": {"nodes": 4, "minNodes": 3}}, rollout_nodes=9))["rollout"]
    assert (group["minReplicas"], group["replicas"], group["maxReplicas"]) == (3, 9, 9)


LANE = {"nodes": 1, "tensorParallel": 4, "afterTokens": 64}


def test_the_lane_is_a_worker_group_of_the_pool_that_keeps_its_size(build):
    rollout = {"nodes": 4, "minNodes": 2, "maxNodes": 8, "stragglerLane": LANE}
    made = groups(build({"rollout": rollout}, rollout_nodes=6))
    sizes = {name: [group[f"{key}eplicas"] for key in ("minR", "r", "maxR")] for name, group in made.items()}
    assert sizes == {"rollout": [1, 5, 7], "lane": [1, 1, 1], "train": [1, 1, 1]}


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_lane_that_fills_min_nodes_leaves_a_node_for_the_rest_of_the_pool(build, nodes):
    """Earlier releases accepted such trainings. KubeRay refuses a group of fewer than 0 nodes."""
    rollout = {"nodes": 4, "minNodes": 1, "stragglerLane": LANE | {"nodes": nodes}}
    group = groups(build({"rollout": rollout}, rollout_nodes=4))["rollout"]
    assert (group["minReplicas"], group["replicas"], group["maxReplicas"]) == (1, 4 - nodes, 4 - nodes)


def test_labels_tell_the_nodes_of_the_lane_from_those_of_the_rest_of_the_pool(build):
    made = groups(build({"rollout": {"nodes": 3, "stragglerLane": LANE}}, rollout_nodes=3))
    assert {name: group["labels"] for name, group in made.items()} == {
        "rollout": {object_names.POOL: "rollout", object_names.LANE: "false"},
        "lane": {object_names.POOL: "rollout", object_names.LANE: "true"},
        "train": {object_names.POOL: "train"},
    }
    assert made["lane"]["template"] == made["rollout"]["template"]


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        ("NVIDIA", {"CPU": "32", "GPU": "4"}),
        ("Ascend", {"CPU": "64", "NPU": "4"}),
        ("CPU", {"CPU": "4"}),
    ],
)
def test_devices_have_the_names_that_ray_gives_them(profile, expected, build):
    job = build({"accelerator": {"profile": profile, "devicesPerNode": 4}})
    assert groups(job)["train"]["resources"] == expected
    # KubeRay refuses resources that are given twice, and labels among the start parameters.
    given_twice = {"labels", "num-cpus", "num-gpus", "resources"}
    assert not any(given_twice & group["rayStartParams"].keys() for group in groups(job).values())


def test_pods_run_no_log_monitor_and_the_head_no_autoscaler(build):
    """KubeRay writes a parameter that is "true" without its value, and leaves out one that is "false"."""
    job = build()
    assert all(group["rayStartParams"] == {"include-log-monitor": "0"} for group in groups(job).values())
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]
    assert head["rayStartParams"] == {"include-log-monitor": "0", "no-monitor": "true"}


def test_nothing_but_the_driver_runs_on_the_head(build):
    head = build()["spec"]["rayClusterSpec"]["headGroupSpec"]
    assert head["resources"] == {"CPU": "0"}
    assert head["labels"] == {object_names.POOL: "head"}
    limits = head["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert not {profile.resource for profile in PROFILES.values()} & set(limits)


def test_placement_is_left_to_the_queue(build):
    spec = build()["spec"]
    assert "suspend" not in spec
    assert spec["shutdownAfterJobFinishes"] is True, "Kueue and suspension need it"
    assert spec["backoffLimit"] == 0
    assert spec["rayClusterSpec"]["enableInTreeAutoscaling"] is False


def test_an_attempt_has_one_job_id_regardless_of_who_submits_it(build):
    first, again, other = build(attempt=2), build(attempt=2), build(attempt=3)
    assert first["spec"]["jobId"] == again["spec"]["jobId"] == "demo-2-6d0fc0de"
    assert other["spec"]["jobId"] != first["spec"]["jobId"]
    assert build(attempt=2, uid="7" * 36)["spec"]["jobId"] != first["spec"]["jobId"]


def test_rays_version_is_the_one_that_is_installed_here(build):
    ray = pytest.importorskip("ray", reason="the trainer's requirements are not installed")
    assert build()["spec"]["rayClusterSpec"]["rayVersion"] == ray.__version__


def test_kueues_label_is_the_jobs_and_not_the_pods(build):
    job = build(labels={"kueue.x-k8s.io/queue-name": "rl", "team": "a"}, annotations={"huawei.com/sp-block": "8"})
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "rl"
    assert "team" not in job["metadata"]["labels"]
    assert job["metadata"]["annotations"]["huawei.com/sp-block"] == "8"
    for group in groups(job).values():
        assert "kueue.x-k8s.io/queue-name" not in group["template"]["metadata"]["labels"]


@pytest.mark.parametrize("label", ["ray.io/originated-from-crd", "rl.qwen35.io/training", "ray.io/cluster"])
def test_no_label_of_the_training_passes_for_one_of_ours(label, build):
    assert build(labels={label: "other"})["metadata"]["labels"].get(label) in (None, "demo")


def test_the_hash_of_the_spec_is_on_the_job(build, make_training):
    assert build()["metadata"]["annotations"][object_names.SPEC_HASH] == spec_hash(make_training())


def test_rays_container_is_the_first(build):
    sidecar = {"spec": {"containers": [{"name": "logs", "image": "shipper:1"}]}}
    containers = groups(build({"pods.train": sidecar}))["train"]["template"]["spec"]["containers"]
    assert [container["name"] for container in containers] == ["ray", "logs"]


def test_entrypoint_and_mounts_name_the_same_places(build):
    head = build()["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    mounted = {mount["mountPath"] for mount in head["containers"][0]["volumeMounts"]}
    paths = re.findall(r"/\S+", ray_job.ENTRYPOINT)
    assert {path.removesuffix("/training.yaml") for path in paths} == {"/etc/qwen35", "/var/lib/qwen35/run"} <= mounted
