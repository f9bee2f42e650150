"""Whose a folder of checkpoints is.

    owner.json: run, attempt, host, output

    an attempt starts ─► a folder without an owner, or of this run? ─► Ray … ─► still the same? ─► its attempt is written down
    a save begins ────► does the record name this attempt? ─► written aside ─► does it still? ─► renamed, older ones deleted

It is a record and not a lock, because network file systems have no locks, or keep those of a node that is lost. A run that crashed
claims its folder again without a question. Should its attempt before that still run somewhere, it can save no more.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from qwen35_trainer.runtime.disk import sync
from qwen35_trainer.runtime.folder import FolderRefused, RunFolder
from qwen35_trainer.spec import Manifest

OWNER = "owner.json"


@dataclass(frozen=True)
class Owner:
    """An attempt of a run, which saves checkpoints."""

    run: str
    """The same for all attempts of the run, and no other run's: see `run_of`."""
    attempt: str
    """Another one for each start of the run."""
    host: str
    output: str
    """The run's folder on the host."""

    def __str__(self) -> str:
        return f"{self.run} ({self.host}:{self.output})"


def run_of(manifest: Manifest, folder: RunFolder, *, in_cluster: bool) -> str | None:
    """What all attempts of a run have in common; None for a new one.

    In a cluster that is the namespace and name of the training, since its pods may lose the output folder; so a training that is
    created again under its name continues. Elsewhere it is run.id of the output folder.
    """
    if in_cluster:
        return f"{manifest.metadata.namespace or 'default'}/{manifest.metadata.name}"
    try:
        return folder.identity
    except FileNotFoundError:
        return None


def read_owner(folder: Path) -> Owner | None:
    """Who saves into a folder; None for a new one, and for one of a release that did not write this down.

    Raises FolderRefused for a record that says something else, and OSError where it cannot be read, which may be temporary.
    """
    path = folder / OWNER
    try:
        found = json.loads(path.read_text())
        return Owner(**{field.name: str(found[field.name]) for field in fields(Owner)})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise FolderRefused(
            f"{path} does not say whose checkpoints these are ({type(error).__name__}). Delete it if no run saves there "
            "any more, then continue with --resume auto"
        ) from error


def hold(folder: Path, owner: Owner) -> None:
    """Make sure that `owner` may save into the folder. Raises FolderRefused when another attempt may.

    A record that somebody deleted is written again.
    """
    found = read_owner(folder)
    if found is None:
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder, owner)
    elif found.attempt != owner.attempt:
        raise FolderRefused(
            f"{folder} was taken over by {found}. Name another folder in spec.checkpoint.storage.path to go on beside that run"
        )


@dataclass(frozen=True)
class Claim:
    """A folder of checkpoints that a run may have, as it was found."""

    folder: Path
    owner: Owner | None
    checkpoints: tuple[str, ...]
    """The names of those that it holds."""

    @classmethod
    def on(cls, folder: Path) -> Claim:
        """As the folder is now. Raises as `read_owner` does."""
        return cls(folder, read_owner(folder), tuple(sorted(path.name for path in folder.glob("update-*"))))

    @contextmanager
    def held(self, owner: Owner) -> Iterator[None]:
        """Make the folder the owner's. When nothing was saved, it belongs to nobody again at the end.

        Raises FolderRefused when the folder cannot be written, or another attempt has claimed it, or saved, since it was found.
        """
        try:
            found = Claim.on(self.folder)
            if found.owner != self.owner:
                raise FolderRefused(
                    f"{self.folder} was claimed by {found.owner} meanwhile. Name another folder, or start again"
                )
            if found.checkpoints != self.checkpoints:
                raise FolderRefused(f"a run has saved into {self.folder} meanwhile. End it, then start this one again")
            self.folder.mkdir(parents=True, exist_ok=True)
            _write(self.folder, owner)
        except OSError as error:
            raise FolderRefused(f"{self.folder} cannot be written: {error.strerror}; name another folder") from error
        try:
            yield
        finally:
            with contextlib.suppress(OSError, FolderRefused):  # it only spares the next run a question
                if read_owner(self.folder) == owner and not any(self.folder.glob("update-*")):
                    (self.folder / OWNER).unlink()


def _write(folder: Path, owner: Owner) -> None:
    """On disk when this returns: a record cut short by a crash would keep its own run out."""
    aside = folder / f".{OWNER}.{owner.attempt}.partial"
    try:
        aside.write_text(json.dumps(asdict(owner), indent=2) + "\n")
        sync(aside)
        aside.replace(folder / OWNER)
        sync(folder)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
