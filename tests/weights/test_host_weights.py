"""A version on the host of a replica: what arrives is what was published, or an error says what was damaged."""

import asyncio
import dataclasses
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.weights import host_weights
from qwen35_trainer.weights.fit import TensorKind, check_shapes, check_types, kinds, shapes
from qwen35_trainer.weights.host_weights import HostWeights, is_intact, verifiers
from qwen35_trainer.weights.published import joined
from qwen35_trainer.weights.segment import MappedSegments, MemorySegment, SegmentUnavailable
from qwen35_trainer.weights.staging import CHUNK_BYTES, PART_BYTES, layout_of, pieces
from qwen35_trainer.weights.transports import receiver, shared_memory
from qwen35_trainer.weights.transports.shared_memory import SharedMemorySender
from qwen35_trainer.weights.weight_manifest import WeightManifest, WeightsDamaged
from tests.patience import PATIENCE
from tests.publications import ALONE, received, same, whole_shards

WEIGHTS = {
    "embed": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "odd": torch.tensor([1.5, -2.5, 3.5], dtype=torch.bfloat16),
    "scalar": torch.tensor(7, dtype=torch.int64),
    "empty": torch.empty(0, 4),
    "view": torch.arange(6, dtype=torch.float32).reshape(2, 3).T,
}


def in_memory(weights: dict[str, torch.Tensor], version: int) -> tuple[WeightManifest, np.ndarray]:
    """The manifest and the bytes of a version."""
    shards = whole_shards(weights.items())
    layout = layout_of(shards)
    memory = np.zeros(layout.size, np.uint8)
    parts = []
    for piece in pieces(shards):
        begin = layout.tensors[piece.tensor].offset + piece.start
        parts.append(piece.write(memory[begin : begin + piece.size]))
    return WeightManifest(version, layout, tuple(parts)), memory


@pytest.mark.parametrize("values", [0, 1, CHUNK_BYTES // 4 - 1, CHUNK_BYTES // 4 + 1, PART_BYTES // 4 + 3])
def test_long_tensors_travel_in_chunks_and_parts(values: int) -> None:
    tensor = torch.arange(values, dtype=torch.float32)
    weights = received([("w", tensor)], version=1)
    assert len(weights.manifest.parts) == -(-values * 4 // PART_BYTES)
    assert same(weights.items(), [("w", tensor)])


def test_what_a_worker_process_gets_of_a_version_is_without_the_checksums() -> None:
    weights = received(WEIGHTS.items(), version=3)
    sent = pickle.loads(pickle.dumps(weights.shared))
    assert sent.manifest.parts == ()
    assert same(sent.open(MappedSegments()).items(), WEIGHTS.items())


def test_tensors_are_the_shared_memory_itself_aligned_for_vector_instructions() -> None:
    weights = received(WEIGHTS.items(), version=1)
    first = weights["embed"].data_ptr()
    for entry in weights.manifest.layout.tensors:
        assert entry.offset % 64 == 0
        assert entry.size == 0 or weights[entry.name].data_ptr() == first + entry.offset


def test_another_process_has_the_same_weights_from_a_handle_of_a_few_bytes() -> None:
    large = {"w": torch.arange(250_000, dtype=torch.float32)}
    weights = received(large.items(), version=4)
    handle = pickle.dumps(weights)
    assert len(handle) < 2000
    code = (
        "import pickle, sys\n"
        "weights = pickle.load(sys.stdin.buffer)\n"
        "weights.verify()\n"
        "again = pickle.loads(pickle.dumps(weights))\n"
        "print(weights.version, list(again), int(again['w'][-1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=handle, capture_output=True, timeout=PATIENCE, check=False
    )
    assert done.stdout == b"4 ['w'] 249999\n", done.stderr.decode()


def test_weights_in_the_memory_of_one_process_are_not_pickled() -> None:
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(HostWeights(*in_memory(WEIGHTS, 1)))


def test_a_later_version_in_the_same_memory_is_not_taken_for_the_earlier_one() -> None:
    sender = SharedMemorySender(ALONE)
    first, second = (
        joined([sender.stage(whole_shards(WEIGHTS.items()), version, frozenset())], version) for version in (1, 2)
    )
    assert first.source.name == second.source.name
    with pytest.raises(SegmentUnavailable, match="version 1 were replaced"):
        HostWeights.open(first.manifest, first.source)


def test_a_replica_maps_each_segment_once_because_mapping_takes_as_long_as_copying() -> None:
    sender, arriving = SharedMemorySender(ALONE), receiver()

    def address(version: int) -> int:
        published = joined([sender.stage(whole_shards(WEIGHTS.items()), version, frozenset({version - 1}))], version)
        return asyncio.run(arriving.fetch(published))["embed"].data_ptr()

    first, second, third, fourth = (address(version) for version in range(4))
    assert (first, second) == (third, fourth)
    assert first != second


@given(position=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_one_damaged_byte_of_any_tensor_is_found_by_name(position: int, flip: int) -> None:
    manifest, memory = in_memory(WEIGHTS, version=9)
    held = [(e.name, at) for e in manifest.layout.tensors for at in range(e.offset, e.offset + e.size)]
    name, at = held[position % len(held)]
    memory[at] ^= np.uint8(flip)
    with pytest.raises(WeightsDamaged, match=f"version 9: checksum of {name} differs"):
        HostWeights(manifest, memory).verify()


def test_all_damaged_tensors_are_named() -> None:
    manifest, memory = in_memory(WEIGHTS, version=9)
    for name in ("odd", "view"):
        [entry] = [entry for entry in manifest.layout.tensors if entry.name == name]
        memory[entry.offset] ^= 1
    for threads in (None, ThreadPoolExecutor(3)):
        with pytest.raises(WeightsDamaged, match="checksum of odd, view differs"):
            HostWeights(manifest, memory).verify(threads)


@pytest.mark.parametrize("threads_from", [1, 2**30])
def test_a_replica_verifies_a_large_version_on_several_threads(threads_from: int, monkeypatch) -> None:
    monkeypatch.setattr(shared_memory, "THREADS_FROM_BYTES", threads_from)
    used = set[str]()

    def recorded(part, data) -> bool:
        used.add(threading.current_thread().name.partition("_")[0])
        return is_intact(part, data)

    monkeypatch.setattr(host_weights, "is_intact", recorded)
    sender = SharedMemorySender(ALONE)
    published = joined([sender.stage(whole_shards(WEIGHTS.items()), 1, frozenset())], 1)
    assert same(asyncio.run(receiver().fetch(published)).items(), WEIGHTS.items())
    assert ("verify" in used) == (threads_from == 1)


def test_missing_bytes_are_found_by_name() -> None:
    manifest, memory = in_memory(WEIGHTS, version=9)
    with pytest.raises(WeightsDamaged, match="checksum of view differs"):
        HostWeights(manifest, memory[:-1]).verify()
    with pytest.raises(WeightsDamaged, match="view is missing"):
        HostWeights(dataclasses.replace(manifest, parts=manifest.parts[:-1]), memory).verify()


def test_kinds_of_a_version_are_known_without_its_values() -> None:
    weights = received(WEIGHTS.items(), version=1)
    assert kinds(weights) == kinds(WEIGHTS)
    assert shapes(weights) == {name: tuple(tensor.shape) for name, tensor in WEIGHTS.items()}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"odd": TensorKind((4,), "bfloat16")}, r"of another shape \['odd'\]"),
        ({"more": TensorKind((4,), "bfloat16")}, r"missing \['more'\]"),
    ],
)
def test_tensors_that_a_model_does_not_expect_are_named(change, problem) -> None:
    with pytest.raises(ValueError, match=problem):
        check_shapes(
            shapes(WEIGHTS) | {name: kind.shape for name, kind in change.items()},
            received(WEIGHTS.items(), 1),
            version=1,
        )


def test_tensors_that_are_not_floating_point_numbers_are_named() -> None:
    with pytest.raises(ValueError, match=r"no floating-point numbers \['scalar'\]"):
        check_types(received(WEIGHTS.items(), version=1), version=1)


def test_a_copy_for_which_there_is_no_holder_any_more_is_named() -> None:
    weights = received(WEIGHTS.items(), version=1)
    manifest, handle = weights.manifest, dataclasses.replace(weights.handle, holders=())
    assert MemorySegment.open(weights.handle).version == 1
    with pytest.raises(SegmentUnavailable, match="looked at none"):
        HostWeights.open(manifest, handle)


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (8, 4), (112, 16)])
def test_half_of_the_cores_verify_but_no_more_than_the_network_needs(cores: int, threads: int) -> None:
    assert verifiers(cores) == threads
