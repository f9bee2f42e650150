"""The output folder of a run: what lies where, and whose it is.

run.yaml          the resolved manifest: whose folder this is
run.id            the run's name at metric services, the same for all its attempts
metrics.jsonl     every record, one line each
checkpoints/      update-000020/ … complete or absent
tensorboard/      logs/           one log file per process
summary.json      report.html     at the end
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

import yaml

from qwen35_trainer.spec import Manifest, dump_manifest


class FolderRefused(ValueError):
    """The folder cannot be used for this run; says why and what to do."""


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run."""

    root: Path

    @property
    def manifest(self) -> Path:
        return self.root / "run.yaml"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def identity(self) -> str:
        """Unique to this run, and the same after a resume."""
        return (self.root / "run.id").read_text().strip()

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    def check(self, manifest: Manifest, *, resume: bool) -> None:
        """Raises FolderRefused when the folder holds something else, or cannot be written. Changes nothing."""
        if self.root.exists() and not self.root.is_dir():
            raise FolderRefused(f"--output {self.root} is a file; name a folder")
        if self.manifest.exists():
            self._check_owner(manifest, resume=resume)
        elif self.root.exists() and any(self.root.iterdir()):
            raise FolderRefused(f"--output {self.root} holds files that are no run's; name a new or empty folder")
        existing = next(folder for folder in (self.root, *self.root.parents) if folder.exists())
        if not os.access(existing, os.W_OK):
            raise FolderRefused(f"--output {self.root}: {existing} cannot be written; name another folder")

    def claim(self, manifest: Manifest) -> None:
        """Make the folder this run's. Raises FolderRefused when that cannot be written."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self.manifest.write_text(dump_manifest(manifest))
            if not (self.root / "run.id").exists():
                (self.root / "run.id").write_text(f"{manifest.metadata.name}-{secrets.token_hex(4)}\n")
        except OSError as error:
            raise FolderRefused(
                f"--output {self.root} cannot be written: {error.strerror}; name another folder"
            ) from error

    def _check_owner(self, manifest: Manifest, *, resume: bool) -> None:
        if not resume:
            raise FolderRefused(
                f"--output {self.root} holds an earlier run; continue it with --resume auto, or name another folder"
            )
        earlier, now = (yaml.safe_load(text)["spec"] for text in (self.manifest.read_text(), dump_manifest(manifest)))
        changed = [section for section in ("mode", "seed", "model", "data") if earlier.get(section) != now.get(section)]
        if changed:
            raise FolderRefused(
                f"--output {self.root} holds a run with another {' and '.join(f'spec.{name}' for name in changed)} "
                f"({self.manifest}); restore it to resume, or name another folder for a new run"
            )
