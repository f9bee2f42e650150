"""Records: small frozen copies of a training's objects, with only the fields that decisions read."""

from dataclasses import dataclass
from datetime import datetime

from qwen35_operator.api.v1alpha1 import PodPool


@dataclass(frozen=True, slots=True)
class Child:
    """The fields that every child object has."""

    kind: str
    name: str
    namespace: str
    uid: str
    version: str
    """resourceVersion."""
    owner: str | None
    """uid of the controller."""
    hash: str | None
    """Hash of the object as the operator last wrote it."""
    deleting: datetime | None
    """Time from which it is being deleted."""


@dataclass(frozen=True, slots=True)
class MessageConfigMap(Child):
    """The ConfigMap `-progress` or `-control` of a training, with its message as text."""

    text: str | None
    """None while the key is absent."""
    written: datetime | None
    """When the text last changed, by the API server's clock."""


@dataclass(frozen=True, slots=True)
class RayJob(Child):
    """The RayJob of an attempt."""

    training: str
    attempt: int
    spec_hash: str
    """Hash of the fields that a running attempt cannot take over."""
    created: datetime
    suspended: bool
    """spec.suspend: Kueue has not admitted it."""
    deployment: str
    """status.jobDeploymentStatus; empty at first."""
    status: str
    """status.jobStatus; empty at first."""
    reason: str
    message: str
    cluster: str
    """status.rayClusterName; empty at first."""

    @property
    def held(self) -> bool:
        """Whether a queue holds the job back: spec.suspend is set, or KubeRay has not yet resumed the job."""
        return self.suspended or self.deployment in ("Suspending", "Suspended")


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """One worker group of a RayCluster."""

    name: str
    replicas: int
    min_replicas: int
    max_replicas: int
    leaving: tuple[str, ...]
    """Names of pods in scaleStrategy.workersToDelete."""


@dataclass(frozen=True, slots=True)
class RayCluster(Child):
    """The RayCluster of an attempt; its worker groups keep their order."""

    training: str
    attempt: int
    created: datetime
    state: str
    """status.state: ready, suspended, failed or empty."""
    failure: str
    """Message of the condition ReplicaFailure while it is true; otherwise empty."""
    groups: tuple[WorkerGroup, ...]
    autoscaled: bool
    """enableInTreeAutoscaling: Ray's autoscaler sets the replicas."""


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod of an attempt."""

    name: str
    namespace: str
    uid: str
    version: str
    training: str
    attempt: int
    pool: PodPool
    phase: str
    ready: bool
    created: datetime
    deleting: datetime | None
    """When its deletion was requested."""
    reason: str
    """Why the pod does not work, in one word: OOMKilled, Evicted, Preempted, NodeLost, ImagePullBackOff, Unschedulable,
    Error, …; empty for a healthy pod and for one that ends because it was deleted."""
    exit_code: int | None
    message: str


type ObjectRecord = Child | Pod
