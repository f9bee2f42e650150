"""What goes into an image: the one list that both ways to build it read."""

from functools import cache
from importlib.metadata import version
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict

REPOSITORY = Path(__file__).parents[1]
BASE = "python:3.12-slim-bookworm"
"""Debian with Python in /usr/local. The archive has both from the machine that builds it."""
HOME = "/home/qwen35"


class Definition(BaseModel):
    """An image.yaml. Its entry point is the command `qwen35`; it has the requirements, and this repository's packages."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """Without a tag: that is this repository's version."""
    title: str
    requirements: str
    """A lock of requirements/."""
    packages: tuple[str, ...] = ()
    """Debian packages, beyond what the base has."""
    user: int
    """User and group; its home folder is HOME."""
    files: dict[str, str] = {}
    """Further files: a folder of this repository, and where it goes."""
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
    """The definition in the folder of this name. Raises FileNotFoundError."""
    return Definition.model_validate(yaml.safe_load((REPOSITORY / "images" / image / "image.yaml").read_text()))


def names() -> list[str]:
    return sorted(file.parent.name for file in (REPOSITORY / "images").glob("*/image.yaml"))
