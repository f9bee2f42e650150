"""Divides the bytes of a version into reads, each from one process. Pure.

source         what is read from it                       order
train ranks    shard of rank 0 │ shard of rank 1 │ …      in turn; replicas begin with different ranks, to spread the load
a replica      its whole copy                             the order of the manifest's parts
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

from qwen35_trainer.weights.published import RegisteredCopy, RegisteredShards
from qwen35_trainer.weights.transfer_agent import RemoteMemory, Span
from qwen35_trainer.weights.weight_manifest import ALIGNMENT, TensorPart, WeightManifest, WeightsDamaged, packed

REQUEST_BYTES = 64 * 2**20
"""Maximum size of a read in bytes, unless a single part is larger.

The parts of a read are verified during later reads.
"""


@dataclass(frozen=True)
class ReadRequest:
    """A read of whole parts of a version from one process. spans: the bytes to copy for these parts."""

    source: RemoteMemory
    parts: tuple[TensorPart, ...]
    spans: tuple[Span, ...]


def read_requests(
    manifest: WeightManifest, source: RegisteredShards | RegisteredCopy, first: int = 0
) -> list[ReadRequest]:
    """Return the reads that together copy a version into memory, to the offsets of the version's layout.

    first: number of the train rank from which to read first. Replicas pass different numbers, to spread the load. A
    number that is too high is taken modulo the number of ranks. Raises WeightsDamaged if the shards have more or fewer
    parts than the manifest, or if a part does not fit into its source.
    """
    if isinstance(source, RegisteredCopy):
        return list(_requests(manifest, source.memory, manifest.parts, [_place(manifest, p) for p in manifest.parts]))
    of_shard: list[list[ReadRequest]] = []
    begin = 0
    for shard in source.shards:
        parts = manifest.parts[begin : begin + shard.parts]
        begin += shard.parts
        offsets = [place.start for place in packed([part.size for part in parts])]
        of_shard.append(list(_requests(manifest, shard.memory, parts, offsets)))
    if begin != len(manifest.parts):
        raise WeightsDamaged(
            f"weights of version {manifest.version}: the shards hold {begin} of {len(manifest.parts)} parts"
        )
    turn = first % max(1, len(of_shard))
    in_turns = zip_longest(*of_shard[turn:], *of_shard[:turn])
    return [request for request in chain.from_iterable(in_turns) if request is not None]


def _requests(
    manifest: WeightManifest, source: RemoteMemory, parts: Sequence[TensorPart], offsets: Sequence[int]
) -> Iterator[ReadRequest]:
    """Yield the reads of parts from `source`. offsets: offset of each part in the source, in bytes.

    Raises WeightsDamaged if a part does not fit into the source.
    """
    chosen: list[tuple[TensorPart, Span]] = []
    size = 0
    for part, offset in zip(parts, offsets, strict=True):
        if offset + part.size > source.size:
            name = manifest.layout.tensors[part.tensor].name
            raise WeightsDamaged(f"weights of version {manifest.version}: {name} does not fit into its source")
        if chosen and size + part.size > REQUEST_BYTES:
            yield _request(manifest, source, chosen)
            chosen, size = [], 0
        chosen.append((part, Span(offset, _place(manifest, part), part.size)))
        size += part.size
    if chosen:
        yield _request(manifest, source, chosen)


def _request(manifest: WeightManifest, source: RemoteMemory, chosen: Sequence[tuple[TensorPart, Span]]) -> ReadRequest:
    """Return a read of the chosen parts. Spans that follow one another in both memories are joined."""
    (last, joined), *rest = chosen
    spans: list[Span] = []
    for part, span in rest:
        gap = span.target - joined.target - joined.size
        # Between a complete tensor and the next one there are only bytes that align it. Elsewhere, they are another rank's.
        is_free = part.start == 0 and last.start + last.size == manifest.layout.tensors[last.tensor].size
        if span.source - joined.source - joined.size == gap and (gap == 0 or (is_free and 0 < gap < ALIGNMENT)):
            joined = Span(joined.source, joined.target, joined.size + gap + span.size)
        else:
            spans.append(joined)
            joined = span
        last = part
    return ReadRequest(source, tuple(part for part, _ in chosen), (*spans, joined))


def _place(manifest: WeightManifest, part: TensorPart) -> int:
    """Return the offset of a part in the version, in bytes."""
    return manifest.layout.tensors[part.tensor].offset + part.start
