"""The writes that a decision can request. They are carried out in order, and the status is written last.

After a write that the API server refuses, only deletions and repairs are still carried out. A repair
that fails stops no other write.
"""

from dataclasses import dataclass
from typing import Literal

from qwen35_operator.desired.objects import KubeObject
from qwen35_operator.kube.kinds import DISRUPTION_BUDGET


@dataclass(frozen=True)
class Create:
    """Create a child. An existing object of the same name is adopted if this training owns it.

    Otherwise the write is refused, with reason Cleaning if the existing object is still being deleted, or NameTaken if
    it belongs to another owner.
    """

    manifest: KubeObject
    is_repair: bool = False
    """Whether it only restores a child of pods that exist already. No other write depends on a repair."""


@dataclass(frozen=True)
class Apply:
    """Change an existing child by server-side apply, unless the stored child is already as desired.

    The apply restores the fields of the manifest, and removes fields that the operator wrote earlier and the manifest
    does not have. Fields of other managers stay. The write is refused, with reason Cleaning, if the object now has
    another uid.
    """

    manifest: KubeObject
    uid: str
    is_repair: bool = False
    """Whether it only restores a child of pods that exist already. No other write depends on a repair."""


@dataclass(frozen=True)
class Scale:
    """Resize a worker group of a RayCluster.

    index: position of the worker group in the RayCluster. group: its name. The API server refuses the patch if the
    RayCluster has another uid, or if the group at this position has another name or does not have `current_replicas`.
    """

    cluster: str
    uid: str
    index: int
    group: str
    current_replicas: int
    replicas: int
    min_replicas: int
    max_replicas: int
    pods_to_delete: tuple[str, ...] = ()
    """Names of the pods that KubeRay deletes first when the group shrinks."""


@dataclass(frozen=True)
class Delete:
    """Delete the object with this uid. A later object of the same name has another uid and stays."""

    kind: str
    name: str
    uid: str
    is_repair: bool = False
    """Whether it only removes a child that should not exist. No other write depends on a repair."""


@dataclass(frozen=True)
class RemoveFinalizer:
    """Remove a finalizer of the training. The API server refuses this if the training has changed since it was observed."""

    name: str


@dataclass(frozen=True)
class PostEvent:
    """Post an event on the training, for people to read. No decision depends on it."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


type ClusterWrite = Create | Apply | Scale | Delete | RemoveFinalizer | PostEvent


@dataclass(frozen=True)
class RefusedWrite:
    """A write that the API server refused or failed to carry out, and that would fail again if it were repeated immediately."""

    write: ClusterWrite
    reason: str
    """Why the write was refused, in one word.

    NameTaken, Cleaning, Forbidden, Rejected (the object is invalid, or a policy forbids its deletion), KubeRayMissing, KubeRayTooOld,
    QuotaExceeded or WriteFailed.
    """
    message: str
    """Text for people that names the object and the fix."""


def is_repair(write: ClusterWrite) -> bool:
    """Return whether no other write depends on this one."""
    return isinstance(write, Create | Apply | Delete) and write.is_repair


def is_of_budget(write: ClusterWrite) -> bool:
    """Return whether the write creates, changes or deletes a PodDisruptionBudget."""
    match write:
        case Create(manifest=manifest) | Apply(manifest=manifest):
            return bool(manifest["kind"] == DISRUPTION_BUDGET.name)
        case Delete(kind=kind):
            return kind == DISRUPTION_BUDGET.name
    return False
