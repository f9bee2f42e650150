"""Changes of pod templates (spec.pods.train) for each control of the Pod Security Standards: what its level refuses, and what it allows.

The identifiers of the controls are those of k8s.io/pod-security-admission.
"""

from dataclasses import dataclass
from typing import Any

type Document = dict[str, Any]

SAFE: Document = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
"""Security context that an added container needs at the level Restricted."""


@dataclass(frozen=True)
class Control:
    """One control, with changes that it refuses from its level on, and changes that this level allows."""

    id: str
    level: str
    refused: tuple[Document, ...]
    allowed: tuple[Document, ...]


def pod(**spec: Any) -> Document:
    return {"spec": spec}


def pod_context(**context: Any) -> Document:
    return pod(securityContext=context)


def ray(**fields: Any) -> Document:
    return pod(containers=[{"name": "ray", **fields}])


def ray_context(**context: Any) -> Document:
    return ray(securityContext=context)


def added(kind: str = "containers", **fields: Any) -> Document:
    """A container in addition to `ray`, which meets Restricted unless `fields` change that."""
    return pod(**{kind: [{"name": "log", "image": "busybox", "securityContext": SAFE} | fields]})


def added_context(**context: Any) -> Document:
    return added(securityContext=SAFE | context)


def volume(**source: Any) -> Document:
    return pod(volumes=[{"name": "scratch", **source}])


def annotation(value: str | None) -> Document:
    return {"metadata": {"annotations": {"container.apparmor.security.beta.kubernetes.io/ray": value}}}


CONTROLS = (
    Control(
        "hostNamespaces",
        "Baseline",
        (pod(hostIPC=True), pod(hostPID=True), pod(hostNetwork=True)),
        (pod(hostIPC=False), pod(hostPID=None), pod(shareProcessNamespace=True)),
    ),
    Control(
        "windowsHostProcess",
        "Baseline",
        (
            pod_context(windowsOptions={"hostProcess": True}),
            ray_context(windowsOptions={"hostProcess": True}),
        ),
        (pod_context(windowsOptions={"hostProcess": False}), pod_context(windowsOptions=None)),
    ),
    Control(
        "privileged",
        "Baseline",
        (
            ray_context(privileged=True, allowPrivilegeEscalation=None),
            added_context(privileged=True, allowPrivilegeEscalation=True),
            added("initContainers", securityContext={"privileged": True}),
        ),
        (ray_context(privileged=False), ray_context(privileged=None), added_context(privileged=False)),
    ),
    Control(
        "capabilities_baseline",
        "Baseline",
        (
            ray_context(capabilities={"add": ["IPC_LOCK"]}),
            ray_context(capabilities={"add": ["NET_BIND_SERVICE", "SYS_PTRACE"]}),
            added_context(capabilities={"drop": ["ALL"], "add": ["NET_RAW"]}),
            added("initContainers", securityContext={"capabilities": {"add": ["SYS_ADMIN"]}}),
        ),
        (ray_context(capabilities={"add": ["NET_BIND_SERVICE"]}), ray_context(capabilities={"add": []}), ray_context(capabilities={"add": None})),
    ),
    Control(
        "hostPathVolumes",
        "Baseline",
        (volume(hostPath={"path": "/"}), volume(hostPath={"path": "/nvme", "type": "Directory"})),
        (volume(emptyDir={}), volume(hostPath=None, emptyDir={}), volume()),
    ),
    Control(
        "hostPorts",
        "Baseline",
        (
            ray(ports=[{"containerPort": 9000, "hostPort": 9000}]),
            added(ports=[{"containerPort": 9000}, {"containerPort": 9001, "hostPort": 9001}]),
        ),
        (ray(ports=[{"containerPort": 9000}]), ray(ports=[{"containerPort": 9000, "hostPort": 0}]), ray(ports=[])),
    ),
    Control(
        "hostProbesAndHostLifecycle",
        "Baseline",
        (
            added(livenessProbe={"httpGet": {"port": 80, "host": "169.254.169.254"}}),
            added(readinessProbe={"tcpSocket": {"port": 80, "host": "10.0.0.1"}}),
            added(startupProbe={"httpGet": {"port": 80, "host": "10.0.0.1"}}),
            ray(lifecycle={"postStart": {"httpGet": {"port": 80, "host": "169.254.169.254"}}}),
            ray(lifecycle={"preStop": {"tcpSocket": {"port": 80, "host": "10.0.0.1"}}}),
        ),
        (
            added(livenessProbe={"httpGet": {"port": 80}}),
            added(readinessProbe={"exec": {"command": ["true"]}}),
            ray(lifecycle={"preStop": {"httpGet": {"port": 80, "host": ""}}}),
            ray(lifecycle={"preStop": None}),
        ),
    ),
    Control(
        "appArmorProfile",
        "Baseline",
        (
            pod_context(appArmorProfile={"type": "Unconfined"}),
            ray_context(appArmorProfile={"type": "Unconfined"}),
            annotation("unconfined"),
        ),
        (
            pod_context(appArmorProfile={"type": "RuntimeDefault"}),
            ray_context(appArmorProfile={"type": "Localhost", "localhostProfile": "ray"}),
            annotation("localhost/ray"),
            annotation("runtime/default"),
            annotation(None),
            {"metadata": {"annotations": {"note": "unconfined"}}},
        ),
    ),
    Control(
        "seLinuxOptions",
        "Baseline",
        (
            pod_context(seLinuxOptions={"type": "spc_t"}),
            ray_context(seLinuxOptions={"user": "system_u"}),
            added_context(seLinuxOptions={"role": "system_r"}),
        ),
        (
            pod_context(seLinuxOptions={"type": "container_t", "level": "s0:c1,c2"}),
            ray_context(seLinuxOptions={"type": "container_engine_t"}),
            ray_context(seLinuxOptions=None),
        ),
    ),
    Control(
        "procMount",
        "Baseline",
        (ray_context(procMount="Unmasked"), added_context(procMount="Unmasked")),
        (ray_context(procMount="Default"), ray_context(procMount=None)),
    ),
    Control(
        "seccompProfile_baseline",
        "Baseline",
        (
            pod_context(seccompProfile={"type": "Unconfined"}),
            ray_context(seccompProfile={"type": "Unconfined"}),
            added_context(seccompProfile={"type": "Unconfined"}),
        ),
        (
            pod_context(seccompProfile={"type": "Localhost", "localhostProfile": "ray.json"}),
            ray_context(seccompProfile={"type": "RuntimeDefault"}),
            ray_context(seccompProfile=None),
        ),
    ),
    Control(
        "sysctls",
        "Baseline",
        (
            pod_context(sysctls=[{"name": "kernel.msgmax", "value": "65536"}]),
            pod_context(sysctls=[{"name": "net.ipv4.tcp_rmem", "value": "1 2 3"}, {"name": "net.core.somaxconn", "value": "1"}]),
        ),
        (pod_context(sysctls=[{"name": "net.ipv4.tcp_rmem", "value": "4096 87380 6291456"}]), pod_context(sysctls=[]), pod_context(sysctls=None)),
    ),
    Control(
        "restrictedVolumes",
        "Restricted",
        (
            volume(nfs={"server": "nfs.example", "path": "/models"}),
            volume(iscsi={"targetPortal": "10.0.0.1:3260", "iqn": "iqn.2001-04.com.example:disk", "lun": 0}),
        ),
        (
            volume(persistentVolumeClaim={"claimName": "models"}),
            volume(secret={"secretName": "keys"}),
            volume(configMap={"name": "settings"}),
            volume(projected={"sources": [{"secret": {"name": "keys"}}]}),
            volume(csi={"driver": "secrets.example"}),
            volume(downwardAPI={"items": []}),
            volume(image={"reference": "registry.example/model:1"}),
            volume(ephemeral={"volumeClaimTemplate": {"spec": {
                "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}}}),
        ),
    ),
    Control(
        "allowPrivilegeEscalation",
        "Restricted",
        (
            ray_context(allowPrivilegeEscalation=True),
            ray_context(allowPrivilegeEscalation=None),
            ray(securityContext=None),
            added(securityContext={"capabilities": {"drop": ["ALL"]}}),
            added("initContainers", securityContext={"capabilities": {"drop": ["ALL"]}}),
            added(securityContext=None),
        ),
        (ray_context(allowPrivilegeEscalation=False), ray_context(), added(), added("initContainers")),
    ),
    Control(
        "runAsNonRoot",
        "Restricted",
        (
            pod_context(runAsNonRoot=False),
            pod_context(runAsNonRoot=None),
            pod(securityContext=None),
            ray_context(runAsNonRoot=False),
            added_context(runAsNonRoot=False),
        ),
        (pod_context(runAsNonRoot=True), ray_context(runAsNonRoot=True), added_context(runAsNonRoot=True)),
    ),
    Control(
        "runAsUser",
        "Restricted",
        (pod_context(runAsUser=0), ray_context(runAsUser=0), added_context(runAsUser=0)),
        (pod_context(runAsUser=2000), pod_context(runAsUser=None), ray_context(runAsUser=1)),
    ),
    Control(
        "seccompProfile_restricted",
        "Restricted",
        (pod_context(seccompProfile=None), pod(securityContext=None)),
        (
            pod_context(seccompProfile={"type": "RuntimeDefault"}),
            pod_context(seccompProfile={}),
            added_context(seccompProfile={"type": "Localhost", "localhostProfile": "log.json"}),
        ),
    ),
    Control(
        "capabilities_restricted",
        "Restricted",
        (
            ray_context(capabilities={"add": ["CHOWN"]}),
            ray_context(capabilities={"drop": []}),
            ray_context(capabilities={"drop": None}),
            ray_context(capabilities={"drop": ["NET_RAW"]}),
            ray_context(capabilities=None),
            ray(securityContext=None),
            added(securityContext={"allowPrivilegeEscalation": False}),
            added_context(capabilities={"drop": ["NET_RAW"]}),
        ),
        (
            ray_context(capabilities={"drop": ["ALL"]}),
            ray_context(capabilities={"drop": ["NET_RAW", "ALL"], "add": ["NET_BIND_SERVICE"]}),
            added_context(capabilities={"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}),
        ),
    ),
)  # fmt: skip
