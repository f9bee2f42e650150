"""What may be done to the cluster. A decision is a list of these, done in order; the status is written after them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

type Manifest = Mapping[str, Any]
"""A Kubernetes object as plain data."""


@dataclass(frozen=True)
class Create:
    """Create a child. One that exists already is fine when it is ours, and a refusal (`NameTaken`) when it is not."""

    manifest: Manifest


@dataclass(frozen=True)
class Update:
    """Merge-patch a child that we own. Refused by the API server when the uid is another's by now."""

    manifest: Manifest
    uid: str


@dataclass(frozen=True)
class Scale:
    """Change the size of a worker group. Refused when name, index or present replicas are no longer these."""

    cluster: str
    uid: str
    index: int
    group: str
    present: int
    wanted: int
    least: int
    most: int
    victims: tuple[str, ...] = ()
    """Pods that KubeRay is to take first, when shrinking."""


@dataclass(frozen=True)
class Delete:
    """Delete an object, this uid and no later one of its name."""

    kind: str
    name: str
    uid: str


@dataclass(frozen=True)
class Announce:
    """An event on the training. Written for people: nothing reads it back."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


type Action = Create | Update | Scale | Delete | Announce


@dataclass(frozen=True)
class Refused:
    """An action that the API server would not do, and that trying again at once would not change."""

    action: Action
    reason: str
    """NameTaken, Forbidden, Rejected (the object is invalid), KubeRayMissing, KubeRayTooOld, QuotaExceeded."""
    message: str
    """Names the object and the fix."""
