"""The folder of a run's publications: which of them are complete, what each contains, and which may be deleted (retention).

    FOLDER/.publication-TOKEN/            being written: nobody reads it
    FOLDER/publication-000007/            complete: renamed when all files were on the volume
        manifest.json                     header, manifest and buckets, with checksums; written last
        rank-00000.bin                    the buckets of one train rank
        readers/TOKEN                     exists while a replica reads this publication
    FOLDER/.deleted-TOKEN/                being deleted

Publications are numbered in the order in which they are made. A publication contains a whole version or only changes. To load
changes, a replica needs the files of all publications from the last whole one on. The header of each publication contains the
number of that whole publication. Several attempts of a run use the same folder, one after another, and continue the numbers.
If two processes publish at the same time, one of them fails, because a number can be taken only once. All other entries of the
folder are ignored. This module imports neither torch nor Ray.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import time
import uuid
from dataclasses import asdict, dataclass
from itertools import islice
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
"""Number of the newest publications that are always kept."""
MAX_READ_SECONDS = 3600.0
"""Age of a reader's mark, in seconds, from which the mark is ignored: its reader was killed and could not remove it."""
PREFIX = "publication-"
DELETED_PREFIX = ".deleted-"


class PublicationNotStored(RuntimeError):
    """A publication could not be written to its folder. The message contains the cause and what to do."""

    failure = FailureReason.STORAGE_FAILED


class PublicationGone(RuntimeError):
    """Files of a publication that a replica is loading were deleted, because later publications have replaced it."""

    failure = FailureReason.WORKER_LOST


class PublicationFolderMissing(RuntimeError):
    """The folder of the run's publications does not exist in the pod of a replica.

    The message names the manifest's field, the folder, and what to do.
    """

    failure = FailureReason.STORAGE_FAILED


@dataclass(frozen=True)
class PublicationHeader:
    """The first line of a manifest file. It can be read without the second line, and has its own checksum."""

    version: int
    whole: int
    """Number of the newest publication with a whole version, up to and including this publication.

    To load this publication, a replica needs the files of all publications from that number on, up to this one.
    """
    checksum: str
    """XXH3 of the second line of the manifest file, without its newline, in hexadecimal."""

    @classmethod
    def decoded(cls, line: bytes) -> PublicationHeader | None:
        """Return the header in the first line of a manifest file; None if the line is damaged or of another release."""
        try:
            fields = json.loads(line)
            own_checksum = fields.pop("headerChecksum")
            header = cls(**fields)
        except (ValueError, TypeError, AttributeError, KeyError):
            return None
        return header if own_checksum == header._own_checksum else None

    def encoded(self) -> str:
        """Return the header as a line of JSON, without a newline."""
        return json.dumps({**asdict(self), "headerChecksum": self._own_checksum})

    @property
    def _own_checksum(self) -> str:
        return _checksum(json.dumps(asdict(self)).encode())


def name_of(number: int) -> str:
    """Return the name of the folder of publication `number`, such as `publication-000007`."""
    return f"{PREFIX}{number:06d}"


def complete_numbers(folder: Path) -> list[int]:
    """Return the numbers of the complete publications in `folder`, in ascending order."""
    suffixes = [path.name.removeprefix(PREFIX) for path in folder.glob(f"{PREFIX}*") if path.is_dir()]
    numbers = [int(suffix) for suffix in suffixes if suffix.isdecimal()]
    return sorted(number for number in numbers if name_of(number).removeprefix(PREFIX) in suffixes)


def begin(folder: Path) -> Path:
    """Create a folder in which a publication is written, and return the path of the new folder.

    folder: the folder of the run's publications.
    """
    partial = folder / f".{PREFIX}{uuid.uuid4().hex}"
    (partial / READERS).mkdir(parents=True)
    return partial


def discard(partial: Path) -> None:
    """Delete the folder of an incomplete publication, or a folder that was renamed for deletion.

    A folder that does not exist is ignored. Entries that cannot be deleted are logged.
    """
    shutil.rmtree(partial, onexc=_warn_of_remains)


def delete_abandoned(first: Path) -> None:
    """Delete the folders that processes left behind when they were killed while they wrote or deleted a publication.

    first: the folder from the first `begin` of this process. Incomplete publications that were begun after `first` are
    kept, because another process may be writing them; earlier ones are deleted. Times are compared on the volume's
    clock, so that the clocks of the machines need not agree.
    """
    for path in first.parent.glob(f".{PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):  # its writer has completed or discarded it meanwhile
            if path != first and _begun(path) <= _begun(first):
                discard(path)
    for path in first.parent.glob(f"{DELETED_PREFIX}*"):
        discard(path)


def _begun(partial: Path) -> int:
    """Return the time at which `begin` created a folder, in nanoseconds on the volume's clock."""
    try:  # nothing is created in this folder before the publication is complete, so its time does not change
        return (partial / READERS).stat().st_mtime_ns
    except FileNotFoundError:
        return partial.stat().st_mtime_ns


def complete(partial: Path, number: int, published: PublishedWeights, whole: int) -> None:
    """Complete a publication: write its manifest file, and rename its folder, so that replicas can read it.

    partial: the folder from `begin`, in which all files of the ranks are on the volume already. number: number of the
    publication. published: what the files contain. whole: number of the newest publication with a whole version, which
    may be this one. Raises PublicationNotStored if another process has made a publication of this number, or has
    deleted or changed files of this one, and OSError for other errors of the volume.
    """
    final = partial.with_name(name_of(number))
    advice = "another process publishes into this folder. End it, or name another one in spec.publication.folder"
    try:
        for name, size in _file_sizes(published).items():
            if (stored := _size(partial / name)) < size:
                raise PublicationNotStored(f"{partial / name} has {stored} of {size} bytes: {advice}")
        _write_manifest(partial / MANIFEST_FILE, published, whole)
        sync(partial)
        partial.rename(final)
    except FileNotFoundError as error:
        raise PublicationNotStored(
            f"{error.filename} was deleted before its publication was complete: {advice}"
        ) from error
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise PublicationNotStored(f"{final} exists: {advice}") from error
    sync(final.parent)


def _file_sizes(published: PublishedWeights) -> dict[str, int]:
    """Return the number of bytes, up to the end of the last bucket, of each file that a publication adds, by name."""
    assert isinstance(published.source, FolderBuckets)
    sizes: dict[str, int] = {}
    for bucket in published.source.steps[-1].buckets:
        assert isinstance(bucket.place, FilePlace)
        name = Path(bucket.place.path).name
        sizes[name] = max(sizes.get(name, 0), bucket.place.offset + bucket.place.size)
    return sizes


def _size(path: Path) -> int:
    """Return the size of a file in bytes.

    The file is opened, because NFS compares its cache with the server only then.
    """
    with path.open("rb") as file:
        return file.seek(0, os.SEEK_END)


def _write_manifest(path: Path, published: PublishedWeights, whole: int) -> None:
    """Write the manifest file at `path`, and wait until it is on the volume (fsync)."""
    body = json.dumps(_as_json(published)).encode()
    header = PublicationHeader(published.manifest.version, whole, _checksum(body))
    path.write_bytes(header.encoded().encode() + b"\n" + body + b"\n")
    sync(path)


def latest(folder: Path) -> PublishedWeights | None:
    """Return the newest complete publication, whichever process made it; None if there is none.

    A publication whose manifest file is missing, damaged or of another release is skipped, with a warning. The buckets
    of the result are not verified.
    """
    for number in reversed(complete_numbers(folder)):
        if (published := _read(folder, number)) is not None:
            return published
        logger.warning(
            "%s is missing, damaged, or of another release, so that the publication before it is used",
            folder / name_of(number) / MANIFEST_FILE,
        )
    return None


def _read(folder: Path, number: int) -> PublishedWeights | None:
    """Return a complete publication; None if its manifest file is missing, damaged or of another release.

    number: number of the publication.
    """
    lines = _manifest_lines(folder / name_of(number), 2)
    header = _header(lines)
    if header is None or len(lines) < 2 or _checksum(body := lines[1].removesuffix(b"\n")) != header.checksum:
        return None
    try:
        return _from_json(folder, number, json.loads(body))
    except (ValueError, TypeError, KeyError):
        return None


def _header(lines: list[bytes]) -> PublicationHeader | None:
    """Return the header in the first of `lines`, the lines of a manifest file; None if it is missing or damaged."""
    return PublicationHeader.decoded(lines[0]) if lines else None


def _manifest_lines(path: Path, count: int) -> list[bytes]:
    """Return the first `count` lines of a publication's manifest file; an empty list if the file cannot be read.

    path: the publication's folder.
    """
    try:
        with (path / MANIFEST_FILE).open("rb") as file:
            return list(islice(file, count))
    except OSError:
        return []


def mark_reader(folder: Path, number: int) -> Path:
    """Mark a publication as being read, so that it is not deleted. Returns the path of the mark, for `remove_mark`.

    If the mark cannot be written, because the volume is read-only or the publication is already deleted, no error is
    raised. Without a mark, the publication can be deleted while it is read.
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
    """Delete the publications that nobody needs and that are older than all needed ones.

    A publication is needed if it is among the newest MIN_PUBLICATIONS, if its version is in `needed`, or if a reader has
    marked it within the last MAX_READ_SECONDS. A needed publication of changes needs the last whole publication before
    it, and all publications in between. needed: versions that replicas have or may still load. Folders that cannot be
    deleted are logged and cause no error, because they only take room on the volume.
    """
    try:
        numbers = complete_numbers(folder)
        first = min((_first_needed(folder, number, numbers, needed) for number in numbers), default=0)
    except OSError as error:
        logger.warning("no publication in %s is deleted, because it cannot be read: %s", folder, error)
        return
    for number in numbers:
        if number < first:
            _delete(folder / name_of(number))


def _first_needed(folder: Path, number: int, numbers: list[int], needed: frozenset[int]) -> int:
    """Return the number of the oldest publication that must be kept because of publication `number`.

    If publication `number` is not needed, the result is the number of the newest publication. numbers: numbers of all
    complete publications, in ascending order. needed: as in `delete_old`.
    """
    path = folder / name_of(number)
    header = _header(_manifest_lines(path, 1))
    version, whole = (None, number) if header is None else (header.version, header.whole)
    return whole if number in numbers[-MIN_PUBLICATIONS:] or version in needed or _is_read(path) else numbers[-1]


def _delete(path: Path) -> None:
    """Delete a publication. path: its folder."""
    deleted = path.with_name(f"{DELETED_PREFIX}{uuid.uuid4().hex}")
    try:
        path.rename(deleted)  # so that it is never found half deleted
    except OSError as error:
        logger.warning("%s is not needed any more and cannot be deleted: %s", path, error)
    else:
        discard(deleted)


def _warn_of_remains(_: object, path: str, error: BaseException) -> None:
    """Log an entry that shutil.rmtree could not delete, unless another process has deleted it."""
    if not isinstance(error, FileNotFoundError):
        logger.warning("%s is not needed any more and cannot be deleted: %s", path, error)


def _is_read(path: Path) -> bool:
    """Return whether a publication has the mark of a reader that is younger than MAX_READ_SECONDS.

    path: the publication's folder.
    """
    oldest = time.time() - MAX_READ_SECONDS
    try:
        marks = list((path / READERS).iterdir())
    except FileNotFoundError:
        return False  # no replica can leave a mark there
    for mark in marks:
        with contextlib.suppress(FileNotFoundError):  # its reader has just removed it
            if mark.stat().st_mtime > oldest:
                return True
    return False


def _checksum(data: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data)


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
