"""A version of the weights as bytes: what arrives is what was packed, or an error says what was damaged."""

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.weights import weight_buckets
from qwen35_trainer.weights.weight_buckets import Bucket, WeightsDamaged, pack, shapes, unpack
from qwen35_trainer.weights.weight_manifest import WeightManifest

WEIGHTS = {
    "embed": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "odd": torch.tensor([1.5, -2.5, 3.5], dtype=torch.bfloat16),
    "scalar": torch.tensor(7, dtype=torch.int64),
    "empty": torch.empty(0, 4),
    "view": torch.arange(6, dtype=torch.float32).reshape(2, 3).T,
}


def packed(weights: Mapping[str, torch.Tensor], version: int) -> tuple[WeightManifest, list[Bucket]]:
    manifest, buckets = pack(weights.items(), version, np.copy)
    return manifest, list(buckets)


def same(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    return list(left) == list(right) and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def test_what_is_packed_is_unpacked_in_every_dtype_and_shape() -> None:
    manifest, buckets = packed(WEIGHTS, version=3)
    assert manifest.version == 3
    assert len(buckets) == 1
    assert same(unpack(manifest, buckets), WEIGHTS)


def test_read_only_buckets_of_shared_memory_are_taken_as_they_are() -> None:
    manifest, buckets = packed(WEIGHTS, version=1)
    for bucket in buckets:
        bucket.flags.writeable = False
    assert same(unpack(manifest, buckets), WEIGHTS)


@pytest.mark.parametrize(("limit", "buckets"), [(1, 5), (48, 4), (70, 3), (150, 2), (216, 1), (1000, 1)])
def test_a_bucket_is_closed_before_it_passes_its_size(
    limit: int, buckets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_buckets, "BUCKET_BYTES", limit)
    manifest, stored = packed(WEIGHTS, version=1)
    assert len(stored) == buckets
    assert all(bucket.size <= max(limit, 48) for bucket in stored)  # 48 bytes is the largest tensor
    assert same(unpack(manifest, stored), WEIGHTS)


def test_a_bucket_is_stored_before_the_tensors_of_the_next_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_buckets, "BUCKET_BYTES", 128)
    sizes = {"a": 16, "b": 16, "c": 16, "larger": 36, "d": 1}
    tensors = {name: torch.arange(size, dtype=torch.float32) + size for name, size in sizes.items()}
    seen: list[str] = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors.items():
            seen.append(name)
            yield name, tensor

    def store(bucket: Bucket) -> Bucket:
        seen.append(f"{bucket.size} bytes")
        return bucket.copy()

    manifest, buckets = pack(weights(), 1, store)
    # A bucket is full when the next tensor has been read and does not fit.
    assert seen == ["a", "b", "c", "128 bytes", "larger", "64 bytes", "144 bytes", "d", "4 bytes"]
    assert same(unpack(manifest, buckets), tensors)


def test_shapes_of_a_version_are_known_without_its_values() -> None:
    manifest, buckets = packed(WEIGHTS, version=1)
    unpacked = unpack(manifest, buckets)
    buckets.clear()
    assert shapes(unpacked) == shapes(WEIGHTS) == {name: tuple(tensor.shape) for name, tensor in WEIGHTS.items()}


def test_the_copy_stays_when_the_live_weights_change() -> None:
    live = {"w": torch.ones(4)}
    manifest, buckets = packed(live, version=1)
    live["w"].zero_()
    assert torch.equal(unpack(manifest, buckets)["w"], torch.ones(4))


def test_unpacked_tensors_are_the_memory_of_their_bucket_aligned_for_vector_instructions() -> None:
    manifest, [bucket] = packed(WEIGHTS, version=1)
    held = range(bucket.ctypes.data, bucket.ctypes.data + bucket.size)
    for entry, tensor in zip(manifest.tensors, unpack(manifest, [bucket]).values(), strict=True):
        assert entry.offset % 64 == 0
        assert tensor.numel() == 0 or tensor.data_ptr() == held[entry.offset]


def test_unpacked_tensors_outlive_what_unpacked_them() -> None:
    manifest, buckets = packed(WEIGHTS, version=1)
    tensors = dict(unpack(manifest, buckets))
    buckets.clear()
    assert same(tensors, WEIGHTS)


@given(position=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_one_damaged_byte_of_any_tensor_is_found(position: int, flip: int) -> None:
    manifest, buckets = packed(WEIGHTS, version=9)
    damaged = buckets[0].copy()
    held = [at for entry in manifest.tensors for at in range(entry.offset, entry.offset + entry.size)]
    damaged[held[position % len(held)]] ^= np.uint8(flip)
    with pytest.raises(WeightsDamaged, match=r"version 9: checksum of \w+ differs"):
        unpack(manifest, [damaged])


@pytest.mark.parametrize("cut", [lambda buckets: [], lambda buckets: [buckets[0][:-1]], lambda buckets: buckets * 2])
def test_missing_and_cut_buckets_are_found(cut) -> None:
    manifest, buckets = packed(WEIGHTS, version=9)
    with pytest.raises(WeightsDamaged, match="version 9: buckets of"):
        unpack(manifest, cut(buckets))


def test_a_manifest_that_was_changed_is_found() -> None:
    manifest, buckets = packed(WEIGHTS, version=9)
    first = dataclasses.replace(manifest.tensors[0], checksum=manifest.tensors[0].checksum ^ 1)
    with pytest.raises(WeightsDamaged, match="checksum of embed"):
        unpack(dataclasses.replace(manifest, tensors=(first, *manifest.tensors[1:])), buckets)
