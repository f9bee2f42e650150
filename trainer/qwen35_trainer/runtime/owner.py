"""Claims the output folder and the folder of the checkpoints for an attempt (fencing: qwen35_trainer/epoch.py).

    an attempt starts ─► a folder without an owner, or of this run? ─► Ray … ─► unchanged? ─► its epoch begins ─► it writes

A run that crashed may claim its folders again at any time. After that, an earlier attempt that still runs somewhere can
write nothing, and ends.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from socket import gethostname

from qwen35_trainer.contract.shared_names import ATTEMPT_VARIABLE, CLUSTER_VARIABLE, UID_VARIABLE
from qwen35_trainer.epoch import Epoch, FolderRefused, Owner, Superseded, read_owner, take
from qwen35_trainer.manifest import Manifest
from qwen35_trainer.runtime.background import run_in_thread
from qwen35_trainer.runtime.checkpoint_store import update_of
from qwen35_trainer.runtime.folder import RunFolder

logger = logging.getLogger(__name__)

END_SECONDS = 60.0
"""Maximum time, in seconds, for the end of a claim. A workspace that is not deleted by then does no harm: the next attempt
deletes it."""


def run_of(manifest: Manifest, folder: RunFolder, *, in_cluster: bool) -> str | None:
    """Return the identity of a run, which all its attempts share.

    In a cluster, the identity is the namespace and name of the training, because its pods may lose the output folder. A
    training that is deleted and created again with the same name therefore continues the earlier run. Outside of a
    cluster, the identity is the content of run.id in the output folder. Returns None if this file does not exist yet,
    because the run is new.
    """
    if in_cluster:
        return f"{manifest.metadata.namespace or 'default'}/{manifest.metadata.name}"
    try:
        return folder.identity
    except FileNotFoundError:
        return None


def owner_of(
    run: str,
    attempt: str,
    folder: RunFolder,
    *,
    in_cluster: bool,
    environment: Mapping[str, str] = os.environ,
) -> Owner:
    """Return the record that names an attempt as the owner of a folder (owner.json).

    run: identity of the run. attempt: name of the attempt. environment: in a cluster, the environment variables of the
    head pod, which contain the attempt's number, its RayCluster and the training's uid.
    """
    owner = Owner(run, attempt, gethostname(), str(folder.root))
    if not in_cluster:
        return owner
    return replace(
        owner,
        training=environment.get(UID_VARIABLE, ""),
        number=int(environment.get(ATTEMPT_VARIABLE, "0")),
        cluster=environment.get(CLUSTER_VARIABLE, ""),
    )


@dataclass(frozen=True)
class Claim:
    """The owner and the checkpoints of a folder, as read before a run takes the folder over.

    `take` compares them with the present state of the folder.
    """

    folder: Path
    owner: Owner | None
    checkpoints: tuple[str, ...]
    """Names of the checkpoints in the folder."""

    @classmethod
    def on(cls, folder: Path) -> Claim:
        """Read the present state of a folder, and return it.

        Raises FolderRefused if owner.json is damaged, and OSError if it cannot be read.
        """
        return cls(folder, read_owner(folder), _checkpoints(folder))

    @contextmanager
    def held(self, owner: Owner) -> Iterator[Epoch]:
        """Context manager: let `owner` own the folder of the checkpoints while the body runs.

        Yields the epoch, which is the period of ownership.

        At the end, owner.json is deleted if the folder contains no checkpoint, so that another run may use the folder.
        This takes at most END_SECONDS, so that the process can also end if the storage does not answer. Raises
        FolderRefused and Superseded as `take` does.
        """
        epoch = self.take(owner)
        try:
            yield epoch
        finally:
            ending = run_in_thread("end of the claim", lambda: self._end(epoch))
            if ending in wait([ending], END_SECONDS).done:
                ending.result()
            else:
                logger.warning("%s did not answer within %g s; its workspace stays", self.folder, END_SECONDS)

    def _end(self, epoch: Epoch) -> None:
        # With owner.json and no checkpoint, the next run with this folder would be refused.
        epoch.end(keep_record=bool(_checkpoints(self.folder)))

    def take(self, owner: Owner) -> Epoch:
        """Begin the epoch of `owner`, the period in which `owner` owns the folder, and return the epoch.

        Raises FolderRefused if the folder cannot be written or owner.json is damaged, and Superseded if another attempt
        takes the folder at the same time. If the owner or the checkpoints of the folder have changed since this claim
        was read, another attempt may be using the folder. This method then raises Superseded in a cluster, and
        FolderRefused outside of one.

        In a cluster, one change is accepted: an earlier attempt of the same training has become the owner, and has
        saved nothing since this claim was read.
        """
        try:
            current = Claim.on(self.folder)
            in_cluster, before = owner.number > 0, current.owner
            takes_over = in_cluster and before is not None and owner.is_later_than(before)
            if (problem := self._difference(current)) and not takes_over:
                if not in_cluster:
                    raise FolderRefused(f"{problem}. Name another folder, or start again")
                raise Superseded(problem, by_later_attempt=before is not None and before.is_later_than(owner))
            epoch = take(self.folder, owner, self.owner)
            # An earlier attempt may have saved until this moment. This attempt would delete what it did not begin from.
            if (saved := _checkpoints(self.folder)) != self.checkpoints:
                epoch.check()  # unless it was a later one, which has taken over
                if new := set(saved) - set(self.checkpoints):
                    # So that the next attempt continues from there, and does not take it for an abandoned checkpoint.
                    epoch = epoch.record_start(max(new, key=lambda name: update_of(Path(name))))
                epoch.end()
                problem = f"{self.folder} has the checkpoints {', '.join(saved) or 'none'} now, because an attempt has saved meanwhile"
                raise Superseded(problem) if in_cluster else FolderRefused(f"{problem}. Start again")
        except OSError as error:
            raise FolderRefused(
                f"{self.folder} cannot be written: {error.strerror or error}; name another folder"
            ) from error
        return epoch

    def _difference(self, current: Claim) -> str:
        """Return what has changed in the folder since this state was read, as text. "" if nothing has changed."""
        if current.owner != self.owner:
            return f"{self.folder} was claimed by {current.owner} meanwhile"
        if current.checkpoints != self.checkpoints:
            return f"a run has saved into {self.folder} meanwhile"
        return ""


def _checkpoints(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.name for path in folder.glob("update-*")))
