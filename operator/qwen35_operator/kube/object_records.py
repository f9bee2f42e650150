"""Records: small frozen copies of a training's objects, with only the fields that decisions read."""

from dataclasses import dataclass, field
from datetime import datetime

from qwen35_operator.api.v1alpha1 import PodPool

FINAL_JOB_STATES = ("Complete", "Failed", "ValidationFailed")
"""Values of status.jobDeploymentStatus that a RayJob never leaves."""


@dataclass(frozen=True, slots=True)
class OwnWrite:
    """The operator's latest write of an object, its latest check that the object did not need a write, or its latest try.

    The object was as desired after this write, or at this check.
    """

    version: str
    """resourceVersion of the object in the answer; empty if the API server did not carry the write out."""
    time: datetime
    hash: str | None = None
    """Hash of the object that the operator wrote, or tried to write."""
    refusal: tuple[str, str] | None = None
    """Reason and message of a try that has failed; None otherwise."""


@dataclass(frozen=True, slots=True)
class Child:
    """The fields that every child object has."""

    kind: str
    name: str
    namespace: str
    uid: str
    version: str
    """resourceVersion of the object."""
    owner: str | None
    """uid of the object's controller; None if it has none."""
    hash: str | None
    """Hash of the object as the operator last wrote it, from an annotation; None if the annotation is missing."""
    deleting: datetime | None
    """deletionTimestamp of the object; None if it is not being deleted."""
    own_write: OwnWrite | None = field(default=None, kw_only=True)
    """The latest request that left the object as desired; None if this process has not written or checked it."""


@dataclass(frozen=True, slots=True)
class MessageConfigMap(Child):
    """The ConfigMap `-progress` or `-control` of a training, with its message as text."""

    text: bytes | None
    """The message as JSON in UTF-8; None if the ConfigMap does not contain one.

    A message above the maximum size is cut to one byte more, so that it is still refused as too large but takes little
    memory. Anyone with the permissions of a trainer can write such a message.
    """
    written: datetime | None
    """When the text was last written, by the API server's clock; None if managedFields does not contain the time."""


@dataclass(frozen=True, slots=True)
class RayJob(Child):
    """The RayJob of an attempt."""

    training: str
    attempt: int
    spec_hash: str
    """Result of `spec_hash.spec_hash` for the spec with which the attempt was started; empty if the annotation is
    missing."""
    created: datetime
    suspended: bool
    """spec.suspend: true while Kueue does not admit the job."""
    deployment: str
    """status.jobDeploymentStatus; empty until KubeRay has set it."""
    status: str
    """status.jobStatus; empty until KubeRay has set it."""
    reason: str
    message: str
    cluster: str
    """status.rayClusterName; empty until KubeRay has set it, and while a queue holds the job back."""
    queued: bool
    """Whether the job has a queue of Kueue, from its label."""
    rollout_nodes: int
    """Number of rollout nodes in spec.rayClusterSpec: with a queue, the number that the queue admits."""
    image: str
    """Trainer image of the pods; empty if the job names none."""
    image_reference: str
    """The image as the spec or the operator's settings name it, from an annotation; empty if that is missing."""
    ray_version: str
    update_request: str
    """Value of the training's annotation UPDATE when image and version of Ray were chosen; empty if it had none."""

    @property
    def ended(self) -> bool:
        """Whether the job has ended for good."""
        return self.deployment in FINAL_JOB_STATES

    @property
    def held(self) -> bool:
        """Whether a queue holds the job back: spec.suspend is true, or KubeRay has not yet resumed the job.

        The value is False for a job that has ended, because KubeRay then ignores spec.suspend.
        """
        return not self.ended and (self.suspended or self.deployment in ("Suspending", "Suspended"))


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """One worker group of a RayCluster."""

    name: str
    replicas: int
    min_replicas: int
    max_replicas: int
    leaving: tuple[str, ...]
    """Names of the pods that KubeRay deletes first when it shrinks the group: scaleStrategy.workersToDelete."""


@dataclass(frozen=True, slots=True)
class RayCluster(Child):
    """The RayCluster of an attempt. Its worker groups are in the order in which the object lists them."""

    training: str
    attempt: int
    created: datetime
    state: str
    """status.state: ready, suspended or failed; empty until KubeRay has set it."""
    failure: str
    """Message of the condition ReplicaFailure while it is true; otherwise empty."""
    groups: tuple[WorkerGroup, ...]
    autoscaled: bool
    """enableInTreeAutoscaling: whether Ray's autoscaler sets the number of pods of each group."""


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
    lane: bool
    """Whether the pod is a node of the straggler lane, which is a part of the pool rollout."""
    phase: str
    ready: bool
    created: datetime
    deleting: datetime | None
    """When the pod's deletion was requested; None if the pod is not being deleted."""
    reason: str
    """Why the pod does not work, in one word: OOMKilled, Evicted, Preempted, NodeLost, ImagePullBackOff, Unschedulable,
    SidecarFailed, Error, …; empty for a healthy pod and for one that ends because it was deleted."""
    exit_code: int | None
    message: str
    node: str = ""
    """Name of the Kubernetes node on which the pod is; empty while it is on none."""
    ended: bool = False
    """Whether all containers of the pod have ended for good."""
    cluster: str = ""
    """Name of the RayCluster that controls the pod. Empty for a pod that somebody has made with the same labels."""
    image_id: str = ""
    """imageID of the container `ray`: its image by digest, in the form of the node's container runtime. Empty until the
    node has reported it."""
    unready_since: datetime | None = None
    """Since when a pod with a node is not ready: since it got the node, or since it was last ready. None if that is unknown."""


type ObjectRecord = Child | Pod
