"""The definition of an image, which both ways to build it read."""

from functools import cache
from importlib.metadata import version
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict

REPOSITORY = Path(__file__).parents[1]
BASE = "python:3.12-slim-bookworm"
"""Debian with Python in /usr/local. In an archive both come from the machine that builds it."""
HOME = "/home/qwen35"


class Definition(BaseModel):
    """The content of an image.yaml. The image has the requirements and this repository's packages, and starts `qwen35`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """Name without a tag; the tag is this repository's version."""
    title: str
    requirements: str
    """Path of a lock file in requirements/."""
    packages: tuple[str, ...] = ()
    """Debian packages in addition to those of the base."""
    user: int
    """User and group; its home folder is HOME."""
    files: dict[str, str] = {}
    """Further folders: the path in this repository, and the path in the image."""
    environment: dict[str, str] = {}

    @property
    def tagged(self) -> str:
        return f"{self.name}:{version('qwen35')}"

    @property
    def labels(self) -> dict[str, str]:
        prefix = "org.opencontainers.image"
        return {f"{prefix}.title": self.title, f"{prefix}.licenses": "Apache-2.0"}


@cache
def definition(image: str) -> Definition:
    """Read the definition of an image, the name of its folder. Raises FileNotFoundError."""
    return Definition.model_validate(yaml.safe_load((REPOSITORY / "images" / image / "image.yaml").read_text()))


def names() -> list[str]:
    return sorted(file.parent.name for file in (REPOSITORY / "images").glob("*/image.yaml"))
