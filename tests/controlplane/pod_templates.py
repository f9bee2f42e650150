"""Pod templates for spec.pods: what people set, the same with one value spoilt, and anything that the schema lets through."""

from copy import deepcopy
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

type Document = dict[str, Any]

SELDOM = st.sampled_from([False] * 5 + [True])
FRAGMENTS: list[Document] = [
    {"metadata": {"labels": {"team": "rl"}, "annotations": {"note": "ß"}}},
    {"spec": {"nodeSelector": {"testbed": "gpu"}}},
    {"spec": {"tolerations": [{"key": "dedicated", "operator": "Exists"}]}},
    {"spec": {"priorityClassName": "system-node-critical"}},
    {"spec": {"schedulerName": "volcano", "shareProcessNamespace": True, "hostIPC": True}},
    {"spec": {"imagePullSecrets": [{"name": "registry"}], "dnsConfig": {"options": [{"name": "ndots", "value": "2"}]}}},
    {"spec": {"terminationGracePeriodSeconds": 5, "securityContext": {"runAsUser": 0, "runAsNonRoot": False}}},
    {"spec": {"securityContext": None, "nodeSelector": {}, "hostAliases": [{"ip": "10.0.0.1", "hostnames": ["a"]}]}},
    {"spec": {"containers": [{"name": "ray", "resources": {"limits": {"memory": "1Ti"}, "requests": {"memory": "1Ti"}}}]}},
    {"spec": {"containers": [{"name": "ray", "env": [{"name": "NCCL_DEBUG", "value": "INFO"}, {"name": "A", "value": ""}]}]}},
    {"spec": {"containers": [{"name": "ray", "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}}]}},
    {"spec": {"containers": [{"name": "log", "image": "busybox", "args": ["tail"], "ports": [{"containerPort": 9000}]}]}},
    {"spec": {"initContainers": [{"name": "warm", "image": "busybox", "volumeMounts": [{"name": "shm", "mountPath": "/x"}]}]}},
    {
        "spec": {
            "volumes": [{"name": "scratch", "hostPath": {"path": "/mnt/disk", "type": "Directory"}}],
            "containers": [{"name": "ray", "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}]}],
        }
    },
    {
        "spec": {
            "topologySpreadConstraints": [
                {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {}}
            ]
        }
    },
    {"spec": {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
        "nodeSelectorTerms": [{"matchExpressions": [{"key": "rack", "operator": "In", "values": ["a"]}]}]}}}}},
]  # fmt: skip
"""What people do to pods, each within the fence."""

# Around the fence, or with a shape that no pod has.
WORDS = [
    *("metadata", "spec", "labels", "annotations", "containers", "initContainers", "volumes", "env", "volumeMounts"),
    *(
        "name",
        "image",
        "value",
        "valueFrom",
        "mountPath",
        "resources",
        "limits",
        "requests",
        "memory",
        "nvidia.com/gpu",
    ),
    *("securityContext", "nodeSelector", "tolerations", "affinity", "restartPolicy", "hostNetwork", "command", "ports"),
    *(
        "containerPort",
        "protocol",
        "emptyDir",
        "hostPath",
        "$patch",
        "rl.qwen35.io/pool",
        "ray.io/node-type",
        "lifecycle",
    ),
    *(
        "subPath",
        "terminationGracePeriodSeconds",
        "template",
        "status",
        "",
        "a" * 70,
        "schedulingGates",
        "hostAliases",
        "ip",
    ),
    *("imagePullSecrets", "topologySpreadConstraints", "topologyKey", "whenUnsatisfiable", "claims", "readinessProbe"),
]
TEMPLATE_VALUES = st.sampled_from(
    [None, True, False, 0, -1, 1.5, 2**31, "", "ray", "x", "10Gi", "-1", "/dev/shm", "ß", "a b", "replace", "TCP", 8265]
)


def sane_templates() -> SearchStrategy[Document]:
    """Some fragments side by side."""
    return st.lists(st.sampled_from(FRAGMENTS), max_size=2, unique_by=repr).map(joined)


@st.composite
def corrupted_templates(draw: st.DrawFn) -> Document:
    """A fragment with one value in it replaced by another."""
    template: Document = deepcopy(draw(st.sampled_from(FRAGMENTS)))
    here: Any = template
    while True:
        key = draw(st.sampled_from(list(here) if isinstance(here, dict) else range(len(here))))
        if not here[key] or not isinstance(here[key], (dict, list)) or draw(SELDOM):
            here[key] = draw(TEMPLATE_VALUES)
            return template
        here = here[key]


def mad_templates() -> SearchStrategy[Document]:
    """Anything that the schema lets through."""
    inside = st.recursive(
        TEMPLATE_VALUES,
        lambda values: st.one_of(
            st.dictionaries(st.sampled_from(WORDS), values, max_size=3),
            st.lists(values, max_size=2),
            _containers(values),
        ),
        max_leaves=8,
    )
    spec = st.dictionaries(st.sampled_from(WORDS), inside, max_size=3)
    return st.one_of(
        *[corrupted_templates()] * 3,
        st.fixed_dictionaries({"spec": spec}, optional={"metadata": spec | inside}),
        st.dictionaries(st.sampled_from([*WORDS[:2], *WORDS]), inside, max_size=3),
        _containers(inside).map(lambda containers: {"spec": {"containers": containers}}),
    )


def _containers(values: SearchStrategy[Any]) -> SearchStrategy[Any]:
    named = st.fixed_dictionaries({"name": st.sampled_from(["ray", "log", "autoscaler", "shm"])})
    return st.lists(
        st.builds(
            lambda required, rest: rest | required, named, st.dictionaries(st.sampled_from(WORDS), values, max_size=3)
        ),
        min_size=1,
        max_size=2,
    )


def joined(fragments: list[Document]) -> Document:
    """One template of several; what sets the same section of the pod replaces it."""
    whole: Document = {}
    for fragment in fragments:
        for key, part in fragment.items():
            whole[key] = {**whole.get(key, {}), **part}
    return whole
