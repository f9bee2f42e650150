"""Reserved fields of spec.pods: what is refused, all of it in one answer; what is not refused leaves the reserved fields alone."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qwen35_operator.desired import all_objects, pod_templates
from qwen35_operator.desired.pod_overrides import shape
from qwen35_operator.operator_settings import OperatorSettings
from tests.profiles import examples


@pytest.fixture
def refused(make_training):
    """refused({...}) are the paths of the problems with such a train pool's template, below spec.pods.train."""

    def paths(change: object, **changes: object) -> list[str]:
        training = make_training(
            {"pods.train": change} | {key.replace("_", "."): value for key, value in changes.items()}
        )
        problems = all_objects.problems(training, OperatorSettings())
        assert all(problem.message and problem.fix for problem in problems)
        return [problem.path.removeprefix("spec.pods.train").lstrip(".") for problem in problems]

    return paths


def ray(**fields: object) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "ray"} | fields]}}


RAY = "spec.containers[0]"
FENCED = {
    "image": (ray(image="mine:1"), f"{RAY}.image"),
    "command": (ray(command=["sh"]), f"{RAY}.command"),
    "args": (ray(args=None), f"{RAY}.args"),
    "variable": (ray(env=[{"name": "QWEN35_POOL", "value": "head"}]), f"{RAY}.env[0].name"),
    "ray's variable": (ray(env=[{"name": "RAY_ADDRESS", "value": "x"}]), f"{RAY}.env[0].name"),
    "devices": (ray(resources={"limits": {"nvidia.com/gpu": 1}}), f"{RAY}.resources.limits"),
    "no devices": (ray(resources={"requests": {"nvidia.com/gpu": None}}), f"{RAY}.resources.requests"),
    "mount": (ray(volumeMounts=[{"name": "shm", "mountPath": "/dev/shm/"}]), f"{RAY}.volumeMounts[0].mountPath"),
    "mount above": (ray(volumeMounts=[{"name": "shm", "mountPath": "/var/lib"}]), f"{RAY}.volumeMounts[0].mountPath"),
    "mount below": (
        ray(volumeMounts=[{"name": "shm", "mountPath": "/var/lib/qwen35/../qwen35/mine"}]),
        f"{RAY}.volumeMounts[0].mountPath",
    ),
    "label": ({"metadata": {"labels": {"rl.qwen35.io/pool": "x"}}}, "metadata.labels.rl.qwen35.io/pool"),
    "ray's label": ({"metadata": {"labels": {"ray.io/group": "x"}}}, "metadata.labels.ray.io/group"),
    "service's label": (
        {"metadata": {"labels": {"app.kubernetes.io/created-by": None}}},
        "metadata.labels.app.kubernetes.io/created-by",
    ),
    "queue": (
        {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "q"}}},
        "metadata.labels.kueue.x-k8s.io/queue-name",
    ),
    "annotation": (
        {"metadata": {"annotations": {"ray.io/overwrite-container-cmd": "true"}}},
        "metadata.annotations.ray.io/overwrite-container-cmd",
    ),
    "name": ({"metadata": {"name": "x"}}, "metadata.name"),
    "status": ({"status": {}}, "status"),
    "account": ({"spec": {"serviceAccountName": "admin"}}, "spec.serviceAccountName"),
    "restart": ({"spec": {"restartPolicy": "Always"}}, "spec.restartPolicy"),
    "host network": ({"spec": {"hostNetwork": True}}, "spec.hostNetwork"),
    "host name": ({"spec": {"hostname": "same"}}, "spec.hostname"),
    "volume": ({"spec": {"volumes": [{"name": "shm", "emptyDir": {}}]}}, "spec.volumes[0].name"),
    "init container": ({"spec": {"initContainers": [{"name": "ray", "image": "x"}]}}, "spec.initContainers[0].name"),
    "kuberay's container": (
        {"spec": {"initContainers": [{"name": "wait-gcs-ready", "image": "x"}]}},
        "spec.initContainers[0].name",
    ),
    "port of ray": (ray(ports=[{"containerPort": 8080}]), f"{RAY}.ports[0].containerPort"),
    "name of a port of ray": (ray(ports=[{"containerPort": 9000, "name": "dashboard"}]), f"{RAY}.ports[0].name"),
    "port of ray in a sidecar": (
        {"spec": {"containers": [{"name": "x", "image": "x", "ports": [{"containerPort": 52365}]}]}},
        f"{RAY}.ports[0].containerPort",
    ),
    "devices of a sidecar": (
        {"spec": {"containers": [{"name": "x", "image": "x", "resources": {"limits": {"nvidia.com/gpu": 1}}}]}},
        f"{RAY}.resources.limits",
    ),
}
MISSHAPED = {
    "labels": ({"metadata": {"labels": ["a"]}}, "metadata.labels"),
    "number in a label": ({"metadata": {"labels": {"a": 1}}}, "metadata.labels.a"),
    "containers": ({"spec": {"containers": {"name": "ray"}}}, "spec.containers"),
    "no containers": ({"spec": {"containers": None}}, "spec.containers"),
    "no spec": ({"spec": None}, "spec"),
    "no variables": (ray(env=None), f"{RAY}.env"),
    "no resources": (ray(resources=None), f"{RAY}.resources"),
    "no mounts": (ray(volumeMounts=None), f"{RAY}.volumeMounts"),
    "no name": ({"spec": {"containers": [{"image": "x"}]}}, RAY),
    "text for a container": ({"spec": {"containers": ["ray"]}}, RAY),
    "number for a name": ({"spec": {"containers": [{"name": 5}]}}, RAY),
    "name twice": ({"spec": {"volumes": [{"name": "x", "emptyDir": {}}] * 2}}, "spec.volumes[1]"),
    "directive": ({"spec": {"$patch": "replace"}}, "spec.$patch"),
    "directive in a list": (ray(env=[{"name": "A", "$patch": "delete"}]), f"{RAY}.env[0].$patch"),
    "tolerations": ({"spec": {"tolerations": {"key": "x"}}}, "spec.tolerations"),
    "affinity": ({"spec": {"affinity": ["x"]}}, "spec.affinity"),
}
INCONSISTENT = {
    "mount of nothing": (ray(volumeMounts=[{"name": "scratch", "mountPath": "/scratch"}]), f"{RAY}.volumeMounts"),
    "no image": ({"spec": {"containers": [{"name": "logs"}]}}, "spec.containers"),
    "two sources": (
        {"spec": {"volumes": [{"name": "x", "emptyDir": {}, "hostPath": {"path": "/x"}}]}},
        "spec.volumes",
    ),
    "value twice": (
        ray(env=[{"name": "NCCL_DEBUG", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}]),
        f"{RAY}.env",
    ),
    "number for a value": (ray(env=[{"name": "A", "value": 1}]), f"{RAY}.env"),
    "node selector": ({"spec": {"nodeSelector": {"zone": "a b"}}}, "spec.nodeSelector.zone"),
}


@pytest.mark.parametrize("case", FENCED)
def test_what_is_fenced_in_is_refused(case, refused):
    change, path = FENCED[case]
    assert refused(change) == [path]


@pytest.mark.parametrize("case", MISSHAPED)
def test_what_cannot_be_merged_is_refused(case, refused):
    change, path = MISSHAPED[case]
    assert refused(change) == [path]


@pytest.mark.parametrize("case", INCONSISTENT)
def test_a_template_that_does_not_hold_together_is_refused(case, refused):
    change, path = INCONSISTENT[case]
    # The container of ray is the first in the change and in the template.
    assert refused(change) == [path.replace("[0]", "")]


DRIVER = "ascend-driver"
WRITABLE: dict[str, dict[str, Any]] = {
    "a further container": {"containers": [{"name": "x", "image": "x"}]},
    "an init container": {"initContainers": [{"name": "x", "image": "x"}]},
    "the container of ray": {"containers": [{"name": "ray"}]},
}


@pytest.mark.parametrize("case", WRITABLE)
@pytest.mark.parametrize("read_only", [{}, {"readOnly": False}, {"readOnly": None}, {"readOnly": "true"}])
def test_a_file_of_the_node_is_mounted_read_only_in_every_container(case, read_only, refused):
    ((kind, (container,)),) = WRITABLE[case].items()
    mount = {"name": DRIVER, "mountPath": "/node"}
    change = {"spec": {kind: [container | {"volumeMounts": [mount | read_only]}]}}
    for pool in ("rollout", "train"):
        changes = {"accelerator_profile": "Ascend", f"pods_{pool}": change}
        (path,) = refused({}, **changes)
        assert path.removeprefix("spec.pods.rollout.") == f"spec.{kind}[0].volumeMounts[0].readOnly"
    change = {"spec": {kind: [container | {"volumeMounts": [mount | {"readOnly": True}]}]}}
    assert refused(change, accelerator_profile="Ascend") == []


def test_a_volume_of_the_user_may_have_the_name_of_a_file_of_the_node_where_the_pod_does_not_mount_it(refused):
    own = {
        "volumes": [{"name": DRIVER, "emptyDir": {}}],
        "containers": [{"name": "x", "image": "x", "volumeMounts": [{"name": DRIVER, "mountPath": "/node"}]}],
    }
    assert refused({"spec": own}) == []
    assert refused({}, accelerator_profile="Ascend", pods_head={"spec": own}) == []


def test_the_heads_ray_declares_no_ports_since_its_service_would_have_no_others(refused):
    change = ray(ports=[{"containerPort": 9000, "name": "mine"}])
    assert refused({}, pods_head=change) == [f"spec.pods.head.{RAY}.ports"]
    assert refused(change) == []


@pytest.mark.parametrize("number", [6379, 8080, 8265, 10001, 52365])
def test_a_sidecar_of_the_head_keeps_off_rays_ports(number, refused):
    sidecar = {"name": "x", "image": "x", "ports": [{"containerPort": number}]}
    (path,) = refused({}, pods_head={"spec": {"containers": [sidecar]}})
    assert path == f"spec.pods.head.{RAY}.ports[0].containerPort"
    sidecar = sidecar | {"ports": [{"containerPort": number, "protocol": "UDP"}]}
    assert refused({}, pods_head={"spec": {"containers": [sidecar]}}) == []


def test_all_problems_are_reported_together(refused):
    change = {"metadata": {"labels": {"ray.io/group": "x"}}, "spec": {"hostNetwork": True, "restartPolicy": "Always"}}
    environment = [{"name": "RAY_ADDRESS", "value": "x"}]
    paths = refused(change, pods_env=environment, pods_head=ray(image="x"))
    assert len(paths) == 5


def test_parts_of_a_pool_that_the_mode_has_not_are_refused(make_training):
    changes = {"mode": "Colocated", "train.nodes": 2, "pods.rollout": {"spec": {"priorityClassName": "high"}}}
    (problem,) = all_objects.problems(make_training(changes), OperatorSettings())
    assert problem.path == "spec.pods.rollout"
    assert "Colocated" in problem.message


ALLOWED: list[dict[str, Any]] = [
    {"spec": {"priorityClassName": "high", "schedulerName": "volcano", "nodeSelector": {"zone": "a"}}},
    {"spec": {"securityContext": None, "tolerations": None, "affinity": {"nodeAffinity": {}}}},
    {"spec": {"terminationGracePeriodSeconds": 5, "imagePullSecrets": [{"name": "registry"}]}},
    {"spec": {"volumes": [{"name": "scratch", "hostPath": {"path": "/nvme"}}]}}
    | {"metadata": {"annotations": {"kueue.x-k8s.io/podset-required-topology": "rack"}}},
    {
        "spec": {
            "volumes": [{"name": "scratch", "emptyDir": {}}],
            "containers": [{"name": "ray", "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}]}],
            "initContainers": [{"name": "fetch", "image": "x", "volumeMounts": [{"name": "run", "mountPath": "/r"}]}],
        }
    },
    ray(
        resources={"limits": {"memory": "1Ti", "rdma/hca": 1}}, securityContext={"capabilities": {"add": ["IPC_LOCK"]}}
    ),
    ray(env=[{"name": "NCCL_DEBUG", "value": None, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}]),
    ray(ports=[{"containerPort": 9000, "name": "mine"}, {"containerPort": 8080, "protocol": "UDP"}]),
    {"spec": {"containers": [{"name": "x", "image": "x", "ports": [{"containerPort": 6379, "name": "metrics"}]}]}},
    {},
]


@pytest.mark.parametrize("change", ALLOWED)
def test_everything_else_is_the_users(change, refused):
    assert refused(change) == []


KEYS = st.sampled_from(
    [
        *(
            "metadata",
            "spec",
            "labels",
            "annotations",
            "containers",
            "initContainers",
            "volumes",
            "name",
            "env",
            "image",
        ),
        *(
            "value",
            "volumeMounts",
            "mountPath",
            "resources",
            "limits",
            "nvidia.com/gpu",
            "restartPolicy",
            "tolerations",
        ),
        *("rl.qwen35.io/pool", "securityContext", "emptyDir", "$patch", "args", "ports", "containerPort"),
    ]
)
LEAVES = st.sampled_from([None, True, 0, 1, "ray", "shm", "logs", "/dev/shm", "QWEN35_POOL", "Always", ""])
ANYTHING = st.recursive(
    LEAVES, lambda inside: st.lists(inside, max_size=2) | st.dictionaries(KEYS, inside, max_size=3), max_leaves=12
)
NEAR = st.fixed_dictionaries(
    {},
    optional={
        "metadata": st.fixed_dictionaries({}, optional={"labels": ANYTHING, "annotations": ANYTHING}) | ANYTHING,
        "spec": st.fixed_dictionaries(
            {},
            optional={
                "containers": st.lists(
                    st.fixed_dictionaries(
                        {"name": st.sampled_from(["ray", "logs"])},
                        optional={"env": ANYTHING, "resources": ANYTHING, "volumeMounts": ANYTHING, "image": LEAVES},
                    ),
                    max_size=2,
                )
                | ANYTHING,
                "volumes": ANYTHING,
                "tolerations": ANYTHING,
                "restartPolicy": LEAVES,
            },
        )
        | ANYTHING,
    },
)

TEXTS = st.sampled_from(["", "1", "a"])
VARIABLES = st.sampled_from(["NCCL_DEBUG", "MINE", "QWEN35_POOL", "POD_NAME"])
FOLDERS = st.sampled_from(["/scratch", "/data/x", "/var/lib/qwen35/run", "dev/shm", "/usr"])
MOSTLY_ALLOWED = st.fixed_dictionaries(
    {
        "spec": st.fixed_dictionaries(
            {
                "containers": st.lists(
                    st.fixed_dictionaries(
                        {"name": st.sampled_from(["ray", "logs"])},
                        optional={
                            "image": st.just("x"),
                            "env": st.lists(
                                st.fixed_dictionaries({"name": VARIABLES, "value": TEXTS | st.none()}), max_size=2
                            ),
                            "resources": st.fixed_dictionaries(
                                {
                                    "limits": st.dictionaries(
                                        st.sampled_from(["memory", "nvidia.com/gpu"]), TEXTS | st.none()
                                    )
                                }
                            ),
                            "volumeMounts": st.lists(
                                st.fixed_dictionaries({"name": st.just("scratch"), "mountPath": FOLDERS}), max_size=2
                            ),
                        },
                    ),
                    max_size=2,
                ),
                "volumes": st.just([{"name": "scratch", "emptyDir": {}}]),
            },
            optional={"tolerations": st.none() | st.just([]), "securityContext": st.none(), "restartPolicy": st.none()},
        )
    },
    optional={"metadata": st.fixed_dictionaries({"labels": st.dictionaries(KEYS, TEXTS | st.none(), max_size=2)})},
)


@given(change=NEAR | MOSTLY_ALLOWED)
@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=examples(300))
def test_a_change_is_refused_or_leaves_the_fenced_parts_as_they_are(change, make_training):
    training = make_training({"pods.train": change})
    if all_objects.problems(training, OperatorSettings()):
        return
    plain = pod_templates.template(make_training(), "trainer:1", "train", 1)
    merged = pod_templates.template(training, "trainer:1", "train", 1)
    assert plain["metadata"]["labels"].items() <= merged["metadata"]["labels"].items()
    assert [volume for volume in merged["spec"]["volumes"] if volume in plain["spec"]["volumes"]] == plain["spec"][
        "volumes"
    ]
    assert merged["spec"]["restartPolicy"] == "Never"
    before, after = plain["spec"]["containers"][0], merged["spec"]["containers"][0]
    assert (after["name"], after["image"]) == ("ray", before["image"])
    assert "command" not in after
    assert "args" not in after
    assert after["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert after["volumeMounts"][: len(before["volumeMounts"])] == before["volumeMounts"]
    ours = [entry for entry in before["env"] if entry["name"].startswith(("QWEN35_", "POD_NAME"))]
    assert [entry for entry in after["env"] if entry in ours] == ours


@given(change=ANYTHING)
def test_any_document_is_judged_without_an_exception(change):
    for problem in shape.problems(change, "spec.pods.train"):
        assert str(problem)
