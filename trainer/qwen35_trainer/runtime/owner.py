"""The owner of a folder of checkpoints: the attempt of a run that may save there.

    owner.json: run, attempt, host, output, start

    an attempt starts ─► a folder without an owner, or of this run? ─► Ray … ─► unchanged? ─► its attempt is recorded
    a save begins ────► does the record name this attempt? ─► written ─► does it still? ─► renamed, old ones deleted

The owner is recorded in a file instead of a lock, because network file systems have no locks, or keep the locks of a
lost node. A run that crashed may claim its folder again at any time. After that, an earlier attempt that still runs
somewhere cannot save.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from qwen35_trainer.atomic_files import write_atomically
from qwen35_trainer.manifest import Manifest
from qwen35_trainer.runtime.folder import FolderRefused, RunFolder

OWNER_FILE = "owner.json"


@dataclass(frozen=True)
class Owner:
    """The attempt of a run that saves checkpoints into a folder."""

    run: str
    """Identity of the run, which all its attempts share (see `run_of`)."""
    attempt: str
    """Name of the attempt, which is new at each start of the run."""
    host: str
    output: str
    """Path of the run's output folder on `host`."""
    start: str = ""
    """The checkpoint from which the attempt began: its name if it is in the folder, or else its path.

    Later checkpoints that another attempt left in the folder are not part of this attempt's lineage. The field is empty
    if the attempt began from the model, and in records of releases without this field.
    """

    def __str__(self) -> str:
        return f"{self.run} ({self.host}:{self.output})"


def run_of(manifest: Manifest, folder: RunFolder, *, in_cluster: bool) -> str | None:
    """Return the identity of a run, which all its attempts share; None for a new run, which has no run.id yet.

    In a cluster, the identity is the namespace and name of the training, because its pods may lose the output folder. A
    training that is deleted and created again with the same name therefore continues. Elsewhere, it is the content of
    run.id in the output folder.
    """
    if in_cluster:
        return f"{manifest.metadata.namespace or 'default'}/{manifest.metadata.name}"
    try:
        return folder.identity
    except FileNotFoundError:
        return None


def read_owner(folder: Path) -> Owner | None:
    """Return the owner of a folder of checkpoints. None: the folder is new, or of an old release without owners.

    Raises FolderRefused if the record is damaged, and OSError if it cannot be read, which may be temporary.
    """
    path = folder / OWNER_FILE
    try:
        record = json.loads(path.read_text())
        # Earlier releases wrote no start.
        return Owner(**{field.name: str({"start": "", **record}[field.name]) for field in fields(Owner)})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise FolderRefused(
            f"{path} does not say whose checkpoints these are ({type(error).__name__}). Delete it if no run saves there "
            "any more, then continue with --resume auto"
        ) from error


def hold(folder: Path, owner: Owner) -> None:
    """Check that `owner` may still save into the folder. If the folder's owner record was deleted, write it again.

    Raises FolderRefused if another attempt owns the folder or the record is damaged, and OSError if the disk fails.
    """
    current = read_owner(folder)
    if current is None:
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder, owner)
    elif current.attempt != owner.attempt:
        raise FolderRefused(
            f"{folder} was taken over by {current}. Name another folder in spec.checkpoint.storage.path to continue next to that run"
        )


@dataclass(frozen=True)
class Claim:
    """The state of a folder of checkpoints, as read before a run claims the folder."""

    folder: Path
    owner: Owner | None
    checkpoints: tuple[str, ...]
    """Names of the checkpoints in the folder."""

    @classmethod
    def on(cls, folder: Path) -> Claim:
        """Return the present state of a folder of checkpoints.

        Raises FolderRefused for a damaged owner record, and OSError for one that cannot be read.
        """
        return cls(folder, read_owner(folder), tuple(sorted(path.name for path in folder.glob("update-*"))))

    @contextmanager
    def held(self, owner: Owner) -> Iterator[None]:
        """Context manager: record `owner` as the folder's owner while the body runs.

        At the end the record is deleted if the folder contains no checkpoint; otherwise it stays. Raises FolderRefused
        if the folder cannot be written, or if its owner or its checkpoints have changed since this state was read.
        """
        try:
            current = Claim.on(self.folder)
            if current.owner != self.owner:
                raise FolderRefused(
                    f"{self.folder} was claimed by {current.owner} meanwhile. Name another folder, or start again"
                )
            if current.checkpoints != self.checkpoints:
                raise FolderRefused(f"a run has saved into {self.folder} meanwhile. End it, then start this one again")
            self.folder.mkdir(parents=True, exist_ok=True)
            _write(self.folder, owner)
        except OSError as error:
            raise FolderRefused(f"{self.folder} cannot be written: {error.strerror}; name another folder") from error
        try:
            yield
        finally:
            with contextlib.suppress(OSError, FolderRefused):  # without this, the next run with this folder is refused
                if read_owner(self.folder) == owner and not any(self.folder.glob("update-*")):
                    (self.folder / OWNER_FILE).unlink()


def _write(folder: Path, owner: Owner) -> None:
    """Write the owner record, and return when it is on disk.

    The write is atomic, because an incomplete record after a crash would make every later run refuse the folder.
    """
    content = json.dumps(asdict(owner), indent=2) + "\n"
    write_atomically(folder / OWNER_FILE, content, suffix=f"{owner.attempt}.partial", durable=True)
