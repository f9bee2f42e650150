"""Pod templates: what they hold by pool and profile, and that namespaces with pod security take them."""

import pytest

from qwen35_operator.desired import pod_templates
from qwen35_operator.device_profiles import PROFILES
from qwen35_trainer.runtime.signals import END_SECONDS, REAP_SECONDS

POOLS = ("head", "rollout", "train")
CLAIM = {"persistentVolumeClaim": {"claimName": "disk"}}


@pytest.fixture
def template(make_training):
    """template("train", {...}) is the pod template of the pool."""
    return lambda pool, changes=None, **fields: pod_templates.template(
        make_training(changes, **fields), "trainer:1", pool, 3
    )


def variables(pod: dict) -> dict[str, object]:
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in pod["spec"]["containers"][0]["env"]}


def mounts(pod: dict) -> dict[str, dict]:
    return {mount["mountPath"]: mount for mount in pod["spec"]["containers"][0]["volumeMounts"]}


@pytest.mark.parametrize("profile", ["NVIDIA", "CPU"])
@pytest.mark.parametrize("pool", POOLS)
def test_pod_security_restricted_takes_the_pod(pool, profile, template):
    spec = template(pool, {"accelerator": {"profile": profile, "devicesPerNode": 4}})["spec"]
    (container,) = spec["containers"]
    assert not any(key in spec for key in ("hostNetwork", "hostPID", "hostIPC"))
    assert {key for volume in spec["volumes"] for key in volume} <= {
        *("name", "emptyDir", "configMap", "persistentVolumeClaim")
    }
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


@pytest.mark.parametrize("profile", PROFILES)
def test_devices_are_for_the_workers_alone(profile, template):
    changes = {"accelerator": {"profile": profile, "devicesPerNode": 4}}
    name = PROFILES[profile].resource
    for pool in POOLS:
        resources = template(pool, changes)["spec"]["containers"][0]["resources"]
        expected = None if pool == "head" or name is None else "4"
        assert resources["limits"].get(name) == resources["requests"].get(name) == expected


def test_a_node_with_twice_the_devices_gets_twice_the_memory(template):
    def memory(devices: int) -> int:
        pod = template("train", {"accelerator.devicesPerNode": devices})
        return int(pod["spec"]["containers"][0]["resources"]["limits"]["memory"].removesuffix("Gi"))

    assert memory(8) == 2 * memory(4)


@pytest.mark.parametrize("pool", POOLS)
def test_a_pod_knows_who_it_is(pool, template):
    pod = template(pool)
    assert variables(pod)["QWEN35_TRAINING"] == "demo"
    assert variables(pod)["QWEN35_NAMESPACE"] == "rl"
    assert variables(pod)["QWEN35_ATTEMPT"] == "3"
    assert variables(pod)["QWEN35_POOL"] == pool
    assert variables(pod)["POD_NAME"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    labels = pod["metadata"]["labels"]
    assert (labels["rl.qwen35.io/attempt"], labels["rl.qwen35.io/pool"]) == ("3", pool)


def test_a_secret_is_referred_to_and_not_copied(template):
    secret = {"name": "WANDB_API_KEY", "valueFrom": {"secretKeyRef": {"name": "vault", "key": "wandb"}}}
    for pool in POOLS:
        variable = variables(template(pool, {"pods.env": [secret]}))["WANDB_API_KEY"]
        assert variable == {"secretKeyRef": {"name": "vault", "key": "wandb"}}


def test_the_users_variable_wins_over_the_profiles(template):
    pod = template("train", {"pods.env": [{"name": "NCCL_DEBUG", "value": "INFO"}]})
    names = [entry["name"] for entry in pod["spec"]["containers"][0]["env"]]
    assert variables(pod)["NCCL_DEBUG"] == "INFO"
    assert len(names) == len(set(names))


@pytest.mark.parametrize("profile", PROFILES)
def test_a_job_that_ray_stops_has_as_long_as_its_pod_to_end(profile, template):
    pod = template("head", {"accelerator": {"profile": profile, "devicesPerNode": 4}})
    seconds = int(variables(pod)["RAY_JOB_STOP_WAIT_TIME_S"])
    assert seconds == pod["spec"]["terminationGracePeriodSeconds"]
    assert seconds > END_SECONDS + REAP_SECONDS  # what the trainer may take after a signal that ends it


@pytest.mark.parametrize(("written", "seconds"), [(600, "600"), (None, "30")])
def test_another_grace_period_of_the_head_pod_is_that_of_its_job_too(template, written, seconds):
    pod = template("head", {"pods.head": {"spec": {"terminationGracePeriodSeconds": written}}})
    assert pod["spec"].get("terminationGracePeriodSeconds") == written
    assert variables(pod)["RAY_JOB_STOP_WAIT_TIME_S"] == seconds


def test_autoscalers_of_nodes_move_only_pods_of_the_rollout_pool(template):
    """Whose loss the run survives. Consolidation would move a head, which requests CPUs only, and end the attempt."""
    annotations = {pool: template(pool)["metadata"].get("annotations", {}) for pool in POOLS}
    assert annotations["head"] == annotations["train"]
    assert annotations["head"] == {
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
        "karpenter.sh/do-not-disrupt": "true",
    }
    assert annotations["rollout"] == {}


def test_the_pods_of_a_training_prefer_one_zone_unless_the_user_says_otherwise(template):
    for pool in POOLS:
        [term] = template(pool)["spec"]["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        assert term["podAffinityTerm"] == {
            "labelSelector": {"matchLabels": {"rl.qwen35.io/training": "demo"}},
            "topologyKey": "topology.kubernetes.io/zone",
        }
    changed = template("train", {"pods.train": {"spec": {"affinity": None}}})
    assert "affinity" not in changed["spec"]


def test_hccl_is_set_before_ray_starts(template):
    pod = template("train", {"accelerator": {"profile": "Ascend", "devicesPerNode": 8}})
    assert variables(pod)["HCCL_SOCKET_IFNAME"] == "eth0"
    assert "ASCEND_VISIBLE_DEVICES" not in variables(pod)
    assert "NCCL_DEBUG" not in variables(pod)


def test_ascends_driver_is_read_only_and_on_workers_alone(template):
    changes = {"accelerator": {"profile": "Ascend", "devicesPerNode": 8}}
    driver = "/usr/local/Ascend/driver"
    assert mounts(template("train", changes))[driver]["readOnly"] is True
    assert driver not in mounts(template("head", changes))


def test_shared_memory_is_a_volume_of_a_limited_size(template):
    pod = template("train")
    (volume,) = [volume for volume in pod["spec"]["volumes"] if volume["name"] == mounts(pod)["/dev/shm"]["name"]]
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "96Gi"}


def test_the_manifest_is_mounted_where_the_entrypoint_runs(template):
    assert "/etc/qwen35" in mounts(template("head"))
    assert "/etc/qwen35" not in mounts(template("train"))


@pytest.mark.parametrize("pool", POOLS)
def test_one_claim_is_one_volume_however_often_it_is_used(pool, template):
    files = {"paths": ["x.jsonl"], "volume": CLAIM}
    changes = {
        "model.source": CLAIM,
        "data.train": [{"name": "rows", "files": files}],
        "rewards": [{"type": "Math"}],
        "checkpoint.storage": {"persistentVolumeClaim": {"claimName": "disk", "path": "team"}},
    }
    pod = template(pool, changes)
    claims = [volume for volume in pod["spec"]["volumes"] if "persistentVolumeClaim" in volume]
    assert claims == [{"name": "claim-0", "persistentVolumeClaim": {"claimName": "disk"}}]
    assert mounts(pod)["/var/lib/qwen35/model"]["readOnly"] is True
    assert mounts(pod)["/var/lib/qwen35/data/disk"]["readOnly"] is True
    assert mounts(pod)["/var/lib/qwen35/checkpoints"] == {
        "name": "claim-0",
        "mountPath": "/var/lib/qwen35/checkpoints",
        "subPath": "team/checkpoints/demo",
    }
    assert mounts(pod)["/var/lib/qwen35/run"]["subPath"] == "team/runs/demo"


def test_a_claim_that_is_only_read_is_mounted_read_only_as_a_whole(template):
    pod = template("train", {"model.source": CLAIM})
    (claim,) = [volume for volume in pod["spec"]["volumes"] if "persistentVolumeClaim" in volume]
    assert claim["persistentVolumeClaim"]["readOnly"] is True


def test_two_trainings_on_one_claim_have_their_own_folders(template):
    changes = {"checkpoint.storage": CLAIM}
    folders = [
        mount["subPath"]
        for name in ("demo", "other")
        for mount in mounts(template("train", changes, name=name)).values()
        if "subPath" in mount
    ]
    assert len(folders) == len(set(folders)) == 4


@pytest.mark.parametrize("pool", POOLS)
def test_every_mount_has_its_volume(pool, template):
    changes = {"model.source": CLAIM, "accelerator": {"profile": "Ascend", "devicesPerNode": 8}}
    pod = template(pool, changes)
    assert {mount["name"] for mount in mounts(pod).values()} == {volume["name"] for volume in pod["spec"]["volumes"]}
