"""What is: one training and its children, as the watches and one live read have them. Plain frozen data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from qwen35_operator.api.training import Training
from qwen35_operator.api.v1alpha1 import TrainingStatus
from qwen35_trainer.contract import Control, Progress
from qwen35_trainer.spec import Problem

type Pool = Literal["head", "rollout", "train"]
type ChildKey = tuple[str, str]
"""Kind and name: ("ConfigMap", "demo-progress")."""


@dataclass(frozen=True, slots=True)
class Child:
    """What every child has. `owner` is the uid of its controller, `hash` what we last wrote, `version` the
    resourceVersion.
    """

    kind: str
    name: str
    namespace: str
    uid: str
    version: str
    owner: str | None
    hash: str | None
    deleting: datetime | None
    """Since when it is being deleted."""


@dataclass(frozen=True, slots=True)
class RayJob(Child):
    """An attempt."""

    training: str
    attempt: int
    spec_hash: str
    """Of the fields that a running attempt cannot take over."""
    created: datetime
    suspended: bool
    """spec.suspend: Kueue holds it back."""
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
        """Whether its queue holds it: spec.suspend is set, or KubeRay has not yet taken it back."""
        return self.suspended or self.deployment in ("Suspending", "Suspended")


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """One of a RayCluster's worker groups, in their order."""

    name: str
    replicas: int
    least: int
    most: int
    leaving: tuple[str, ...]
    """scaleStrategy.workersToDelete."""


@dataclass(frozen=True, slots=True)
class RayCluster(Child):
    training: str
    attempt: int
    created: datetime
    state: str
    """status.state: ready, suspended, failed or empty."""
    failure: str
    """Message of the condition ReplicaFailure while it is true; else empty."""
    groups: tuple[WorkerGroup, ...]
    autoscaled: bool
    """enableInTreeAutoscaling: replicas are Ray's then."""


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod of an attempt."""

    name: str
    namespace: str
    uid: str
    version: str
    training: str
    attempt: int
    pool: Pool
    phase: str
    ready: bool
    created: datetime
    deleting: datetime | None
    reason: str
    """Why it does not work, as one word: OOMKilled, Evicted, Preempted, NodeLost, ImagePullBackOff, Unschedulable,
    Error, …; empty while all is well, and for one that ends because it was deleted."""
    exit_code: int | None
    message: str


@dataclass(frozen=True, slots=True)
class Reported:
    """`-progress` as it was read: a report, or what is wrong with the text."""

    progress: Progress | None
    problem: str | None
    written: datetime | None
    """When it was last written, by the API server's clock."""


@dataclass(frozen=True)
class Observed:
    """Everything that a decision may look at."""

    training: Training | None
    """None when the spec could not be read; `problems` says why."""
    name: str
    namespace: str
    uid: str
    generation: int
    version: str
    """resourceVersion: the status write is refused when it is no longer this."""
    created: datetime
    deleting: bool
    status: TrainingStatus
    problems: tuple[Problem, ...] = ()
    unavailable: tuple[Problem, ...] = ()
    """Kinds that cannot be watched: KubeRay missing, no permission. Nothing is done then."""
    children: Mapping[ChildKey, Child] = field(default_factory=dict)
    """ConfigMaps, ServiceAccount, Role, RoleBinding and NetworkPolicy that we own."""
    jobs: tuple[RayJob, ...] = ()
    clusters: tuple[RayCluster, ...] = ()
    pods: tuple[Pod, ...] = ()
    reported: Reported | None = None
    """None while there is no `-progress`, or it is empty."""
    control: Control | None = None
