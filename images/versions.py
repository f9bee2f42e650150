"""The table of versions of the trainer images: images/versions.yaml, typed.

versions.yaml ─► locks.py        requirements/trainer-*.txt
              ├► definition.py   `<name>` in an image.yaml
              └► versions_reference.py   docs/reference/image-versions.md
"""

from functools import cache
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict

from images.repository import REPOSITORY

type Source = Literal["wheel", "distribution", "base", "vendor"]


class Component(BaseModel):
    """A row: one component, with its version in each image that has it from this source."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    source: Source
    """Where it comes from; see the head of versions.yaml."""
    versions: dict[str, str]
    """Image → version."""
    reason: str


class Omission(BaseModel):
    """A package that images leave out."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    images: tuple[str, ...]
    reason: str


class Versions(BaseModel):
    """The whole table."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    components: tuple[Component, ...]
    omitted: tuple[Omission, ...]

    def of(self, image: str, *sources: Source) -> dict[str, str]:
        """Return name → version of an image's components from these sources, or from all."""
        return {
            component.name: component.versions[image]
            for component in self.components
            if image in component.versions and (not sources or component.source in sources)
        }

    def omitted_from(self, image: str) -> list[str]:
        """Return the names of the packages that an image leaves out."""
        return [omission.name for omission in self.omitted if image in omission.images]


@cache
def versions() -> Versions:
    """Read the table."""
    return Versions.model_validate(yaml.safe_load((REPOSITORY / "images" / "versions.yaml").read_text()))
