"""A version of the weights as bytes: what arrives is what was packed, or an error says what was damaged."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.weights import snapshot
from qwen35_trainer.weights.snapshot import WeightsDamaged, pack, unpack

WEIGHTS = {
    "embed": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "odd": torch.tensor([1.5, -2.5, 3.5], dtype=torch.bfloat16),
    "scalar": torch.tensor(7, dtype=torch.int64),
    "empty": torch.empty(0, 4),
    "view": torch.arange(6, dtype=torch.float32).reshape(2, 3).T,
}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return list(left) == list(right) and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def test_what_is_packed_is_unpacked_in_every_dtype_and_shape() -> None:
    manifest, buckets = pack(WEIGHTS, version=3)
    assert manifest.version == 3
    assert len(buckets) == 1
    assert same(unpack(manifest, buckets), WEIGHTS)


def test_read_only_buckets_of_shared_memory_are_taken_as_they_are() -> None:
    manifest, buckets = pack(WEIGHTS, version=1)
    for bucket in buckets:
        bucket.flags.writeable = False
    assert same(unpack(manifest, buckets), WEIGHTS)


@pytest.mark.parametrize(("limit", "buckets"), [(1, 5), (48, 2), (60, 2), (85, 2), (86, 1), (1000, 1)])
def test_a_bucket_is_closed_before_it_passes_its_size(
    limit: int, buckets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "BUCKET_BYTES", limit)
    manifest, packed = pack(WEIGHTS, version=1)
    assert len(packed) == buckets
    assert all(bucket.size <= max(limit, 48) for bucket in packed)  # 48 bytes is the largest tensor
    assert same(unpack(manifest, packed), WEIGHTS)


def test_the_copy_stays_when_the_live_weights_change() -> None:
    live = {"w": torch.ones(4)}
    manifest, buckets = pack(live, version=1)
    live["w"].zero_()
    assert torch.equal(unpack(manifest, buckets)["w"], torch.ones(4))


def test_unpacked_tensors_have_memory_of_their_own() -> None:
    """Buckets are shared by all replicas of a node."""
    manifest, buckets = pack(WEIGHTS, version=1)
    for tensor in unpack(manifest, buckets).values():
        tensor.zero_()
    assert same(unpack(manifest, buckets), WEIGHTS)


@given(position=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_one_damaged_byte_anywhere_is_found(position: int, flip: int) -> None:
    manifest, buckets = pack(WEIGHTS, version=9)
    damaged = buckets[0].copy()
    damaged[position % damaged.size] ^= np.uint8(flip)
    with pytest.raises(WeightsDamaged, match=r"version 9: checksum of \w+ differs"):
        unpack(manifest, [damaged])


@pytest.mark.parametrize("cut", [lambda buckets: [], lambda buckets: [buckets[0][:-1]], lambda buckets: buckets * 2])
def test_missing_and_cut_buckets_are_found(cut) -> None:
    manifest, buckets = pack(WEIGHTS, version=9)
    with pytest.raises(WeightsDamaged, match="version 9: buckets of"):
        unpack(manifest, cut(buckets))


def test_a_manifest_that_was_changed_is_found() -> None:
    manifest, buckets = pack(WEIGHTS, version=9)
    first = dataclasses.replace(manifest.tensors[0], checksum=manifest.tensors[0].checksum ^ 1)
    with pytest.raises(WeightsDamaged, match="checksum of embed"):
        unpack(dataclasses.replace(manifest, tensors=(first, *manifest.tensors[1:])), buckets)
