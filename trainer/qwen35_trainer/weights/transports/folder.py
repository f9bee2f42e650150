"""A version in the files of a folder that all pods mount: it remains when the processes that made it have ended.

    rank 0: a new folder ──its path, to all ranks──► each rank writes its shard to a file ──its buckets, to all──► rank 0: manifest, renamed
                                                                                                                          │
    replica: one bucket at a time ─► verified ─► its place in the replica's own memory  ◄─────────────────────────────────┘

waits on                   unblocked by                               deadline
the folder, the buckets    rank 0; all ranks have written             that of the process group
a file                     the volume                                 publication.timeoutSeconds, in the driver

No process gathers the model, and an incomplete publication is never read (`publication_folder`). If a run starts again
with exactly the weights of the newest publication, it uses this publication and writes nothing: the ranks compare
checksums, and each rank decodes its own parts once, from all files that a replica would read. If a file is missing or
damaged, the version is published again, whole.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch.distributed as dist

from qwen35_trainer.weights import publication_folder
from qwen35_trainer.weights.host_weights import HostWeights
from qwen35_trainer.weights.publication_folder import PublicationFolderMissing, PublicationGone, PublicationNotStored
from qwen35_trainer.weights.published import (
    FilePlace,
    FolderBuckets,
    PublishedWeights,
    StagedShard,
    VersionBuckets,
    WeightBucket,
    joined,
)
from qwen35_trainer.weights.segment import Memory
from qwen35_trainer.weights.shard_streams import ShardStream, StreamReceiver
from qwen35_trainer.weights.staging import PART_BYTES, WeightShard, layout_of, pieces
from qwen35_trainer.weights.stored_parts import damage
from qwen35_trainer.weights.transports import RankContext
from qwen35_trainer.weights.weight_manifest import TensorPart

logger = logging.getLogger(__name__)


class FolderSender:
    """The sending end of the transport Folder on one train rank: it writes the rank's shards of a version to a file."""

    def __init__(self, context: RankContext) -> None:
        assert context.folder is not None, "the manifest is checked"
        self._context, self._folder = context, context.folder
        self._stream = ShardStream(context.whole_every, context.bucket_bytes)
        self._is_first = True
        self._number = 0  # of the last publication that this process wrote; 0 before the first one
        self._partial: Path | None = None  # rank 0: the folder of the publication that is being written

    def stage(self, shards: Sequence[WeightShard], version: int, needed: frozenset[int]) -> StagedShard:
        if self._is_first:
            self._is_first = False
            latest: PublishedWeights | None = self._of_first_rank(lambda: publication_folder.latest(self._folder))
            if latest is not None and self._is_unchanged(latest, shards, version):
                return self._published_again(latest)
        try:
            partial, self._number = self._of_first_rank(self._begin)
            all_shards = self._of_all_ranks(lambda: self._write(shards, version, partial))
            self._of_first_rank(lambda: self._complete(all_shards, version, partial, needed))
        except BaseException:
            self._stream.forget()
            if self._partial is not None:
                publication_folder.discard(self._partial)
            raise
        self._partial = None
        shard = all_shards[self._context.rank]
        return shard if self._context.rank == 0 else replace(shard, layout=None)

    def _begin(self) -> tuple[Path, int]:
        """Create the folder in which the next publication is written.

        Returns its path, and the number of the publication. No earlier attempt has used this number. The first call
        also deletes what killed processes have left behind.
        """
        self._partial = publication_folder.begin(self._folder)
        if self._number:
            return self._partial, self._number + 1
        publication_folder.delete_abandoned(self._partial)
        return self._partial, max(publication_folder.complete_numbers(self._folder), default=0) + 1

    def _write(self, shards: Sequence[WeightShard], version: int, partial: Path) -> StagedShard:
        """Write this rank's shards to a file in `partial`, and wait until it is on the volume (fsync).

        Returns the staged shard.
        """
        name = f"rank-{self._context.rank:05d}.bin"
        path = f"{publication_folder.name_of(self._number)}/{name}"
        with (partial / name).open("wb") as file:

            def put(bucket: Memory) -> FilePlace:
                offset = file.tell()
                file.write(bucket)
                return FilePlace(path, offset, bucket.size)

            staged = self._stream.stage(shards, version, put)
            file.flush()
            os.fsync(file.fileno())
        source = FolderBuckets(staged.steps, self._stream.changes_follow, self._folder, self._number)
        return StagedShard(staged.layout, staged.layout.checksum, staged.parts, source)

    def _complete(self, shards: Sequence[StagedShard], version: int, partial: Path, needed: frozenset[int]) -> None:
        """Complete the publication, and delete the publications that nobody needs any more."""
        published = joined(shards, version)
        assert isinstance(published.source, FolderBuckets)
        whole = self._number - len(published.source.steps) + 1
        publication_folder.complete(partial, self._number, published, whole)
        publication_folder.delete_old(self._folder, needed)

    def _is_unchanged(self, latest: PublishedWeights, shards: Sequence[WeightShard], version: int) -> bool:
        """Return whether a publication from an earlier start of the run contains exactly this version, and is intact.

        latest: that publication. All its files that a replica would read must be present and undamaged. All ranks must
        call this together.
        """
        if (latest.manifest.version, latest.manifest.layout) != (version, layout_of(shards)):
            return False

        own: list[TensorPart] = []

        def compare() -> tuple[bool, int]:
            own.extend(_parts(shards))
            return set(own) <= set(latest.manifest.parts), len(own)

        compared = self._of_all_ranks(compare)
        total = sum(count for _, count in compared)
        if not all(equal for equal, _ in compared) or total != len(latest.manifest.parts):
            return False
        problem = next(filter(None, self._of_all_ranks(lambda: damage(latest, own, _read))), None)
        if problem is not None and self._context.rank == 0:
            logger.warning("version %d is published again: %s", version, problem)
        return problem is None

    def _published_again(self, latest: PublishedWeights) -> StagedShard:
        """Return this rank's shard of a publication from an earlier start of the run.

        Rank 0 returns the whole publication, and the other ranks return an empty shard.
        """
        source, layout = latest.source, latest.manifest.layout
        assert isinstance(source, FolderBuckets)
        if self._context.rank == 0:
            return StagedShard(layout, layout.checksum, latest.manifest.parts, source)
        empty = replace(source, steps=tuple(replace(step, buckets=()) for step in source.steps))
        return StagedShard(None, layout.checksum, (), empty)

    def _of_first_rank[Result](self, work: Callable[[], Result]) -> Result:
        """Call `work` on rank 0, and return its result on all ranks, or raise its error on all ranks.

        All ranks must call this together.
        """
        message: list[Any] = [self._outcome(work) if self._context.rank == 0 else None]
        if self._context.group is not None:
            dist.broadcast_object_list(message, src=0, group=self._context.group)
        [result] = _results(message)
        return cast("Result", result)

    def _of_all_ranks[Result](self, work: Callable[[], Result]) -> list[Result]:
        """Call `work` on each rank, and return all results on all ranks, or raise the first error on all ranks.

        All ranks must call this together.
        """
        outcomes: list[Any] = [self._outcome(work)] * self._context.ranks
        if self._context.group is not None:
            dist.all_gather_object(outcomes, outcomes[0], self._context.group)
        return cast("list[Result]", _results(outcomes))

    def _outcome(self, work: Callable[[], object]) -> tuple[object, Exception | None]:
        try:
            return work(), None
        except OSError as error:
            return None, PublicationNotStored(
                f"rank {self._context.rank} cannot publish into {self._folder}: {error.strerror} ({error.filename or 'its file'}). "
                "spec.publication.folder needs a volume that all pods mount for writing, with room for three versions"
            )
        except Exception as error:  # noqa: BLE001  # raised on every rank, so that none of them waits for the others
            return None, error


class FolderReceiver:
    """The receiving end of the transport Folder on a replica: it reads one bucket of a file at a time."""

    def __init__(self) -> None:
        self._receiver = StreamReceiver(_bucket)

    async def fetch(self, published: PublishedWeights) -> HostWeights:
        source = published.source
        assert isinstance(source, FolderBuckets)
        mark = await asyncio.to_thread(publication_folder.mark_reader, source.folder, source.number)
        try:
            return await self._receiver.fetch(published)
        except FileNotFoundError as error:
            if not source.folder.is_dir():
                raise PublicationFolderMissing(
                    f"spec.publication.folder: {source.folder}, into which the train ranks publish, does not exist in the "
                    "pod of this replica. Mount the same volume at the same path in spec.pods.rollout and spec.pods.train"
                ) from error
            raise PublicationGone(
                f"weights of version {published.manifest.version} are not in {source.folder} any more: {error.filename} is missing"
            ) from error
        finally:
            await asyncio.to_thread(publication_folder.remove_mark, mark)


async def _bucket(source: VersionBuckets, bucket: WeightBucket) -> Memory:
    assert isinstance(source, FolderBuckets)
    assert isinstance(bucket.place, FilePlace)
    return await asyncio.to_thread(_read, source.folder, bucket.place)


def _parts(shards: Sequence[WeightShard]) -> list[TensorPart]:
    """Return the parts in which this rank's shards would be published now, with their checksums."""
    scratch = np.empty(PART_BYTES, np.uint8)
    return [piece.write(scratch[: piece.size]) for piece in pieces(shards)]


def _read(folder: Path, place: FilePlace) -> Memory:
    """Return the bytes of a place in a file; fewer bytes if the file is too short."""
    memory = np.empty(place.size, np.uint8)
    with (folder / place.path).open("rb", buffering=0) as file:
        file.seek(place.offset)
        filled = 0
        while filled < place.size and (count := file.readinto(memory[filled:])):
            filled += count
    return memory[:filled]


def _results(outcomes: Sequence[tuple[object, Exception | None]]) -> list[object]:
    """Return the results of (result, error) pairs. Raises the first error that is not None."""
    for _, error in outcomes:
        if error is not None:
            raise error
    return [result for result, _ in outcomes]
