"""Versions that travel as changes: exact for every replica, whatever it has, and smaller where little changes."""

import asyncio
import threading
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from qwen35_trainer.weights import segment, shard_streams
from qwen35_trainer.weights.host_weights import HostWeights
from qwen35_trainer.weights.published import FilePlace, PublishedWeights, VersionStep
from qwen35_trainer.weights.segment import Memory
from qwen35_trainer.weights.shard_streams import ShardStream
from qwen35_trainer.weights.staging import WeightShard
from qwen35_trainer.weights.weight_manifest import WeightsDamaged
from tests.weights import ways
from tests.weights.ways import RANKS, Way, bits, fetch, reader

WHOLE_EVERY = 4
WITH_CHANGES = ["ObjectStore with changes", "Folder with changes"]


@pytest.fixture
def open_way(open_way: Callable[[str], Way], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Way]:
    """Sets up one of WAYS, with buckets in which a rank's share of a version fits twice."""
    monkeypatch.setattr(ways, "BUCKET_BYTES", 4096)
    return open_way


@pytest.fixture(params=WITH_CHANGES)
def way(request: pytest.FixtureRequest, open_way: Callable[[str], Way]) -> Way:
    """Each transport that publishes changes."""
    return open_way(request.param)


def weights_of(version: int) -> dict[str, torch.Tensor]:
    """Weights of which one value in fifty differs from those of the version before, in one of two tensors."""
    trained = torch.arange(1500, dtype=torch.float32)
    for step in range(1, version + 1):
        trained[step::50] += step
    return {"trained": trained.to(torch.bfloat16), "frozen": torch.arange(600, dtype=torch.bfloat16)}


def published_versions(way: Way, count: int) -> list[PublishedWeights]:
    return [way.publish(weights_of(version), version, frozenset(range(count))) for version in range(count)]


def step_bytes(step: VersionStep) -> int:
    """Bytes of all parts in the buckets of a step."""
    return sum(part.size for bucket in step.buckets for part in bucket.parts)


def test_every_fourth_version_is_whole_and_the_others_are_changes_to_the_one_before(way: Way) -> None:
    steps = [published.source.steps[-1] for published in published_versions(way, 9)]
    assert [step.base for step in steps] == [None, 0, 1, 2, None, 4, 5, 6, None]
    sizes = [step_bytes(step) for step in steps]
    assert sizes[0] == sizes[4] == sizes[8] == 4200
    assert max(sizes[1:4]) < 0.03 * sizes[0], "what does not change takes no bytes"


def test_a_replica_that_has_the_version_before_fetches_only_the_changes(open_way: Callable[[str], Way]) -> None:
    way, arriving = open_way("ObjectStore with changes"), reader()
    for published in published_versions(way, WHOLE_EVERY):
        weights = fetch(arriving, published)
        assert bits(weights) == bits(weights_of(published.manifest.version))
    fetches = [bucket.place.fetches for step in published.source.steps for bucket in step.buckets]
    assert set(fetches) == {1}


def test_a_version_is_copied_for_its_changes_while_the_process_answers_calls(
    open_way: Callable[[str], Way], monkeypatch
) -> None:
    """For the largest models, the copy takes longer than a replica may take to answer."""
    copying: list[threading.Thread] = []

    def copied(self: HostWeights, memory: Memory) -> None:
        copying.append(threading.current_thread())
        copy_to(self, memory)

    copy_to = HostWeights.copy_to
    monkeypatch.setattr(HostWeights, "copy_to", copied)
    versions, arriving = published_versions(open_way("ObjectStore with changes"), 2), reader()
    for published in versions:
        fetch(arriving, published)
    assert len(copying) == 1
    assert copying[0] is not threading.current_thread(), "that of the event loop"


def test_a_fetch_waits_for_the_writes_of_a_cancelled_one(open_way: Callable[[str], Way], monkeypatch) -> None:
    """After a failed probe, a replica cancels the fetch of the next version, and fetches its own one to compare."""
    versions, arriving = published_versions(open_way("ObjectStore with changes"), WHOLE_EVERY + 1), reader()
    own, following = versions[0], versions[WHOLE_EVERY]
    begun, released, written = threading.Event(), threading.Event(), threading.Event()
    decode = shard_streams._decode

    def once_late(*arguments: Any) -> Any:
        if begun.is_set():
            return decode(*arguments)
        begun.set()
        assert released.wait(60)
        damaged = decode(*arguments)
        written.set()
        return damaged

    async def cancelled_and_fetched() -> HostWeights:
        late = asyncio.ensure_future(arriving.fetch(following))
        assert await asyncio.to_thread(begun.wait, 60)
        late.cancel()
        fetching = asyncio.ensure_future(arriving.fetch(own))
        await asyncio.wait([fetching], timeout=0.2)  # without the wait, it would end here
        released.set()
        await asyncio.gather(late, return_exceptions=True)
        assert await asyncio.to_thread(written.wait, 60)
        return await fetching

    monkeypatch.setattr(shard_streams, "_decode", once_late)
    assert bits(asyncio.run(cancelled_and_fetched())) == bits(weights_of(0))


@pytest.mark.parametrize("had", [None, 0, 1, 2, 3, 4, 5])
def test_a_replica_has_the_same_version_whatever_it_had(way: Way, had: int | None) -> None:
    versions, arriving = published_versions(way, 7), reader()
    if had is not None:
        fetch(arriving, versions[had])
    assert bits(fetch(arriving, versions[6])) == bits(weights_of(6))


def test_a_replica_that_has_skipped_versions_fetches_the_steps_since_its_own(open_way: Callable[[str], Way]) -> None:
    versions, arriving = published_versions(open_way("ObjectStore with changes"), 4), reader()
    fetch(arriving, versions[1])
    assert bits(fetch(arriving, versions[3])) == bits(weights_of(3))
    fetches = [step.buckets[0].place.fetches for step in versions[3].source.steps]
    assert fetches == [1, 1, 1, 1], "the first two for version 1, the others for version 3"


def test_changes_to_other_weights_of_the_same_number_are_refused_by_name(open_way: Callable[[str], Way]) -> None:
    """As if the trainer had been started again from an earlier checkpoint: the checksum of the result decides."""
    way, other, arriving = open_way(WITH_CHANGES[0]), open_way(WITH_CHANGES[0]), reader()
    weights = weights_of(0) | {"frozen": torch.zeros(600, dtype=torch.bfloat16)}
    before = fetch(arriving, other.publish(weights, 0))
    changes = published_versions(way, 2)[1]
    with pytest.raises(WeightsDamaged, match="version 1: checksum of frozen differs"):
        fetch(arriving, changes)
    assert bits(before) == bits(weights)
    assert bits(fetch(reader(), changes)) == bits(weights_of(1))


def test_damaged_changes_fail_by_the_name_of_their_tensor_and_the_version_before_stays(way: Way) -> None:
    arriving, versions = reader(), published_versions(way, 2)
    before = fetch(arriving, versions[0])
    assert way.damage(versions[1]) == "trained"
    with pytest.raises(WeightsDamaged, match="version 1: checksum of trained differs"):
        fetch(arriving, versions[1])
    assert bits(before) == bits(weights_of(0))
    assert bits(fetch(arriving, versions[0])) == bits(weights_of(0))


def test_weights_of_another_layout_are_published_whole(way: Way) -> None:
    arriving = reader()
    fetch(arriving, way.publish(weights_of(0), 0))
    more = weights_of(1) | {"added": torch.ones(3)}
    published = way.publish(more, 1, frozenset({0}))
    assert [step.base for step in published.source.steps] == [None]
    assert bits(fetch(arriving, published)) == bits(more)


def test_a_tensor_of_which_most_values_change_is_published_whole_among_the_changes(way: Way) -> None:
    way.publish(weights_of(0), 0)
    changed = weights_of(1) | {"frozen": -weights_of(1)["frozen"] - 1}
    published = way.publish(changed, 1, frozenset({0}))
    of_tensor = [(part.size, part.changes) for bucket in published.source.steps[-1].buckets for part in bucket.parts]
    assert of_tensor[1::2] == [(400, None)] * RANKS
    assert all(changes is not None for _, changes in of_tensor[0::2])
    assert bits(fetch(reader(), published)) == bits(changed)


def test_after_a_publication_that_failed_the_next_one_is_whole(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    way.publish(weights_of(0), 0)
    with monkeypatch.context() as patch:
        patch.setattr(shard_streams, "encoded_changes", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            way.publish(weights_of(1), 1)
    way.repair()
    published = way.publish(weights_of(2), 2)
    assert [step.base for step in published.source.steps] == [None]
    assert bits(fetch(reader(), published)) == bits(weights_of(2))


def test_a_machine_without_segments_applies_changes_in_the_memory_of_the_process(way: Way, monkeypatch) -> None:
    monkeypatch.setattr(segment, "IS_SUPPORTED", False)
    arriving = reader()
    for published in published_versions(way, 3):
        assert bits(fetch(arriving, published)) == bits(weights_of(published.manifest.version))


def test_a_bucket_that_is_larger_than_the_shard_of_a_rank_takes_only_the_memory_of_the_shard() -> None:
    values, stored = torch.arange(3200, dtype=torch.float32), list[bytes]()
    shards = [WeightShard(name, (3200,), torch.float32, 0, values) for name in ("first", "second")]

    def put(bucket: segment.Memory) -> FilePlace:
        stored.append(bucket.tobytes())
        return FilePlace("file", 0, bucket.size)

    tracemalloc.start()
    ShardStream(1, 65536 * 2**20).stage(shards, 0, put)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [len(bucket) for bucket in stored] == [2 * values.nbytes]
    assert peak < 2**20
