"""Checks whether replicas can still read a publication in a folder, whose files may have been damaged since they were written.

    for each part:  its bytes in the whole version ─► the changes of each later version, applied ─► compared with its checksum

One part is decoded at a time, and each rank checks its own parts, so that no process holds the whole version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from qwen35_trainer.weights.host_weights import is_intact
from qwen35_trainer.weights.published import EncodedPart, FilePlace, FolderBuckets, PublishedWeights, VersionStep
from qwen35_trainer.weights.segment import Memory
from qwen35_trainer.weights.shard_streams import is_decoded
from qwen35_trainer.weights.weight_manifest import ITEM_BYTES, TensorPart, packed


def damage(
    published: PublishedWeights, parts: Iterable[TensorPart], read: Callable[[Path, FilePlace], Memory]
) -> str | None:
    """Return a text about the first damage in the files of a publication; None if all checked parts are intact.

    published: a publication in a folder. parts: the parts of its manifest to check. read: returns the bytes of a place
    in a file of the folder, or fewer if the file is too short. A file that cannot be read is damage, not an error.
    """
    manifest, source = published.manifest, published.source
    assert isinstance(source, FolderBuckets)
    numbers = {part: number for number, part in enumerate(manifest.parts)}
    of_steps = [list(_encodings(step)) for step in source.steps]
    for part in parts:
        entry, memory = manifest.layout.tensors[part.tensor], np.empty(part.size, np.uint8)
        for place, encoding in (of_step[numbers[part]] for of_step in of_steps):
            try:
                contents = read(source.folder, place)
            except OSError as error:
                return f"{source.folder / place.path} cannot be read: {error.strerror}"
            if not is_decoded(memory, contents, encoding, ITEM_BYTES[entry.dtype]):
                return f"the bytes of {entry.name} in {source.folder / place.path} are damaged"
        if not is_intact(part, memory):
            return f"the bytes of {entry.name} in the files of {len(of_steps)} publications do not have their checksum"
    return None


def _encodings(step: VersionStep) -> Iterator[tuple[FilePlace, EncodedPart]]:
    """Yield the place and the encoding of each part in the buckets of a version, in the order of the manifest's parts."""
    for bucket in step.buckets:
        assert isinstance(bucket.place, FilePlace)
        for part, own in zip(bucket.parts, packed([part.size for part in bucket.parts]), strict=True):
            yield FilePlace(bucket.place.path, bucket.place.offset + own.start, part.size), part
