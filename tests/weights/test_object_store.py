"""The transport through Ray's object store: buckets, and the memory of a replica. What all transports share is in `test_transports`."""

import dataclasses

import pytest
import torch

from qwen35_trainer.weights import segment
from qwen35_trainer.weights.published import StoredBuckets
from qwen35_trainer.weights.weight_manifest import WeightsDamaged
from tests.publications import same
from tests.weights import ways
from tests.weights.ways import RANKS, WEIGHTS, Way, fetch, reader


@pytest.fixture
def stored(open_way, monkeypatch) -> Way:
    """The transport, with buckets of 128 bytes."""
    monkeypatch.setattr(ways, "BUCKET_BYTES", 128)
    return open_way("ObjectStore")


def sizes(published) -> list[int]:
    """Bytes of each bucket that a replica has fetched once."""
    references = [bucket.place for bucket in published.source.steps[0].buckets]
    assert all(reference.fetches == 1 for reference in references)
    return [reference.data.size for reference in references]


def test_each_rank_puts_its_own_rows_and_a_replica_fetches_each_bucket_once(stored: Way) -> None:
    published = stored.publish(WEIGHTS, 3)
    fetch(reader(), published)
    assert len(sizes(published)) == 4, "two of rank 0, and one of each other rank"
    assert max(sizes(published)) <= 128


def test_no_bucket_is_larger_than_its_limit_and_each_is_full_before_the_next(stored: Way) -> None:
    many = {str(number): torch.full((3, 16), float(number)) for number in range(5)}  # 64 bytes on each rank
    published = stored.publish(many, 1)
    assert same(fetch(reader(), published).items(), many.items())
    assert sizes(published) == [128, 128, 64] * RANKS


def test_the_memory_of_a_version_is_used_again_when_nobody_holds_it(stored: Way) -> None:
    arriving = reader()
    first, second = (fetch(arriving, stored.publish(WEIGHTS, version)) for version in (1, 2))
    name = first.handle.name
    assert second.handle.name != name
    del first
    assert fetch(arriving, stored.publish(WEIGHTS, 3)).handle.name == name


@pytest.mark.parametrize(
    ("buckets", "problem"),
    [
        (lambda all_: all_[:-1], "the buckets of version 2 hold 5 of 6 parts"),
        (lambda all_: all_[::-1], "checksum of .*matrix"),
    ],
)
def test_missing_and_exchanged_buckets_are_found(stored: Way, buckets, problem) -> None:
    published = stored.publish(WEIGHTS, 2)
    assert isinstance(published.source, StoredBuckets)
    [step] = published.source.steps
    rearranged = dataclasses.replace(step, buckets=buckets(step.buckets))
    changed = dataclasses.replace(published, source=dataclasses.replace(published.source, steps=(rearranged,)))
    with pytest.raises(WeightsDamaged, match=problem):
        fetch(reader(), changed)


def test_a_machine_without_segments_receives_into_the_memory_of_the_process(stored: Way, monkeypatch) -> None:
    monkeypatch.setattr(segment, "IS_SUPPORTED", False)
    assert same(fetch(reader(), stored.publish(WEIGHTS, 1)).items(), WEIGHTS.items())
