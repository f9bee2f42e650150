"""What a profile says: everything about a node that depends on its kind of device."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Size:
    """Part of a pod.

    Its memory holds its shared memory, which holds Ray's object store: 30% of the memory, by Ray's default.
    """

    cpu: float
    memory_gib: int
    shm_gib: int


@dataclass(frozen=True)
class HostPath:
    """Something of the node that its containers need, mounted read-only at the same path."""

    name: str
    path: str
    type: Literal["Directory", "File"]


@dataclass(frozen=True)
class Profile:
    """One kind of device.

    Scheduler hints depend on the generation of the hardware and on the cluster: they are the user's, in spec.pods.
    """

    resource: str | None
    """The device's name in Kubernetes; None where nodes have none to hand out."""
    ray_resource: str | None
    """Its name in Ray, as actors ask for it."""
    head: Size
    per_device: Size
    grace_seconds: int
    """Between SIGTERM and SIGKILL of a pod: `ray stop`, and the release of device memory."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of the pods with devices, before `ray start`: a driver's runtime environment would come too late for it."""
    host_paths: tuple[HostPath, ...] = ()
