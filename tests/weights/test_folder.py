"""The transport through a folder: complete or absent, there for replicas and runs that start later, and deleted when nobody needs it."""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qwen35_trainer.weights import publication_folder
from qwen35_trainer.weights.publication_folder import PublicationGone, PublicationNotStored, complete_numbers, latest
from qwen35_trainer.weights.weight_manifest import WeightsDamaged
from tests.weights.ways import RANKS, WEIGHTS, Way, bits, fetch, reader


@pytest.fixture
def way(open_way: Callable[[str], Way]) -> Way:
    return open_way("Folder")


def numbered(version: int) -> dict[str, torch.Tensor]:
    """Weights whose every value is the number of their version."""
    return {name: torch.full_like(tensor, version) for name, tensor in WEIGHTS.items()}


def test_a_publication_remains_when_its_writers_have_ended(way: Way) -> None:
    published = way.publish(WEIGHTS, 3)
    way.close()
    newest = latest(way.folder)
    assert newest == published
    assert bits(fetch(reader(), newest)) == bits(WEIGHTS)


def test_each_rank_writes_its_own_rows(way: Way) -> None:
    way.publish(WEIGHTS, 3)
    files = sorted(path.name for path in way.folder.rglob("*.bin"))
    assert files == [f"rank-{rank:05d}.bin" for rank in range(RANKS)]
    assert way.file_bytes() < 2 * sum(tensor.nbytes for tensor in WEIGHTS.values()) + RANKS * 64 * len(WEIGHTS)


def test_a_run_that_starts_again_with_the_same_weights_writes_nothing(open_way: Callable[[str], Way]) -> None:
    first = open_way("Folder").publish(WEIGHTS, 3)
    again = open_way("Folder")
    times = {path: path.stat().st_mtime_ns for path in again.folder.rglob("*.bin")}
    assert again.publish(WEIGHTS, 3) == first
    assert {path: path.stat().st_mtime_ns for path in again.folder.rglob("*.bin")} == times
    assert bits(fetch(reader(), again.publish(numbered(4), 4, frozenset({3})))) == bits(numbered(4))
    assert complete_numbers(again.folder) == [1, 2]


@pytest.mark.parametrize(
    ("weights", "version"),
    [(numbered(3), 3), (WEIGHTS, 4), (WEIGHTS | {"more": torch.ones(2)}, 3)],
    ids=["other values", "another version", "another tensor"],
)
def test_a_run_that_starts_again_with_anything_else_publishes_it(open_way, weights, version: int) -> None:
    open_way("Folder").publish(WEIGHTS, 3)
    published = open_way("Folder").publish(weights, version)
    assert published.source.number == 2
    assert bits(fetch(reader(), published)) == bits(weights)


@pytest.mark.parametrize("name", ["Folder", "Folder with changes"])
def test_a_publication_that_is_not_completed_is_never_read(
    open_way, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The disk is full at each point where files are flushed: of each rank, of the manifest, and of the folders."""
    way = open_way(name)
    way.publish(numbered(0), 0)
    failed = 0
    for point in range(100):
        flushes = iter(range(100))

        def flush(descriptor: int, point: int = point, flushes=flushes, fsync=os.fsync) -> None:
            if next(flushes) == point:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            fsync(descriptor)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", flush)
            try:
                way.publish(numbered(point + 1), point + 1, frozenset({0}))
            except PublicationNotStored as error:
                failed += 1
                assert "No space left on device" in str(error)  # noqa: PT017
                assert str(way.folder) in str(error)  # noqa: PT017
            else:
                break
        way.repair()
        newest = latest(way.folder)
        assert newest.manifest.version in (0, point + 1)
        assert bits(fetch(reader(), newest)) == bits(numbered(newest.manifest.version))
    assert failed == RANKS + 3
    assert bits(fetch(reader(), latest(way.folder))) == bits(numbered(failed + 1))
    assert not list(way.folder.glob(".*"))


def test_what_a_killed_writer_left_is_not_read_and_is_removed(way: Way) -> None:
    way.publish(numbered(1), 1)
    partial = publication_folder.begin(way.folder)
    (partial / "rank-00000.bin").write_bytes(b"half")
    assert latest(way.folder).manifest.version == 1
    way.publish(numbered(2), 2)
    assert not partial.exists()


def test_the_last_two_publications_and_those_that_the_driver_needs_are_kept(way: Way) -> None:
    for version in range(1, 6):
        way.publish(numbered(version), version, frozenset({version - 1}))
    assert complete_numbers(way.folder) == [4, 5]
    for version in range(6, 9):
        way.publish(numbered(version), version, frozenset({4}))
    assert complete_numbers(way.folder) == [4, 5, 6, 7, 8]
    way.publish(numbered(9), 9, frozenset())
    assert complete_numbers(way.folder) == [8, 9]


def test_changes_are_kept_with_the_whole_version_that_they_need(open_way: Callable[[str], Way]) -> None:
    way = open_way("Folder with changes")
    kept = []
    for version in range(1, 9):
        way.publish(numbered(version), version)
        kept.append(complete_numbers(way.folder))
        assert bits(fetch(reader(), latest(way.folder))) == bits(numbered(version))
    assert kept == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5], [5, 6], [5, 6, 7], [5, 6, 7, 8]]


def test_a_publication_is_not_deleted_while_it_is_read_until_its_reader_is_taken_for_lost(way: Way) -> None:
    first = way.publish(numbered(1), 1)
    mark = publication_folder.mark_reader(way.folder, first.source.number)
    for version in range(2, 5):
        way.publish(numbered(version), version)
    assert complete_numbers(way.folder) == [1, 2, 3, 4]
    long_ago = time.time() - publication_folder.MAX_READ_SECONDS - 1
    os.utime(mark, (long_ago, long_ago))
    way.publish(numbered(5), 5)
    assert complete_numbers(way.folder) == [4, 5]
    with pytest.raises(PublicationGone, match=r"version 1 are not in .* any more: .*publication-000001.* is missing"):
        fetch(reader(), first)


def test_a_reader_leaves_a_mark_while_it_reads(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    published = way.publish(WEIGHTS, 1)
    readers = way.folder / "publication-000001" / "readers"
    seen = []
    original = publication_folder.Path.open

    def open_file(path: Path, *arguments, **options):
        seen.append(len(list(readers.iterdir())))
        return original(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", open_file)
    fetch(reader(), published)
    assert set(seen) == {1}
    assert not list(readers.iterdir())


def test_of_two_attempts_that_publish_into_one_folder_one_ends(open_way: Callable[[str], Way]) -> None:
    old, new = open_way("Folder"), open_way("Folder")
    old.publish(numbered(1), 1)
    new.publish(numbered(2), 2)
    with pytest.raises(PublicationNotStored, match="publication-000002 exists: another process publishes"):
        old.publish(numbered(3), 3)
    assert latest(new.folder).manifest.version == 2
    new.publish(numbered(3), 3)
    assert bits(fetch(reader(), latest(new.folder))) == bits(numbered(3))


def test_a_publication_with_a_damaged_manifest_file_is_named_and_skipped(way: Way, caplog) -> None:
    for version in (1, 2):
        way.publish(numbered(version), version)
    path = way.folder / "publication-000002" / "manifest.json"
    path.write_text(path.read_text().replace('"version": 2', '"version": 3'))
    assert latest(way.folder).manifest.version == 1
    assert f"{path} is damaged" in caplog.text


def test_a_run_publishes_again_what_is_damaged_and_deletes_it_like_any_other(open_way: Callable[[str], Way]) -> None:
    way = open_way("Folder")
    way.publish(numbered(0), 0)
    way.publish(WEIGHTS, 1)
    (way.folder / "publication-000002" / "manifest.json").write_text("{")
    again = open_way("Folder")
    assert bits(fetch(reader(), again.publish(WEIGHTS, 1))) == bits(WEIGHTS)
    assert complete_numbers(way.folder) == [2, 3]
    again.publish(numbered(2), 2)
    assert complete_numbers(way.folder) == [3, 4]


def test_a_publication_that_is_used_again_although_a_newer_one_is_damaged_is_followed_by_a_new_number(open_way) -> None:
    way = open_way("Folder")
    way.publish(WEIGHTS, 1)
    way.publish(numbered(2), 2)
    (way.folder / "publication-000002" / "manifest.json").write_text("{")
    again = open_way("Folder")
    assert again.publish(WEIGHTS, 1).source.number == 1
    assert bits(fetch(reader(), again.publish(numbered(2), 2))) == bits(numbered(2))
    assert complete_numbers(way.folder) == [2, 3]


def test_a_mark_that_its_reader_removes_meanwhile_does_not_count(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    way.publish(numbered(1), 1)
    original = Path.iterdir

    def listed(path: Path):
        return iter([path / "removed"]) if path.name == "readers" else original(path)

    monkeypatch.setattr(Path, "iterdir", listed)
    for version in (2, 3):
        way.publish(numbered(version), version)
    assert complete_numbers(way.folder) == [2, 3]


def test_a_file_that_is_too_short_fails_by_the_names_of_its_tensors(way: Way) -> None:
    published = way.publish(WEIGHTS, 1)
    path = way.folder / "publication-000001" / "rank-00002.bin"
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(WeightsDamaged, match="checksum of matrix differs"):
        fetch(reader(), published)
