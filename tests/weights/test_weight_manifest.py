"""The layout of a version, and which parts are refused: what is missing or doubled is named."""

import dataclasses
import pickle
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.weights.published import StagedShard, StoredBuckets, VersionStep, WeightBucket, joined
from qwen35_trainer.weights.segment import SegmentHandle
from qwen35_trainer.weights.weight_manifest import TensorPart, WeightLayout, WeightManifest, WeightsDamaged

LAYOUT = WeightLayout.of([("a", (3, 4), "float32"), ("empty", (0, 4), "bfloat16"), ("b", (5,), "bfloat16")])
PARTS = (TensorPart(0, 0, 32, 1), TensorPart(0, 32, 16, 2), TensorPart(2, 0, 10, 3))


def test_tensors_follow_one_another_from_multiples_of_a_cache_line() -> None:
    assert [(entry.name, entry.offset, entry.size) for entry in LAYOUT.tensors] == [
        ("a", 0, 48),
        ("empty", 64, 0),
        ("b", 64, 10),
    ]
    assert LAYOUT.size == 74


def test_a_tensor_that_is_published_twice_is_named() -> None:
    with pytest.raises(WeightsDamaged, match="contain twice, wrong more than once"):
        WeightLayout.of((name, (1,), "float32") for name in ("twice", "once", "twice", "wrong", "wrong"))


def test_a_type_that_cannot_be_published_is_named() -> None:
    with pytest.raises(ValueError, match="w is of type complex64"):
        WeightLayout.of([("w", (1,), "complex64")])


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        (PARTS[:2], "b is missing"),
        (PARTS[1:], "a lacks bytes 0 to 32 of 48"),
        ((PARTS[0], PARTS[2]), "a lacks bytes 32 to 48 of 48"),
        ((*PARTS, PARTS[2]), "b was written twice from byte 0 of 10"),
        ((*PARTS, TensorPart(0, 40, 4, 0)), "a was written twice from byte 40 of 48"),
        ((*PARTS[:2], TensorPart(2, 0, 12, 3)), "b has 12 bytes, expected 10"),
        ((*PARTS, TensorPart(3, 0, 4, 0)), r"parts of tensors \[3\], which the layout does not have"),
        ((), "a is missing; b is missing"),
    ],
)
def test_what_is_missing_or_doubled_is_named(parts, problem) -> None:
    with pytest.raises(WeightsDamaged, match=f"version 7: {problem}"):
        WeightManifest(7, LAYOUT, parts).check_complete()


@given(st.lists(st.integers(1, 47), unique=True), st.randoms(use_true_random=False))
def test_a_tensor_in_any_number_of_parts_in_any_order_is_complete(cuts, random) -> None:
    ends = [0, *sorted(cuts), 48]
    parts = [TensorPart(0, start, end - start, 0) for start, end in pairwise(ends)]
    parts.append(PARTS[2])
    random.shuffle(parts)
    WeightManifest(1, LAYOUT, tuple(parts)).check_complete()


def test_a_manifest_is_pickled_once_for_all_replicas(monkeypatch) -> None:
    """With the 200,000 parts of a large model, doing so for each replica would hold up the driver for many seconds."""
    manifest = WeightManifest(3, LAYOUT, PARTS)
    pickling: list[object] = []
    dumps = pickle.dumps
    monkeypatch.setattr(pickle, "dumps", lambda value, *more: (pickling.append(value), dumps(value, *more))[1])
    messages = [dumps(("for replica", number, manifest)) for number in range(3)]
    assert len(pickling) == 1
    assert [pickle.loads(message)[2] for message in messages] == [manifest] * 3
    assert pickle.loads(dumps(pickle.loads(messages[0])[2])) == manifest, "a replica sends it to its other nodes"
    other = dataclasses.replace(manifest, parts=PARTS[:2])
    assert pickle.loads(dumps(other)) == other


def staged(rank: int, parts: tuple[TensorPart, ...], layout: WeightLayout = LAYOUT) -> StagedShard:
    handle = SegmentHandle("weights", 74, ((100 + rank, 7), (100, 7)))
    return StagedShard(layout if rank == 0 else None, layout.checksum, parts, handle)


def test_the_parts_of_all_ranks_make_a_version_that_any_rank_can_give() -> None:
    published = joined([staged(0, PARTS[:1]), staged(1, PARTS[1:])], version=3)
    assert published.manifest == WeightManifest(3, LAYOUT, PARTS)
    assert published.source == SegmentHandle("weights", 74, ((100, 7), (101, 7)))


def test_a_rank_that_copied_nothing_fails_the_publication_by_the_names_of_its_tensors() -> None:
    with pytest.raises(WeightsDamaged, match=r"version 3: a lacks bytes 32 to 48 of 48; b is missing"):
        joined([staged(0, PARTS[:1]), staged(1, ())], version=3)


def test_ranks_that_disagree_about_a_type_are_named() -> None:
    other = WeightLayout.of((e.name, e.shape, "float32") for e in LAYOUT.tensors)
    with pytest.raises(WeightsDamaged, match=r"ranks \[1\] have other names, shapes or types than rank 0"):
        joined([staged(0, PARTS[:1]), staged(1, PARTS[1:], other)], version=3)


def stored(*places: str) -> StoredBuckets:
    return StoredBuckets(
        (VersionStep(1, None, tuple(WeightBucket(place, ()) for place in places)),), changes_follow=False
    )


def test_buckets_of_all_ranks_are_in_the_order_of_ranks() -> None:
    shards = [
        dataclasses.replace(staged(rank, parts), source=stored(f"bucket {rank}"))
        for rank, parts in enumerate((PARTS[:1], PARTS[1:]))
    ]
    assert joined(shards, version=1).source == stored("bucket 0", "bucket 1")
