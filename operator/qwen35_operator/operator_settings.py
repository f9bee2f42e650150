"""Settings of the operator, from the options of `qwen35 operator`."""

import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from qwen35_trainer import __version__
from qwen35_trainer.manifest.accelerator import ProfileName

IMAGES: Mapping[ProfileName, str] = {
    "NVIDIA": f"ghcr.io/qwen35/trainer-cuda:{__version__}",
    "Ascend": f"ghcr.io/qwen35/trainer-ascend:{__version__}",
    "CPU": f"ghcr.io/qwen35/trainer-cpu:{__version__}",
}


KUBERAY_NAMESPACE = "kuberay-system"


class SettingsRefused(ValueError):
    """An option cannot be used. The message names the option and the fix."""


def images(changes: Sequence[str]) -> Mapping[ProfileName, str]:
    """Return the trainer image of each device profile: the default, or the image that a change names.

    changes: of the form PROFILE=IMAGE, such as CPU=registry/image:tag. Raises SettingsRefused if a change names an
    unknown profile or no image.
    """
    chosen = dict(IMAGES)
    for change in changes:
        profile, _, image = change.partition("=")
        name = next((name for name in IMAGES if name == profile), None)
        if name is None or not image:
            raise SettingsRefused(f"--image {change}: write PROFILE=IMAGE, with a profile of {', '.join(IMAGES)}")
        chosen[name] = image
    return chosen


def own_identity() -> str:
    """Return a name by which the Lease identifies this process. Every call returns a new unique name."""
    return f"{socket.gethostname()}-{secrets.token_hex(4)}"


@dataclass(frozen=True)
class OperatorSettings:
    """Settings of one operator process."""

    namespaces: tuple[str, ...] = ()
    """Namespaces whose trainings the operator serves; empty for all."""
    images: Mapping[ProfileName, str] = field(default_factory=lambda: IMAGES)
    """Trainer image of each device profile, for trainings whose spec names no image."""
    kuberay_namespaces: tuple[str, ...] = (KUBERAY_NAMESPACE,)
    """Namespaces in which KubeRay's operator runs. Only from these may it reach the dashboards of trainings."""
    lease_namespace: str = "default"
    """Namespace of the Lease for leader election."""
    lease_name: str = "qwen35-operator"
    identity: str = "qwen35-operator"
    """Name of this process in the Lease."""
    metrics_port: int = 8080
    """Port of the metrics for Prometheus; 0 disables this server."""
    metrics_authentication: bool = False
    """Whether the metrics are served only to tokens that may get /metrics, as the API server decides."""
    metrics_certificate: Path | None = None
    """Folder with tls.crt and tls.key, with which the metrics are served over HTTPS; None for HTTP."""
    health_port: int = 8081
    """Port of the liveness and readiness probes; 0 disables this server."""
    workers: int = 8
    """Maximum number of concurrent reconciles."""
