"""Reads what earlier versions left in a cluster and on its storage, and what they install: tests/upgrade/recordings/<version>/."""

import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

RECORDINGS = Path(__file__).parent / "recordings"
DEFINITION, OBJECTS, CLAIM_FOLDER, TIME = "definition.yaml", "objects.json", "claim", "time"


@dataclass(frozen=True)
class Recording:
    """One training of one version, at one moment."""

    folder: Path

    @property
    def version(self) -> str:
        return self.folder.parent.name

    @property
    def name(self) -> str:
        """The training's: "running" or "finished"."""
        return self.folder.name

    @property
    def claim(self) -> Path:
        """A copy of the volume that the trainer wrote. Never write into it."""
        return self.folder / CLAIM_FOLDER

    @property
    def run(self) -> Path:
        return self.claim / "runs" / self.name

    @property
    def checkpoints(self) -> Path:
        return self.claim / "checkpoints" / self.name

    @cached_property
    def _file(self) -> Mapping[str, Any]:
        return dict(json.loads((self.folder / OBJECTS).read_text()))

    @property
    def time(self) -> datetime:
        """When it was recorded."""
        return datetime.fromtimestamp(self._file[TIME], UTC)

    @property
    def objects(self) -> Mapping[str, Sequence[dict[str, Any]]]:
        """By kind, as the API server returned them."""
        return dict(self._file["objects"])

    @property
    def training(self) -> dict[str, Any]:
        [training] = self.objects["Qwen35Training"]
        return training

    def config_map(self, suffix: str) -> dict[str, str]:
        """The data of one of the training's ConfigMaps, such as "progress"."""
        [config_map_body] = [
            candidate
            for candidate in self.objects["ConfigMap"]
            if candidate["metadata"]["name"] == f"{self.name}-{suffix}"
        ]
        return dict(config_map_body["data"])


@dataclass(frozen=True)
class EarlierRelease:
    """What a version installs: its chart, with the definition, and its Python packages."""

    folder: Path

    @property
    def chart(self) -> Path:
        """A file for `helm install`."""
        [file] = self.folder.glob("*.tgz")
        return file

    def unpack(self, folder: Path) -> None:
        """Extract the Python packages into `folder`, which can then be the PYTHONPATH of the version's operator."""
        [wheel] = self.folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)


def releases() -> list[EarlierRelease]:
    """All of them, oldest version first."""
    return [EarlierRelease(file.parent) for file in sorted(RECORDINGS.glob(f"*/{DEFINITION}"))]


def recordings() -> list[Recording]:
    """All of them, oldest version first."""
    return [Recording(file.parent) for file in sorted(RECORDINGS.glob(f"*/*/{OBJECTS}"))]
