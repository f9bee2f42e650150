"""The parts of a pod for Ray's TLS, if the spec has pods.tls: with them, Ray's processes encrypt their connections.

    Secret pods.tls.secretName ──► init container: makes a key and a certificate for this pod ──► volume in memory
      the authority's key            python -m qwen35_trainer.pod_certificate                      │ read-only
                                                                                                   ▼
                                                              container ray, and KubeRay's wait-gcs-ready

Every process of Ray needs a certificate with the address at which others reach it, and the address of a pod is known
only when the pod exists. The private key of the authority is mounted only in the init container, and the key of a pod
never leaves the memory of this pod. KubeRay gives its own init container the variables and mounts of the container
`ray`, so that container can ask the head over TLS whether it is ready. KubeRay submits the job to the dashboard, which
Ray's TLS does not cover: no pod of KubeRay needs a certificate.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from qwen35_operator.api.v1alpha1 import PodPool
from qwen35_operator.desired import object_names
from qwen35_trainer.contract.shared_names import (
    AUTHORITY_FILE,
    AUTHORITY_FOLDER,
    CERTIFICATE_FILE,
    KEY_FILE,
    TLS_FOLDER,
)
from qwen35_trainer.manifest import Problem, TrainingSpec

INIT_CONTAINER: Final = "ray-certificate"
CERTIFICATE_VOLUME: Final = "ray-tls"
AUTHORITY_VOLUME: Final = "ray-authority"
VARIABLES: Final[Mapping[str, str]] = {
    "RAY_USE_TLS": "1",
    "RAY_TLS_SERVER_CERT": f"{TLS_FOLDER}/{CERTIFICATE_FILE}",
    "RAY_TLS_SERVER_KEY": f"{TLS_FOLDER}/{KEY_FILE}",
    "RAY_TLS_CA_CERT": f"{TLS_FOLDER}/{AUTHORITY_FILE}",
}
"""Environment variables of Ray's processes (ray/_common/tls_utils.py)."""
SECRET_MODE: Final = 0o440
"""Mode of the authority's files. They belong to root and to the group of the pod's securityContext.fsGroup."""
MODULE: Final = "qwen35_trainer.pod_certificate"


def variables(spec: TrainingSpec) -> Mapping[str, str]:
    """Return the environment variables that turn on Ray's TLS; {} without pods.tls."""
    return {} if spec.pods.tls is None else VARIABLES


def volumes(spec: TrainingSpec) -> list[dict[str, Any]]:
    """Return the volumes for Ray's TLS; none without pods.tls."""
    if spec.pods.tls is None:
        return []
    items = [{"key": name, "path": name} for name in (CERTIFICATE_FILE, KEY_FILE)]
    secret = {"secretName": spec.pods.tls.secretName, "defaultMode": SECRET_MODE, "items": items}
    return [
        {"name": CERTIFICATE_VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        {"name": AUTHORITY_VOLUME, "secret": secret},
    ]


def mounts(spec: TrainingSpec) -> list[dict[str, Any]]:
    """Return the mounts of the container `ray` for Ray's TLS, without the authority's key; none without pods.tls."""
    if spec.pods.tls is None:
        return []
    return [{"name": CERTIFICATE_VOLUME, "mountPath": TLS_FOLDER, "readOnly": True}]


def init_containers(
    spec: TrainingSpec, image: str, pool: PodPool, security_context: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the field `initContainers` of a pod that makes its certificate; {} without pods.tls.

    security_context: that of the container `ray`.
    """
    if spec.pods.tls is None:
        return {}
    names = ["--name", "$(FQ_RAY_IP)", "--name", "$(RAY_IP)"] if pool == object_names.HEAD else []
    container = {
        "name": INIT_CONTAINER,
        "image": image,
        # KubeRay sets FQ_RAY_IP and RAY_IP, the names of the head's Service, in every init container.
        "command": ["python", "-m", MODULE, "--addresses", "$(POD_IPS)", *names],
        "env": [{"name": "POD_IPS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIPs"}}}],
        # Its last lines become the message of the pod's fault.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "256Mi"}},
        "securityContext": dict(security_context),
        "volumeMounts": [
            {"name": CERTIFICATE_VOLUME, "mountPath": TLS_FOLDER},
            {"name": AUTHORITY_VOLUME, "mountPath": AUTHORITY_FOLDER, "readOnly": True},
        ],
    }
    return {"initContainers": [container]}


def problems(change: Mapping[str, Any], ray_container: str, place: str) -> Iterator[Problem]:
    """Yield a problem for each part of a user's change of a pod with which Ray's TLS would not work, or not protect.

    change: the user's change of the pod template, whose shape has been checked. ray_container: name of Ray's container.
    place: the path of the change in the manifest. Only for a spec with pods.tls.
    """
    spec = change.get("spec", {})
    for kind in ("containers", "initContainers"):
        for index, container in enumerate(spec.get(kind, ())):
            here, name = f"{place}.spec.{kind}[{index}]", container["name"]
            if name == INIT_CONTAINER:
                message = f"{name} is the container that makes the pod's certificate (spec.pods.tls)."
                yield Problem(f"{here}.name", message, "Give yours another name.")
            for at, mount in enumerate(container.get("volumeMounts", ())):
                if mount.get("name") == AUTHORITY_VOLUME:
                    message = (
                        f"{AUTHORITY_VOLUME} has the private key of spec.pods.tls, with which anyone can join Ray."
                    )
                    yield Problem(f"{here}.volumeMounts[{at}].name", message, "Remove the mount.")
            user = (container.get("securityContext") or {}).get("runAsUser")
            if name == ray_container and user is not None:
                message = (
                    f"{user}: Ray could not read its private key (spec.pods.tls), which belongs to the pod's user."
                )
                fix = f"Set {place}.spec.securityContext.runAsUser instead."
                yield Problem(f"{here}.securityContext.runAsUser", message, fix)
