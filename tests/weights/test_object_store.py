"""The transport through Ray's object store, with a store that is a dictionary: each rank its shard, one bucket at a time."""

import asyncio
import dataclasses

import numpy as np
import pytest
import ray
import torch

from qwen35_trainer.weights import segment
from qwen35_trainer.weights.host_weights import HostWeights
from qwen35_trainer.weights.published import PublishedWeights, StoredBuckets, joined
from qwen35_trainer.weights.staging import WeightShard
from qwen35_trainer.weights.transports import RankContext, choose, object_store, receiver, sender
from qwen35_trainer.weights.weight_manifest import WeightsDamaged
from tests.publications import same

RANKS = 3
WEIGHTS = {
    "matrix": torch.arange(35, dtype=torch.float32).reshape(7, 5),
    "vector": torch.tensor([1.5, -2.5], dtype=torch.bfloat16),
    "scale": torch.tensor(0.5, dtype=torch.float64),
}


class Reference:
    """A reference to an object of the store."""

    def __init__(self, data: np.ndarray) -> None:
        self.data, self.fetches = data, 0

    def __await__(self):
        self.fetches += 1
        yield from asyncio.sleep(0).__await__()
        return self.data


@pytest.fixture
def store(monkeypatch) -> list[Reference]:
    objects: list[Reference] = []

    def put(data: np.ndarray) -> Reference:
        objects.append(Reference(data.copy()))
        objects[-1].data.flags.writeable = False
        return objects[-1]

    monkeypatch.setattr(ray, "put", put)
    monkeypatch.setattr(object_store, "BUCKET_BYTES", 128)
    return objects


def shards_of(rank: int, weights: dict[str, torch.Tensor]) -> list[WeightShard]:
    """Rows in order of ranks, as torch.chunk divides them: the last rank has fewer, or none."""
    shards = []
    for name, tensor in weights.items():
        whole = tensor.reshape(-1) if tensor.ndim == 0 else tensor
        chunks = whole.chunk(RANKS)
        start = sum(chunk.numel() for chunk in chunks[:rank])
        values = chunks[rank] if rank < len(chunks) else whole.flatten()[:0]
        shards.append(WeightShard(name, tuple(tensor.shape), tensor.dtype, start, values))
    return shards


def publish(weights: dict[str, torch.Tensor], version: int) -> PublishedWeights:
    ends = [sender("objectStore", RankContext(rank, RANKS, None)) for rank in range(RANKS)]
    staged = [end.stage(shards_of(rank, weights), version, frozenset()) for rank, end in enumerate(ends)]
    return joined(staged, version)


def test_whole_tensors_arrive_from_the_shards_of_all_ranks(store) -> None:
    published = publish(WEIGHTS, 3)
    weights = asyncio.run(receiver().fetch(published))
    assert same(weights.items(), WEIGHTS.items())
    assert weights.version == 3
    assert len(store) == 4, "two of rank 0, and one of each other rank"
    assert all(each.fetches == 1 and each.data.size <= 128 for each in store)


def test_no_bucket_is_larger_than_its_limit_and_each_is_full_before_the_next(store) -> None:
    many = {str(number): torch.full((3, 16), float(number)) for number in range(5)}  # 64 bytes on each rank
    weights = asyncio.run(receiver().fetch(publish(many, 1)))
    assert same(weights.items(), many.items())
    assert [each.data.size for each in store] == [128, 128, 64] * RANKS


def test_a_late_replica_fetches_what_was_published_although_the_weights_changed(store) -> None:
    live = {name: tensor.clone() for name, tensor in WEIGHTS.items()}
    published = publish(live, 1)
    for tensor in live.values():
        tensor.zero_()
    assert same(asyncio.run(receiver().fetch(published)).items(), WEIGHTS.items())


def test_a_version_in_use_stays_when_the_next_one_arrives_and_its_memory_is_used_again_afterwards(store) -> None:
    arriving = receiver()

    def fetch(version: int) -> HostWeights:
        return asyncio.run(arriving.fetch(publish({"w": torch.full((6,), float(version))}, version)))

    first = fetch(1)
    second = fetch(2)
    name = first.handle.name
    assert first["w"].tolist() == [1.0] * 6
    assert second["w"].tolist() == [2.0] * 6
    del first
    assert fetch(3).handle.name == name


def test_a_damaged_bucket_fails_by_the_names_of_its_tensors_and_the_version_before_stays(store) -> None:
    arriving = receiver()
    before = asyncio.run(arriving.fetch(publish(WEIGHTS, 1)))
    published = publish(WEIGHTS, 2)
    damaged = store[-1].data.copy()  # of the last rank: the end of the matrix
    damaged[0] ^= 1
    store[-1].data = damaged
    with pytest.raises(WeightsDamaged, match="version 2: checksum of matrix differs"):
        asyncio.run(arriving.fetch(published))
    assert same(before.items(), WEIGHTS.items())


@pytest.mark.parametrize(
    ("buckets", "problem"),
    [(lambda all_: all_[:-1], "the buckets hold 5 of 6 parts"), (lambda all_: all_[::-1], "checksum of .*matrix")],
)
def test_missing_and_exchanged_buckets_are_found(store, buckets, problem) -> None:
    published = publish(WEIGHTS, 2)
    assert isinstance(published.source, StoredBuckets)
    changed = dataclasses.replace(published, source=StoredBuckets(buckets(published.source.buckets)))
    with pytest.raises(WeightsDamaged, match=problem):
        asyncio.run(receiver().fetch(changed))


def test_a_machine_without_segments_receives_into_the_memory_of_the_process(store, monkeypatch) -> None:
    monkeypatch.setattr(segment, "IS_SUPPORTED", False)
    assert same(asyncio.run(receiver().fetch(publish(WEIGHTS, 1))).items(), WEIGHTS.items())
    assert choose(one_host=True) == "objectStore"


def test_the_transport_follows_from_where_the_pools_are() -> None:
    assert choose(one_host=True) == "sharedMemory"
    assert choose(one_host=False) == "objectStore"
