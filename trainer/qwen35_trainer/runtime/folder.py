"""The output folder of a run: what lies where, and whose it is.

run.yaml          the resolved manifest: whose folder this is
run.id            the run's name at metric services, the same for all its attempts
run.lock          empty; locked by the run that uses the folder
metrics.jsonl     every record, one line each
samples.jsonl     a few responses of some updates and evaluations; not in SFT
checkpoints/      update-000020/ … complete or absent; owner.json
journal           what happened to each prompt since the newest of them
tensorboard/      logs/           one log file per process
summary.json      report.html     at the end
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen35_trainer.progress.records import has_update
from qwen35_trainer.progress.samples import FILE
from qwen35_trainer.runtime.disk import unwritable
from qwen35_trainer.spec import Manifest, dump_manifest
from qwen35_trainer.spec.document import parse_document
from qwen35_trainer.spec.fixed import Difference, differences

logger = logging.getLogger(__name__)

STILL_RUNNING = "is the folder of a run that has not ended; wait for it, or name another folder"


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
    def lock(self) -> Path:
        return self.root / "run.lock"

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

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def has_trained(self) -> bool:
        """Whether a run has left an update or a checkpoint here: what must not be lost."""
        saved = self.checkpoints.is_dir() and any("update-" in path.name for path in self.checkpoints.iterdir())
        return saved or (self.metrics.exists() and has_update(self.metrics))

    def check(
        self, manifest: Manifest, *, resume: bool, how_to_resume: str = "--resume auto", in_cluster: bool = False
    ) -> None:
        """Raises FolderRefused when the folder holds something else, or cannot be written. Changes nothing.

        resume: whether --resume is given; without it the folder of a run that has trained nothing can be used again.
        how_to_resume: the command that continues the run that is here, for the message.
        """
        if (problem := unwritable(self.root)) is not None:
            raise FolderRefused(f"--output {problem}")
        if self.manifest.exists():
            self._check_owner(manifest, resume=resume, how_to_resume=how_to_resume, in_cluster=in_cluster)
        elif self.root.exists() and any(path not in (self.lock, _aside(self.manifest)) for path in self.root.iterdir()):
            raise FolderRefused(
                f"--output {self.root} holds files that do not belong to a run; name a new or empty folder"
            )

    def claim(self, manifest: Manifest, *, resume: bool = False) -> None:
        """Make the folder this run's. Raises FolderRefused when that cannot be written.

        The manifest is first: killed before it, this leaves an empty folder; killed after it, a run that can be resumed.
        Without `resume`, this is another run than one that trained nothing here, whose records are deleted; its logs stay.
        """
        new = not self.manifest.exists()
        if not new and not resume and self.has_trained:
            raise FolderRefused(f"--output {self.root} holds a run that trained meanwhile; name another folder")
        identity = self.root / "run.id"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            write_whole(self.manifest, dump_manifest(manifest))
            if not resume or not identity.exists():
                write_whole(identity, f"{manifest.metadata.name}-{secrets.token_hex(4)}\n")
            if not new and not resume:
                for records in (self.metrics, self.samples, self.journal, self.summary, self.root / "report.html"):
                    records.unlink(missing_ok=True)
                shutil.rmtree(self.tensorboard, ignore_errors=True)
        except OSError as error:
            if new:
                with contextlib.suppress(OSError):
                    self.manifest.unlink(missing_ok=True)
                    self.lock.unlink(missing_ok=True)
                    self.root.rmdir()
            raise FolderRefused(_unwritable(self.root, error)) from error

    @contextmanager
    def claimed(self, manifest: Manifest, *, resume: bool, locked: bool) -> Iterator[None]:
        """As `claim`; with `locked`, meanwhile no other run can use the folder. Raises FolderRefused."""
        with self.held() if locked else contextlib.nullcontext():
            self.claim(manifest, resume=resume)
            yield

    @contextmanager
    def held(self) -> Iterator[None]:
        """Meanwhile no other run can use this folder. The kernel ends that with the process, however it ends.

        Raises FolderRefused when another one does, or the folder cannot be written.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            file = self.lock.open("a")  # writable, as network file systems want it for a lock
        except OSError as error:
            raise FolderRefused(_unwritable(self.root, error)) from error
        with file:
            if not _locked(file.fileno()):
                raise FolderRefused(f"--output {self.root} {STILL_RUNNING}")
            yield

    def _check_owner(self, manifest: Manifest, *, resume: bool, how_to_resume: str, in_cluster: bool) -> None:
        if self.lock.exists():
            with self.held():
                pass
        if not resume:
            if self.has_trained:
                raise FolderRefused(
                    f"--output {self.root} holds an earlier run; name another folder, or continue it with:\n"
                    f"  {how_to_resume}"
                )
            return
        try:
            earlier = spec_in(self.manifest)
        except (OSError, ValueError) as error:
            raise FolderRefused(
                f"--output {self.root}: {self.manifest} does not say whose folder this is ({type(error).__name__}); "
                "restore it, or name another folder"
            ) from error
        if lines := listed(differences(earlier, manifest.spec)):
            afresh = "another folder in spec.checkpoint.storage" if in_cluster else "another folder"
            raise FolderRefused(
                f"--output {self.root} holds a run with another manifest ({self.manifest}):\n{lines}\n"
                f"Restore these values to resume it, or name {afresh} for a new run"
            )


def spec_in(file: Path) -> Mapping[str, Any]:
    """The spec of a manifest that some release wrote down. Raises OSError, and ValueError when there is none in the file."""
    document, problems = parse_document(file.read_text())
    match document:
        case {"spec": dict() as spec}:
            return spec
    raise ValueError(f"{file} holds no spec: {problems}")


def listed(differences: Sequence[Difference]) -> str:
    """A line for each; empty for none."""
    return "\n".join(f"  {difference}" for difference in differences)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write aside and rename: a reader never sees half a file. Raises OSError, and leaves nothing then."""
    aside = _aside(path)
    try:
        aside.write_bytes(content.encode() if isinstance(content, str) else content)
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def _unwritable(root: Path, error: OSError) -> str:
    return f"--output {root} cannot be written: {error.strerror}; name another folder"


def _locked(file: int) -> bool:
    """Lock an open file until it is closed. False when another process has it; true as well where nothing can be locked."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        logger.warning("the file system of the output folder has no locks: nothing keeps two runs out of it")
    return True


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")
