"""The output folder of a run: its files, and the run to which the folder belongs.

run.yaml          the resolved manifest, by which the run is recognised
run.id            the run's name at metric services, the same for all its attempts
run.lock          empty; locked by the run that uses the folder
metrics.jsonl     every record, one line each
samples.jsonl     a few responses of some updates and evaluations; not in SFT
checkpoints/      update-000020/ …, each complete or absent; this folder has an owner.json and workspaces, too
journal           what happened to each prompt since the newest checkpoint
tensorboard/      event files of TensorBoard
logs/             one log file per process
summary.json      the main numbers, written at the end
report.html       charts and responses, written at the end
owner.json        the attempt that writes here (epoch.py)
.epoch-000003-…/  the workspace of that attempt (epoch.py)
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen35_trainer.epoch import OWNER_FILE, WORKSPACE_PREFIX, Epoch, FolderRefused, Superseded
from qwen35_trainer.manifest import Manifest, dump_manifest
from qwen35_trainer.manifest.document import parse_document
from qwen35_trainer.manifest.fixed import Difference, differences
from qwen35_trainer.progress.metrics_file import has_update
from qwen35_trainer.progress.sample_file import SAMPLES_FILE_NAME

logger = logging.getLogger(__name__)

STILL_RUNNING_ADVICE = "is the folder of a run that has not ended; wait for it, or name another folder"


@dataclass(frozen=True)
class RunFolder:
    """The output folder of a run: paths of its files, and checks that only one run uses the folder."""

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
        return self.root / SAMPLES_FILE_NAME

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def journal(self) -> Path:
        return self.root / "journal"

    @property
    def identity(self) -> str:
        """The content of run.id: a name that is unique to this run, and stays the same after a resume.

        Raises FileNotFoundError if no run has claimed the folder.
        """
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
        """Whether the folder contains a checkpoint or the record of an update. A new run must not overwrite such a folder."""
        saved = self.checkpoints.is_dir() and any("update-" in path.name for path in self.checkpoints.iterdir())
        return saved or (self.metrics.exists() and has_update(self.metrics))

    def check(
        self, manifest: Manifest, *, resume: bool, how_to_resume: str = "--resume auto", in_cluster: bool = False
    ) -> None:
        """Raise FolderRefused if a run may not use the folder. Changes nothing.

        manifest: manifest of the run. resume: whether --resume is given. Without --resume, the run may use only a new or
        empty folder, or the folder of a run that has trained nothing. With --resume, the run in the folder must have the
        same fixed fields, unless it has trained nothing. how_to_resume: the command that continues the run in this
        folder, for the message. in_cluster: whether the run is a training of a cluster, for the message.
        """
        if (problem := unwritable(self.root, in_cluster=in_cluster)) is not None:
            raise FolderRefused(problem if in_cluster else f"--output {problem}")
        if self.manifest.exists():
            self._check_owner(manifest, resume=resume, how_to_resume=how_to_resume, in_cluster=in_cluster)
        elif self.root.exists() and any(not self._is_from_claim(path) for path in self.root.iterdir()):
            raise FolderRefused(
                f"--output {self.root} holds files that do not belong to a run; name a new or empty folder"
            )

    def next_identity(self, manifest: Manifest, *, resume: bool) -> str:
        """Return the identity of a run in this folder: the content of run.id if the run resumes, otherwise a new one."""
        if resume:
            with contextlib.suppress(FileNotFoundError):
                return self.identity
        return f"{manifest.metadata.name}-{secrets.token_hex(4)}"

    def claim(self, manifest: Manifest, epoch: Epoch, identity: str, *, resume: bool = False) -> None:
        """Write the manifest and the identity of a run to the folder.

        Raises FolderRefused if that is impossible, and Superseded if another attempt owns the folder.

        epoch: the period in which this run owns the folder. identity: result of `next_identity`. resume: whether the
        run continues an earlier one. If not, or if the earlier run has other fixed fields, the records of the earlier
        run, which has trained nothing, are deleted; its logs stay.

        Earlier records are deleted first, so that no run can resume with those of another one. Then the manifest is
        written. If the process is killed before that, it leaves a folder without a run or that of the earlier run; if it
        is killed after that, it leaves a run that can be resumed.
        """
        new = not self.manifest.exists()
        begins = not resume or (not new and bool(self._differences(manifest)))
        if not new and begins and self.has_trained:
            raise FolderRefused(f"--output {self.root} holds a run that trained meanwhile; name another folder")
        name = self.root / "run.id"
        try:
            if not new and begins:
                for records in (self.metrics, self.samples, self.journal, self.summary, self.root / "report.html"):
                    epoch.delete(records)
                epoch.delete(self.tensorboard)
            epoch.write(self.manifest, dump_manifest(manifest), durable=True)
            if not resume or not name.exists():
                epoch.write(name, f"{identity}\n", durable=True)
        except OSError as error:
            if new:
                with contextlib.suppress(OSError, Superseded):
                    epoch.delete(self.manifest)
                    epoch.end(keep_record=False)
                    self.lock.unlink(missing_ok=True)
                    self.root.rmdir()
            raise FolderRefused(_unwritable(self.root, error)) from error

    @contextmanager
    def held(self) -> Iterator[None]:
        """Context manager: lock run.lock while the body runs, to keep other runs out of the folder.

        The kernel releases the lock when the process ends in any way. Raises FolderRefused if another run uses the
        folder, or if the folder cannot be written.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            file = self.lock.open("a")  # writable, because network file systems require that for a lock
        except OSError as error:
            raise FolderRefused(_unwritable(self.root, error)) from error
        with file:
            if not _locked(file.fileno()):
                raise FolderRefused(f"--output {self.root} {STILL_RUNNING_ADVICE}")
            yield

    def _is_from_claim(self, path: Path) -> bool:
        """Return whether `path` may come from a process that was killed while it claimed the folder."""
        names = (self.lock.name, OWNER_FILE, f".{self.manifest.name}.partial")
        return path.name in names or path.name.startswith(WORKSPACE_PREFIX)

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
        # The checkpoints of a cluster lie elsewhere; `find_start` compares their manifests.
        if (lines := listed(self._differences(manifest))) and self.has_trained:
            elsewhere = "another folder in spec.checkpoint.storage" if in_cluster else "another folder"
            raise FolderRefused(
                f"--output {self.root} holds a run with another manifest ({self.manifest}):\n{lines}\n"
                f"Restore these values to resume it, or name {elsewhere} for a new run"
            )

    def _differences(self, manifest: Manifest) -> Sequence[Difference]:
        """Return the fixed fields in which the run of this folder differs from a manifest.

        Raises FolderRefused if run.yaml cannot be read.
        """
        try:
            earlier = spec_in(self.manifest)
        except (OSError, ValueError) as error:
            raise FolderRefused(
                f"--output {self.root}: {self.manifest} does not say whose folder this is ({type(error).__name__}); "
                "restore it, or name another folder"
            ) from error
        return differences(earlier, manifest.spec)


def spec_in(file: Path) -> Mapping[str, Any]:
    """Return the spec in the manifest `file`, which any release may have written.

    Raises OSError if the file cannot be read, and ValueError if it contains no spec.
    """
    document, problems = parse_document(file.read_text())
    match document:
        case {"spec": dict() as spec}:
            return spec
    raise ValueError(f"{file} holds no spec: {problems}")


def listed(differences: Sequence[Difference | str]) -> str:
    """Format the differences between two runs as text, with one line for each difference."""
    return "\n".join(f"  {difference}" for difference in differences)


def unwritable(folder: Path, *, in_cluster: bool = False) -> str | None:
    """Return why a folder cannot be written, and what to do. None: the folder can be written.

    The folder does not have to exist. The check creates a temporary folder in `folder`, or in its nearest existing
    parent, and removes the temporary folder. in_cluster: whether the folder is on a volume of a pod, for the message.
    """
    advice = "name another folder"
    if in_cluster:
        user = f"user {os.getuid()} and group {os.getgid()}"
        advice = f"let {user} of the pods write to this folder of the claim (docs/howto/volumes.md)"
    # Path.exists raises PermissionError in a folder that may not be searched, and is False for a broken link.
    nearest = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    within = "" if nearest == folder else f": {nearest}"
    if not os.path.isdir(nearest):  # noqa: PTH112
        what = "a link to nothing" if nearest.is_symlink() and not os.path.exists(nearest) else "a file"  # noqa: PTH110
        return f"{folder}{within} is {what}; name a folder"
    try:  # permissions alone do not show it for /proc and for a read-only disk
        Path(tempfile.mkdtemp(prefix=".qwen35-", dir=nearest)).rmdir()
    except OSError as error:
        return f"{folder}: {nearest} cannot be written ({error.strerror}); {advice}"
    return None


def _unwritable(root: Path, error: OSError) -> str:
    return f"--output {root} cannot be written: {error.strerror}; name another folder"


def _locked(file: int) -> bool:
    """Lock an open file until it is closed. Returns False if another process has locked it.

    file: file descriptor. On a file system without locks, nothing is locked and the result is True.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        logger.warning("the file system of the output folder has no locks: nothing prevents two runs from using it")
    return True
