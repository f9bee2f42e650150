"""The release of an attempt: its trainer image, by tag or pinned by digest, and its version of Ray."""

import re
from dataclasses import dataclass
from importlib.metadata import requires
from typing import Final

from qwen35_operator.api.training_resource import TrainingResource
from qwen35_operator.operator_settings import OperatorSettings


def _pinned_ray_version() -> str:
    """Return the version of Ray that this package requires. The trainer images are built with the same version."""
    pins = (re.match(r"ray\[default\]==([\d.]+)", requirement) for requirement in requires("qwen35") or ())
    return next(pin[1] for pin in pins if pin)


RAY_VERSION: Final = _pinned_ray_version()


@dataclass(frozen=True)
class TrainerRelease:
    """The trainer image of an attempt, and the version of Ray in it."""

    reference: str
    """The image as spec.pods.image or the operator's settings name it."""
    image: str
    """The image of the pods: `reference`, or the same image by its digest."""
    ray_version: str
    request: str = ""
    """Value of the training's annotation UPDATE when this release was chosen; empty if it had none."""


def present(training: TrainingResource, settings: OperatorSettings) -> TrainerRelease:
    """Return the release with which this operator starts new trainings."""
    reference = training.spec.pods.image or settings.images[training.spec.accelerator.profile]
    return TrainerRelease(reference, reference, RAY_VERSION)


def by_digest(image: str, image_id: str) -> str:
    """Return the image with its digest instead of its tag; unchanged if it has a digest already, or if none is known.

    image: such as registry/team/trainer:1.0. image_id: imageID of a container's status. The digest is known if
    `image_id` shows that the node has pulled the image from the repository in `image`. An image that was loaded into
    the node has no digest by which another node could pull it.
    """
    repository = image.partition("@")[0]
    path, colon, tag = repository.rpartition(":")
    if colon and "/" not in tag:
        repository = path
    pulled_from, _, digest = re.sub(r"^[a-z-]+://", "", image_id).rpartition("@")
    is_own = digest.startswith("sha256:") and _with_registry(pulled_from) == _with_registry(repository)
    return f"{repository}@{digest}" if is_own and "@" not in image else image


def _with_registry(repository: str) -> str:
    """Return the repository with its registry. Container runtimes assume docker.io if a name has no registry."""
    first, slash, _ = repository.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        return repository
    return f"docker.io/{repository}" if slash else f"docker.io/library/{repository}"
