"""The output folder of a run: what lies where, and whose it is.

run.yaml          the resolved manifest: whose folder this is
run.id            the run's name at metric services, the same for all its attempts
metrics.jsonl     every record, one line each
samples.jsonl     a few responses of some updates and evaluations; not in SFT
checkpoints/      update-000020/ … complete or absent
journal           what happened to each prompt since the newest of them
tensorboard/      logs/           one log file per process
summary.json      report.html     at the end
"""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

import yaml

from qwen35_trainer.progress.samples import FILE
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
    def samples(self) -> Path:
        return self.root / FILE

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def journal(self) -> Path:
        return self.root / "journal"

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
        elif self.root.exists() and any(path != _aside(self.manifest) for path in self.root.iterdir()):
            raise FolderRefused(
                f"--output {self.root} holds files that do not belong to a run; name a new or empty folder"
            )
        existing = next(folder for folder in (self.root, *self.root.parents) if folder.exists())
        if not os.access(existing, os.W_OK):
            raise FolderRefused(f"--output {self.root}: {existing} cannot be written; name another folder")

    def claim(self, manifest: Manifest) -> None:
        """Make the folder this run's. Raises FolderRefused when that cannot be written.

        The manifest is first: killed before it, this leaves an empty folder; killed after it, a run that can be resumed.
        """
        new = not self.manifest.exists()
        identity = self.root / "run.id"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            write_whole(self.manifest, dump_manifest(manifest))
            if new or not identity.exists():
                write_whole(identity, f"{manifest.metadata.name}-{secrets.token_hex(4)}\n")
        except OSError as error:
            if new:
                with contextlib.suppress(OSError):
                    self.manifest.unlink(missing_ok=True)
                    self.root.rmdir()
            raise FolderRefused(
                f"--output {self.root} cannot be written: {error.strerror}; name another folder"
            ) from error

    def _check_owner(self, manifest: Manifest, *, resume: bool) -> None:
        if not resume:
            raise FolderRefused(
                f"--output {self.root} holds an earlier run; continue it with --resume auto, or name another folder"
            )
        now = yaml.safe_load(dump_manifest(manifest))["spec"]
        try:
            earlier = dict(yaml.safe_load(self.manifest.read_text())["spec"])
        except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError) as error:
            raise FolderRefused(
                f"--output {self.root}: {self.manifest} does not say whose folder this is ({type(error).__name__}); "
                "restore it, or name another folder"
            ) from error
        changed = [section for section in ("mode", "seed", "model", "data") if earlier.get(section) != now.get(section)]
        if changed:
            raise FolderRefused(
                f"--output {self.root} holds a run with another {' and '.join(f'spec.{name}' for name in changed)} "
                f"({self.manifest}); restore it to resume, or name another folder for a new run"
            )


def write_whole(path: Path, content: str | bytes) -> None:
    """Write aside and rename: a reader never sees half a file. Raises OSError, and leaves nothing then."""
    aside = _aside(path)
    try:
        aside.write_bytes(content.encode() if isinstance(content, str) else content)
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")
