"""A version in Ray's object store: for several hosts, and for machines without shared memory segments.

    each rank: shards ─► a bucket ─► ray.put ─► the next bucket …      no process holds the whole model
    replica:   one bucket at a time ─► verified ─► its place in the replica's own memory ─► released

waits on                   unblocked by                       deadline
a bucket                   Ray has fetched it                 publication.timeoutSeconds, in the driver

A replica reads at its own pace, so a late replica needs no special treatment. Ray keeps the buckets as long as the driver holds
their references and the rank that stored them is alive: since 2.56, `ray.put` cannot give an object to another owner. If a rank
is lost, the run ends in any case. With changes (`shard_streams`), the ranks also hold references to the buckets from the last
whole version on.
"""

from __future__ import annotations

from collections.abc import Sequence

import ray

from qwen35_trainer.weights.host_weights import HostWeights
from qwen35_trainer.weights.published import (
    FilePlace,
    PublishedWeights,
    StagedShard,
    StoredBuckets,
    VersionBuckets,
    WeightBucket,
)
from qwen35_trainer.weights.segment import Memory
from qwen35_trainer.weights.shard_streams import ShardStream, StreamReceiver
from qwen35_trainer.weights.staging import WeightShard
from qwen35_trainer.weights.transports import RankContext


class ObjectStoreSender:
    """The sending end of the transport ObjectStore on one train rank: it puts the rank's shards into the store."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._stream = ShardStream(context.whole_every, context.bucket_bytes)

    def stage(self, shards: Sequence[WeightShard], version: int, needed: frozenset[int]) -> StagedShard:
        staged = self._stream.stage(shards, version, ray.put)
        source = StoredBuckets(staged.steps, self._stream.changes_follow)
        layout = staged.layout if self._context.rank == 0 else None
        return StagedShard(layout, staged.layout.checksum, staged.parts, source)


class ObjectStoreReceiver:
    """The receiving end of the transport ObjectStore on a replica: it fetches and releases one bucket at a time."""

    def __init__(self) -> None:
        self._receiver = StreamReceiver(_bucket)

    async def fetch(self, published: PublishedWeights) -> HostWeights:
        return await self._receiver.fetch(published)


async def _bucket(_: VersionBuckets, bucket: WeightBucket) -> Memory:
    assert not isinstance(bucket.place, FilePlace)
    data: Memory = await bucket.place
    return data
