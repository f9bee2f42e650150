"""How the operator itself is set up: `qwen35 operator` fills this from its options."""

import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from qwen35_trainer import __version__
from qwen35_trainer.spec.accelerator import Profile

IMAGES: Mapping[Profile, str] = {
    "nvidia": f"ghcr.io/qwen35/trainer-cuda:{__version__}",
    "ascend": f"ghcr.io/qwen35/trainer-ascend:{__version__}",
    "cpu": f"ghcr.io/qwen35/trainer-cpu:{__version__}",
}


class SettingsRefused(ValueError):
    """An option that cannot be used; names it and the fix."""


def images(changes: Sequence[str]) -> Mapping[Profile, str]:
    """The trainer images, with changes like cpu=registry/image:tag. Raises SettingsRefused."""
    chosen = dict(IMAGES)
    for change in changes:
        profile, _, image = change.partition("=")
        known = next((one for one in IMAGES if one == profile), None)
        if known is None or not image:
            raise SettingsRefused(f"--image {change}: write PROFILE=IMAGE, with a profile of {', '.join(IMAGES)}")
        chosen[known] = image
    return chosen


def own_identity() -> str:
    """A name in the Lease that no other process has, nor this one after a restart."""
    return f"{socket.gethostname()}-{secrets.token_hex(4)}"


@dataclass(frozen=True)
class Settings:
    """One operator process."""

    namespaces: tuple[str, ...] = ()
    """Namespaces that it serves; empty is all of them."""
    images: Mapping[Profile, str] = field(default_factory=lambda: IMAGES)
    """Trainer image by accelerator.profile, for trainings that name none."""
    lease_namespace: str = "default"
    """Where the Lease of leader election is."""
    lease_name: str = "qwen35-operator"
    identity: str = "qwen35-operator"
    """Name of this replica in the Lease."""
    metrics_port: int = 8080
    """0 serves no metrics."""
    health_port: int = 8081
    """0 answers no probes."""
    workers: int = 8
    """Reconciles at a time."""
