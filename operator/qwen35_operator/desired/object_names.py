"""Labels, annotations and names of child objects, by which the operator finds and recognizes them."""

import hashlib
import json
import re
from collections.abc import Iterator

from qwen35_operator.api.training_resource import TrainingResource
from qwen35_trainer.contract.shared_names import LANE_LABEL, POOL_LABEL
from qwen35_trainer.manifest import Problem

DOMAIN = "rl.qwen35.io"
TRAINING = f"{DOMAIN}/training"
ATTEMPT = f"{DOMAIN}/attempt"
POOL = POOL_LABEL
LANE = LANE_LABEL
LANE_GROUP = "lane"
"""Name of the worker group with the nodes of the straggler lane. They belong to the pool rollout."""
COMPONENT = "app.kubernetes.io/component"
HASH = f"{DOMAIN}/hash"
"""Annotation: hash of the object as the operator last wrote it."""
RETRY = f"{DOMAIN}/retry"
"""Annotation of a training: a failed training is tried again whenever the value changes."""
UPDATE = f"{DOMAIN}/update"
"""Annotation of a training: if the value changes, the next attempt takes the operator's trainer image and Ray version.

A RayJob has the same annotation, with the training's value at the time when image and version were chosen.
"""
IMAGE = f"{DOMAIN}/image"
"""Annotation of a RayJob: the trainer image as the spec or the operator's settings name it.

The pods may name the same image by its digest.
"""
KNOWN_VERSION = f"{DOMAIN}/known-version"
"""Annotation of the operator's Lease: the resourceVersion up to which the leader has usually acted on changes."""
FORCE_START = f"{DOMAIN}/force-start"
"""Annotation of a training: the number of an attempt that may start although pods of earlier ones may still run."""
LAST_CHECKPOINT = f"{DOMAIN}/last-checkpoint"
"""Finalizer of a training, set by its user: before the training is deleted, its open attempt saves a checkpoint."""
SPEC_HASH = f"{DOMAIN}/spec-hash"
"""Annotation of a RayJob: the result of `spec_hash.spec_hash` for the spec with which the attempt was started."""

HEAD, ROLLOUT, TRAIN = "head", "rollout", "train"
HISTORY = "history"
"""Value of the label `COMPONENT` of the ConfigMap `-history`, the only ConfigMap whose content is not watched."""

MAX_NAME_LENGTH = 40
"""Maximum length of a training's name, in characters. KubeRay allows 47 characters in the name of a RayJob, which
consists of the training's name, a dash, and the number of the attempt with at most six digits."""
MAX_ATTEMPT_NUMBER = 999_999
"""Maximum number of an attempt: see MAX_NAME_LENGTH."""


def labels(training: str, component: str) -> dict[str, str]:
    """Return the labels of a child object.

    training: name of the training. component: role of the object, such as "config".
    """
    return {
        TRAINING: training,
        "app.kubernetes.io/name": "qwen35",
        "app.kubernetes.io/instance": training,
        COMPONENT: component,
        "app.kubernetes.io/part-of": "qwen35",
        "app.kubernetes.io/managed-by": "qwen35-operator",
    }


def job_name(training: str, attempt: int) -> str:
    """Return the name of an attempt's RayJob."""
    return f"{training}-{attempt}"


def account_name(training: str) -> str:
    """Return the name of the trainer's ServiceAccount, Role and RoleBinding."""
    return f"{training}-trainer"


def budget_name(training: str) -> str:
    """Return the name of the PodDisruptionBudget."""
    return f"{training}-disruptions"


def selector(training: str) -> str:
    """Return the label selector of all objects of a training."""
    return f"{TRAINING}={training}"


def rollout_selector(training: str) -> str:
    """Return the label selector of the rollout pool's pods, for the scale subresource."""
    return f"{selector(training)},{POOL}={ROLLOUT}"


def digest(document: object) -> str:
    """Return a hash of a plain document: 16 hexadecimal digits. The order of keys does not matter."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def problems(training: TrainingResource) -> Iterator[Problem]:
    """Yield a problem if the training's name is invalid, or too long to be contained in the names of its objects."""
    name = training.name
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        message = f"{name} cannot name a RayJob: it needs lower-case letters, digits and dashes, and a letter first."
        yield Problem("metadata.name", message, "Create the training again with such a name, e.g. with a prefix.")
    if len(name) > MAX_NAME_LENGTH:
        message = f"{name} has {len(name)} characters; the names of its objects leave room for {MAX_NAME_LENGTH}."
        yield Problem("metadata.name", message, "Create the training again with a shorter name.")
