"""The definition of an image, which both ways to build it read."""

import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from typing import Final, Literal

import yaml
from pydantic import BaseModel, ConfigDict

from images.repository import REPOSITORY
from images.versions import versions

BASE = "python:3.12-slim-bookworm"
"""Debian with Python in /usr/local. In an archive both come from the machine that builds it."""
HOME = "/home/qwen35"

type Architecture = Literal["amd64", "arm64"]
MACHINES: Final[Mapping[Architecture, str]] = {"amd64": "x86_64", "arm64": "aarch64"}
"""Architecture in the terms of the Open Container Initiative → in those of Linux and of wheels."""


class Definition(BaseModel):
    """The content of an image.yaml. The image has the requirements and this repository's packages, and starts `qwen35`.

    A text `<name>` in the file stands for the image's version of that component in versions.yaml.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """Name without a tag; the tag is this repository's version."""
    title: str
    base: str = BASE
    """The image that the build file starts from; images/bases.yaml has its digest. An archive can only be made of BASE."""
    not_archived: str = ""
    """Why an archive cannot be made of the files of a Debian machine; empty if it can."""
    architectures: tuple[Architecture, ...] = ("amd64",)
    requirements: str
    """Path of a lock file in requirements/. `{architecture}` in it stands for each of `architectures`."""
    extras: tuple[str, ...] = ()
    """Extras of pyproject.toml that the lock contains, besides the versions of versions.yaml. Empty if tools/lock.sh writes the
    lock."""
    built: str = ""
    """Path of the lock of packages that are compiled in the image, in this order, after all others; empty for none."""
    build_arguments: dict[str, str] = {}
    """Arguments of the build file, and their defaults. They are variables of the image, too."""
    build_environment: dict[str, str] = {}
    """Variables of the step that compiles."""
    packages: tuple[str, ...] = ()
    """Debian packages in addition to those of the base."""
    compilers: tuple[str, ...] = ()
    """Debian packages that only the build file needs, while it installs a lock with source distributions. An archive takes
    what they compile from the machine that builds it."""
    commands: tuple[str, ...] = ()
    """Shell commands after all packages are installed, as root."""
    user: int
    """User and group; its home folder is HOME."""
    files: dict[str, str] = {}
    """Further folders: the path in this repository, and the path in the image."""
    environment: dict[str, str] = {}
    entrypoint: tuple[str, ...] = ("qwen35",)
    check_environment: dict[str, str] = {}
    """Variables with which images/check.py compiles `built` and imports on a machine without the base image."""
    check_without: tuple[str, ...] = ()
    """Packages that images/check.py removes before it imports, because they load libraries of the base image."""
    imports: tuple[str, ...] = ()
    """Modules that images/check.py imports on a machine without accelerators."""

    @property
    def tagged(self) -> str:
        return f"{self.name}:{version('qwen35')}"

    @property
    def labels(self) -> dict[str, str]:
        prefix = "org.opencontainers.image"
        texts = {"title": self.title, "licenses": "Apache-2.0", "version": version("qwen35")}
        return {f"{prefix}.{name}": text for name, text in texts.items()}

    @property
    def locks(self) -> dict[Architecture, str]:
        """Architecture → the path of its lock file."""
        return {
            architecture: self.requirements.format(architecture=architecture) for architecture in self.architectures
        }


@cache
def definition(image: str) -> Definition:
    """Read the definition of an image, the name of its folder.

    Raises FileNotFoundError, and KeyError for a component that versions.yaml lacks.
    """
    text = (REPOSITORY / "images" / image / "image.yaml").read_text()
    image_versions = versions().of(image)
    return Definition.model_validate(
        yaml.safe_load(re.sub(r"<([a-z0-9-]+)>", lambda match: image_versions[match[1]], text))
    )


def names() -> list[str]:
    return sorted(file.parent.name for file in (REPOSITORY / "images").glob("*/image.yaml"))
