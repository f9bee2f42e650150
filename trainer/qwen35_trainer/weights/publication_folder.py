"""The folder of a run's publications: which of them are complete, what each contains, and which may be deleted.

    FOLDER/.publication-TOKEN/            being written: nobody reads it
    FOLDER/publication-000007/            complete: renamed when all files were on the volume
        manifest.json                     header, manifest and buckets, with a checksum; written last
        rank-00000.bin                    the buckets of one train rank
        readers/TOKEN                     exists while a replica reads this publication

Publications are numbered in the order in which they are made. A publication with changes needs the files of all
publications from the last whole one on, whose number is in its header. Several attempts of a run use the same folder,
one after another, and continue the numbers. If two processes publish at the same time, one of them fails, because a
number can be taken only once. This module imports neither torch nor Ray.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import shutil
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from qwen35_trainer.atomic_files import sync
from qwen35_trainer.failure_reasons import FailureReason
from qwen35_trainer.weights.published import (
    EncodedPart,
    FilePlace,
    FolderBuckets,
    PublishedWeights,
    VersionStep,
    WeightBucket,
)
from qwen35_trainer.weights.weight_manifest import (
    TensorEntry,
    TensorPart,
    WeightLayout,
    WeightManifest,
)

logger = logging.getLogger(__name__)

MANIFEST_FILE = "manifest.json"
READERS = "readers"
MIN_PUBLICATIONS = 2
"""Number of publications that are always kept: the newest one, and the one before it."""
MAX_READ_SECONDS = 3600.0
"""Age, in seconds, from which the mark of a reader is ignored, because the reader was killed."""
PREFIX = "publication-"


class PublicationNotStored(RuntimeError):
    """A publication could not be written to its folder. The message contains the cause and what to do."""

    failure = FailureReason.STORAGE_FAILED


class PublicationGone(RuntimeError):
    """A publication was deleted, because later ones have replaced it."""

    failure = FailureReason.WORKER_LOST


@dataclass(frozen=True)
class PublicationHeader:
    """The first line of a manifest file."""

    version: int
    whole: int
    """Number of the last publication, up to this one, that contains a whole version.

    This publication needs its files, and the files of all publications between the two.
    """
    checksum: str
    """XXH3 of the second line of the manifest file, in hexadecimal."""


def name_of(number: int) -> str:
    """Return the name of a publication's folder."""
    return f"{PREFIX}{number:06d}"


def complete_numbers(folder: Path) -> list[int]:
    """Return the numbers of the complete publications in `folder`, in ascending order."""
    names = [path.name.removeprefix(PREFIX) for path in folder.glob(f"{PREFIX}*")]
    return sorted(int(name) for name in names if name.isdecimal())


def begin(folder: Path) -> Path:
    """Create the folder in which a publication is written, and return its path.

    folder: the folder of the run's publications. Incomplete publications that an earlier process left there are
    deleted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(f".{PREFIX}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    partial = folder / f".{PREFIX}{uuid.uuid4().hex}"
    (partial / READERS).mkdir(parents=True)
    return partial


def complete(partial: Path, number: int, published: PublishedWeights, whole: int) -> None:
    """Write the manifest, and rename the folder, so that replicas can read the publication.

    partial: the folder from `begin`, in which all files of the ranks are on the volume already. number: number of the
    publication. whole: number of the publication with the last whole version. Raises PublicationNotStored if another
    process has made a publication of this number.
    """
    body = json.dumps(_as_json(published))
    header = PublicationHeader(published.manifest.version, whole, xxhash.xxh3_64_hexdigest(body.encode()))
    path = partial / MANIFEST_FILE
    path.write_text(f"{json.dumps(asdict(header))}\n{body}\n")
    sync(path)
    sync(partial)
    final = partial.with_name(name_of(number))
    try:
        partial.rename(final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        raise PublicationNotStored(
            f"{final} exists: another process publishes into this folder. End it, or name another one in "
            "spec.publication.folder"
        ) from error
    sync(final.parent)


def latest(folder: Path) -> PublishedWeights | None:
    """Return the newest complete publication, whichever process made it; None if there is none.

    A publication whose manifest file is damaged is skipped, with a warning. The tensors of the result are not verified.
    """
    for number in reversed(complete_numbers(folder)):
        if (published := _read(folder, number)) is not None:
            return published
        logger.warning(
            "%s is damaged, so that the publication before it is used", folder / name_of(number) / MANIFEST_FILE
        )
    return None


def _read(folder: Path, number: int) -> PublishedWeights | None:
    """Return the complete publication with this number; None if its manifest file is damaged."""
    first, _, body = (folder / name_of(number) / MANIFEST_FILE).read_text().partition("\n")
    header = _header(first)
    if header is None or xxhash.xxh3_64_hexdigest(body.removesuffix("\n").encode()) != header.checksum:
        return None
    return _from_json(folder, number, json.loads(body))


def _header(line: str) -> PublicationHeader | None:
    """Return the header in the first line of a manifest file; None if the line is damaged."""
    try:
        return PublicationHeader(**json.loads(line))
    except (ValueError, TypeError):
        return None


def mark_reader(folder: Path, number: int) -> Path:
    """Mark a publication as being read, so that it is not deleted. Returns the path of the mark, for `remove_mark`.

    If the volume is read-only, no mark is left, and only the versions that the driver needs are kept.
    """
    mark = folder / name_of(number) / READERS / uuid.uuid4().hex
    with contextlib.suppress(OSError):  # read-only, or deleted, which reading the files reports
        mark.touch()
    return mark


def remove_mark(mark: Path) -> None:
    """Remove the mark of a reader. A mark that cannot be removed is ignored after MAX_READ_SECONDS."""
    with contextlib.suppress(OSError):  # as above; a mark that remains counts for MAX_READ_SECONDS
        mark.unlink()


def delete_old(folder: Path, needed: frozenset[int]) -> None:
    """Delete the publications that nobody needs.

    A publication is needed if it is among the newest MIN_PUBLICATIONS, if a replica reads it, or if it has a version in
    `needed`. All publications from the last whole version before it on are needed too. The mark of a reader counts for
    MAX_READ_SECONDS.
    """
    numbers = complete_numbers(folder)
    first = numbers[-1]
    for number in numbers:
        path = folder / name_of(number)
        with (path / MANIFEST_FILE).open() as file:
            header = _header(file.readline())
        version, whole = (None, number) if header is None else (header.version, header.whole)
        if number in numbers[-MIN_PUBLICATIONS:] or version in needed or _is_read(path):
            first = min(first, whole)
    for number in numbers:
        if number < first:
            # Renamed first, so that it is never found half deleted.
            deleted = (folder / name_of(number)).rename(folder / f".{PREFIX}{uuid.uuid4().hex}")
            shutil.rmtree(deleted, ignore_errors=True)


def _is_read(path: Path) -> bool:
    """Return whether a replica reads a publication. path: the publication's folder."""
    oldest = time.time() - MAX_READ_SECONDS
    for mark in (path / READERS).iterdir():
        with contextlib.suppress(FileNotFoundError):  # its reader has just removed it
            if mark.stat().st_mtime > oldest:
                return True
    return False


def _as_json(published: PublishedWeights) -> dict[str, Any]:
    manifest, source = published.manifest, published.source
    assert isinstance(source, FolderBuckets)
    return {
        "version": manifest.version,
        "size": manifest.layout.size,
        "tensors": [[entry.name, entry.shape, entry.dtype, entry.offset] for entry in manifest.layout.tensors],
        "parts": [[part.tensor, part.start, part.size, part.checksum] for part in manifest.parts],
        "steps": [
            {
                "version": step.version,
                "base": step.base,
                "buckets": [_bucket_as_json(bucket) for bucket in step.buckets],
            }
            for step in source.steps
        ],
        "changesFollow": source.changes_follow,
    }


def _bucket_as_json(bucket: WeightBucket) -> dict[str, Any]:
    assert isinstance(bucket.place, FilePlace)
    place = bucket.place
    parts = [[part.size, part.changes] for part in bucket.parts]
    return {"file": place.path, "offset": place.offset, "size": place.size, "parts": parts}


def _from_json(folder: Path, number: int, record: dict[str, Any]) -> PublishedWeights:
    tensors = tuple(TensorEntry(name, tuple(shape), dtype, offset) for name, shape, dtype, offset in record["tensors"])
    layout = WeightLayout(tensors, record["size"])
    manifest = WeightManifest(record["version"], layout, tuple(TensorPart(*part) for part in record["parts"]))
    steps = tuple(
        VersionStep(step["version"], step["base"], tuple(_bucket_from_json(bucket) for bucket in step["buckets"]))
        for step in record["steps"]
    )
    return PublishedWeights(manifest, FolderBuckets(steps, record["changesFollow"], folder, number))


def _bucket_from_json(record: dict[str, Any]) -> WeightBucket:
    place = FilePlace(record["file"], record["offset"], record["size"])
    return WeightBucket(place, tuple(EncodedPart(size, changes) for size, changes in record["parts"]))
