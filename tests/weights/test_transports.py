"""What every transport guarantees: a replica has the published version bit for bit, or an error names what is wrong.

`ways.py` sets each transport up, with three writers and any number of readers.
"""

import asyncio
import dataclasses
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from qwen35_trainer.weights.host_weights import HostWeights
from qwen35_trainer.weights.publication_folder import PublicationGone
from qwen35_trainer.weights.published import PublishedWeights
from qwen35_trainer.weights.segment import SegmentUnavailable
from qwen35_trainer.weights.transfer_agent import SourceLost
from qwen35_trainer.weights.weight_manifest import TensorPart, WeightManifest, WeightsDamaged
from tests.patience import PATIENCE
from tests.weights.ways import AVAILABLE, WEIGHTS, Way, bits, fetch, reader

VERSIONS = 20


def numbered(version: int) -> dict[str, torch.Tensor]:
    """Weights whose every value is the number of their version."""
    return {name: torch.full_like(tensor, version) for name, tensor in WEIGHTS.items()}


def test_every_bit_arrives_in_the_type_that_is_published(way: Way) -> None:
    random = torch.Generator().manual_seed(1)
    patterns = torch.randint(-(2**15), 2**15, (9, 31), generator=random, dtype=torch.int16)
    live = WEIGHTS | {"not only numbers": patterns.view(torch.bfloat16), "master": torch.randn(50, 3)}
    published = way.publish(live, 3, types={"master": torch.bfloat16})
    weights = fetch(reader(), published)
    assert weights.version == 3
    assert bits(weights) == bits(live | {"master": live["master"].to(torch.bfloat16)})


def missing(manifest: WeightManifest) -> WeightManifest:
    parts = tuple(part for part in manifest.parts if manifest.layout.tensors[part.tensor].name != "vector")
    return dataclasses.replace(manifest, parts=parts)


def extra(manifest: WeightManifest) -> WeightManifest:
    return dataclasses.replace(manifest, parts=(*manifest.parts, TensorPart(len(WEIGHTS), 0, 4, 0)))


def doubled(manifest: WeightManifest) -> WeightManifest:
    [first, *_] = [part for part in manifest.parts if manifest.layout.tensors[part.tensor].name == "vector"]
    return dataclasses.replace(manifest, parts=(*manifest.parts, first))


def misshapen(manifest: WeightManifest) -> WeightManifest:
    tensors = tuple(
        dataclasses.replace(entry, shape=(7, 6)) if entry.name == "matrix" else entry
        for entry in manifest.layout.tensors
    )
    return dataclasses.replace(manifest, layout=dataclasses.replace(manifest.layout, tensors=tensors))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (missing, "vector is missing"),
        (extra, r"parts of tensors \[4\], which the layout does not have"),
        (doubled, "vector was written twice from byte 0 of 4"),
        (misshapen, "matrix lacks bytes 140 to 168 of 168"),
    ],
)
def test_a_wrong_tensor_fails_by_name_and_the_version_before_stays(
    way: Way, change: Callable[[WeightManifest], WeightManifest], problem: str
) -> None:
    arriving = reader()
    before = fetch(arriving, way.publish(WEIGHTS, 1))
    published = way.publish(numbered(2), 2, frozenset({1}))
    with pytest.raises(WeightsDamaged, match=f"version 2: {problem}"):
        fetch(arriving, dataclasses.replace(published, manifest=change(published.manifest)))
    assert bits(before) == bits(WEIGHTS)
    assert bits(fetch(arriving, published)) == bits(numbered(2)), "the reader works on"


def test_a_damaged_byte_fails_by_the_name_of_its_tensor_and_the_version_before_stays(way: Way) -> None:
    arriving = reader()
    before = fetch(arriving, way.publish(WEIGHTS, 1))
    published = way.publish(numbered(2), 2, frozenset({1}))
    name = way.damage(published)
    with pytest.raises(WeightsDamaged, match=f"version 2: checksum of {name} differs"):
        fetch(arriving, published)
    assert bits(before) == bits(WEIGHTS)
    assert bits(fetch(arriving, way.publish(numbered(3), 3, frozenset({1})))) == bits(numbered(3))


def test_parameters_that_change_during_a_pull_are_never_visible(way: Way) -> None:
    """The optimizer steps while a replica pulls, and before a late one does: both have what was published."""
    live = {str(number): torch.nn.Parameter(torch.zeros(150)) for number in range(20)}
    optimizer = torch.optim.SGD(live.values(), lr=1.0)
    arriving, late = reader(), reader()

    def step() -> None:
        for parameter in live.values():
            parameter.grad = torch.full_like(parameter, -1.0)
        optimizer.step()

    async def pull_while_training(published: PublishedWeights) -> HostWeights:
        pull = asyncio.ensure_future(arriving.fetch(published))
        step()
        while not pull.done():
            await asyncio.sleep(0)
            step()
        return await pull

    engine, previous = None, 0
    for version in range(5):
        expected = int(live["0"][0])
        published = way.publish(live, version, frozenset({version - 1, version - 2}))
        pulled = asyncio.run(pull_while_training(published))
        assert engine is None or all_are(engine, previous), "the version in service changed"
        engine, previous = pulled, expected
        assert all_are(engine, expected)
        assert all_are(fetch(late, published), expected)


def all_are(weights: Mapping[str, torch.Tensor], value: int) -> bool:
    """Whether all values are equal to `value`."""
    return all(bool((tensor == value).all()) for tensor in weights.values())


def test_a_late_reader_has_its_version_while_it_is_needed_and_never_another(way: Way) -> None:
    arriving = reader()
    first = way.publish(numbered(1), 1)
    for version in (2, 3, 4):
        latest = way.publish(numbered(version), version, frozenset({1, version - 1}))
    assert bits(fetch(arriving, first)) == bits(numbered(1))
    assert bits(fetch(arriving, latest)) == bits(numbered(4))
    for version in range(5, 9):
        way.publish(numbered(version), version, frozenset({version - 1}))
    try:
        weights = fetch(reader(), first)
    except (SegmentUnavailable, PublicationGone, WeightsDamaged, SourceLost) as gone:
        assert "version 1" in str(gone)  # noqa: PT017  # the other outcome is as good
    else:
        assert bits(weights) == bits(numbered(1))


def test_readers_at_different_paces_keep_the_version_that_each_holds(way: Way) -> None:
    fast, slow = reader(), reader()
    held = fetch(slow, way.publish(numbered(1), 1))
    for version in range(2, 6):
        published = way.publish(numbered(version), version, frozenset({version - 1}))
        assert bits(fetch(fast, published)) == bits(numbered(version))
        assert bits(held) == bits(numbered(1))
    assert bits(fetch(slow, published)) == bits(numbered(5))


def test_a_pull_that_is_cancelled_leaves_the_reader_able_to_fetch_the_next_version(way: Way) -> None:
    arriving = reader()
    before = fetch(arriving, way.publish(numbered(1), 1))

    async def cancel(published):
        pull = asyncio.ensure_future(arriving.fetch(published))
        await asyncio.sleep(0)
        pull.cancel()
        await asyncio.gather(pull, return_exceptions=True)

    asyncio.run(cancel(way.publish(numbered(2), 2, frozenset({1}))))
    assert bits(before) == bits(numbered(1))
    assert bits(fetch(arriving, way.publish(numbered(3), 3, frozenset({1})))) == bits(numbered(3))


def test_nothing_grows_over_twenty_versions_and_all_memory_is_freed_at_the_end(way: Way) -> None:
    arriving, stored, files, held = reader(), [], [], None
    for version in range(VERSIONS):
        published = way.publish(numbered(version), version, frozenset({version - 1}))
        held = fetch(arriving, published)
        stored.append(way.memory_bytes() + way.file_bytes())
        files.append(len(list(Path("/proc/self/fd").iterdir())))
    assert bits(held) == bits(numbered(VERSIONS - 1))
    assert max(stored[8:]) <= max(stored[:8])
    # What leaks a file with every version is above the first eight from then on; another thread may have a file open for a moment.
    assert min(files[8:]) <= max(files[:8])
    way.close()
    del arriving, published, held
    assert way.memory_bytes() == 0


def test_a_reader_that_is_killed_holds_nothing_any_more(open_way: Callable[[str], Way]) -> None:
    """One process reads from every transport, and is killed while it holds a version of each."""
    opened = [open_way(name) for name in AVAILABLE]
    usual = usual_bytes(opened)
    with subprocess.Popen(
        [sys.executable, "-m", "tests.weights.reader"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for way in opened:
            pickle.dump(way.publish(numbered(5), 5, frozenset({4})), process.stdin)
            process.stdin.flush()
            assert process.stdout.readline() == b"5\n", way.name
        process.kill()
        process.wait(PATIENCE)
    assert usual_bytes(opened) <= usual


def usual_bytes(opened: list[Way]) -> int:
    """Publish five versions by each transport, and return the bytes that all of them hold then."""
    for way in opened:
        for version in range(5):
            way.publish(numbered(version), version, frozenset({version - 1}))
    return opened[0].memory_bytes() + sum(way.file_bytes() for way in opened)
