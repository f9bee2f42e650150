"""Labels, annotations and names: how children are found, and told from what is not ours."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Final

from qwen35_operator.api.training import Training
from qwen35_trainer.contract.names import POOL_LABEL
from qwen35_trainer.spec import Problem

DOMAIN = "rl.qwen35.io"
TRAINING = f"{DOMAIN}/training"
ATTEMPT = f"{DOMAIN}/attempt"
POOL = POOL_LABEL
COMPONENT = "app.kubernetes.io/component"
HASH = f"{DOMAIN}/hash"
"""Annotation: the object as we last wrote it."""
SPEC_HASH = f"{DOMAIN}/spec-hash"
"""Annotation of a RayJob: the part of the spec that its attempt runs with."""

HEAD, ROLLOUT, TRAIN = "head", "rollout", "train"
HISTORY = "history"
"""Component of the one child whose content is not watched."""

LONGEST = 40
"""Characters of a training's name. KubeRay takes 47 for a RayJob: six digits are left for the attempt."""

LIVE: Final[Mapping[str, set[str] | bool]] = {
    "suspend": True,
    "evaluation": True,
    "failurePolicy": True,
    "ttlSecondsAfterFinished": True,
    "activeDeadlineSeconds": True,
    "rollout": {"nodes", "minNodes", "maxNodes", "autoscale"},
    "checkpoint": {"everyUpdates", "keep", "export", "graceSeconds"},
}
"""What a running attempt takes over, or has no part in: a change of it ends no attempt."""


def labels(training: str, component: str) -> dict[str, str]:
    """What every child has."""
    return {
        TRAINING: training,
        "app.kubernetes.io/name": "qwen35",
        "app.kubernetes.io/instance": training,
        COMPONENT: component,
        "app.kubernetes.io/part-of": "qwen35",
        "app.kubernetes.io/managed-by": "qwen35-operator",
    }


def job_name(training: str, attempt: int) -> str:
    """The RayJob of an attempt."""
    return f"{training}-{attempt}"


def account_name(training: str) -> str:
    """ServiceAccount, Role and RoleBinding of the trainer."""
    return f"{training}-trainer"


def selector(training: str) -> str:
    """Label selector of everything that belongs to a training."""
    return f"{TRAINING}={training}"


def rollout_selector(training: str) -> str:
    """Label selector of the rollout pool's pods, for the scale subresource."""
    return f"{selector(training)},{POOL}={ROLLOUT}"


def spec_hash(training: Training) -> str:
    """Of everything that a running attempt cannot take over: when it changes, the next attempt has to.

    Fields at their default do not count, so that a release that adds a field ends no attempt.
    """
    spec = training.spec.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude=LIVE)
    return digest({section: inside for section, inside in spec.items() if inside != {}})


def digest(document: object) -> str:
    """16 hexadecimal digits of a plain document; the order of keys does not count."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def problems(training: Training) -> Iterator[Problem]:
    """A name that the objects named after it could not have."""
    name = training.name
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        wrong = f"{name} cannot name a RayJob: it needs lower-case letters, digits and dashes, and a letter first."
        yield Problem("metadata.name", wrong, "Create the training again with such a name, e.g. by a prefix.")
    if len(name) > LONGEST:
        wrong = f"{name} has {len(name)} characters; the names of its objects leave room for {LONGEST}."
        yield Problem("metadata.name", wrong, "Create the training again with a shorter name.")
