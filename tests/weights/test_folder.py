"""The transport through a folder: complete or absent, there for replicas and runs that start later, and deleted when nobody needs it."""

import errno
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import xxhash

from qwen35_trainer.weights import publication_folder
from qwen35_trainer.weights.publication_folder import (
    PublicationFolderMissing,
    PublicationGone,
    PublicationNotStored,
    complete_numbers,
    latest,
)
from qwen35_trainer.weights.weight_manifest import WeightsDamaged
from tests.weights.ways import RANKS, WEIGHTS, Way, bits, fetch, reader


@pytest.fixture
def way(open_way: Callable[[str], Way]) -> Way:
    return open_way("Folder")


def numbered(version: int) -> dict[str, torch.Tensor]:
    """Weights whose every value is the number of their version."""
    return {name: torch.full_like(tensor, version) for name, tensor in WEIGHTS.items()}


def changed(version: int) -> dict[str, torch.Tensor]:
    """Weights of which one value of the matrix, which rank 1 publishes, depends on the version."""
    matrix = WEIGHTS["matrix"].clone()
    matrix[3, 2] = version
    return WEIGHTS | {"matrix": matrix}


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


def test_what_a_killed_writer_left_is_not_read_and_is_removed_by_the_next_attempt(open_way) -> None:
    way = open_way("Folder")
    way.publish(numbered(1), 1)
    partial = publication_folder.begin(way.folder)
    (partial / "rank-00000.bin").write_bytes(b"half")
    half_deleted = way.folder / ".deleted-0"
    half_deleted.mkdir()
    assert latest(way.folder).manifest.version == 1
    open_way("Folder").publish(numbered(2), 2)
    assert sorted(path.name for path in way.folder.iterdir()) == ["publication-000001", "publication-000002"]


def test_an_attempt_leaves_alone_what_a_later_one_is_writing(open_way) -> None:
    old = open_way("Folder")
    old.publish(numbered(1), 1)
    partial = publication_folder.begin(old.folder)
    old.publish(numbered(2), 2)
    assert partial.exists()


@pytest.mark.parametrize("loss", ["deleted", "emptied"])
def test_a_publication_whose_files_another_process_took_is_not_completed(way: Way, monkeypatch, loss: str) -> None:
    way.publish(numbered(1), 1)
    original = publication_folder.complete

    def complete(partial: Path, *arguments) -> None:
        path = partial / "rank-00002.bin"
        path.unlink() if loss == "deleted" else os.truncate(path, 0)
        original(partial, *arguments)

    monkeypatch.setattr(publication_folder, "complete", complete)
    with pytest.raises(PublicationNotStored, match=r"rank-00002\.bin .*another process publishes into this folder"):
        way.publish(numbered(2), 2)
    assert [path.name for path in way.folder.iterdir()] == ["publication-000001"]


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
    assert f"{path} is missing, damaged, or of another release" in caplog.text


@pytest.mark.parametrize("field", ["version", "whole"])
def test_a_publication_with_a_changed_header_is_skipped(open_way, field: str) -> None:
    """With a wrong number of its last whole version, files that the publication needs would be deleted."""
    way = open_way("Folder with changes")
    for version in (1, 2):
        way.publish(numbered(version), version)
    path = way.folder / "publication-000002" / "manifest.json"
    header, body = path.read_text().split("\n", 1)
    path.write_text(json.dumps(json.loads(header) | {field: 0}) + "\n" + body)
    assert latest(way.folder).manifest.version == 1


@pytest.mark.parametrize(
    "change", [{"steps": [{}]}, {"parts": [[1]]}, {"tensors": None}], ids=lambda each: next(iter(each))
)
def test_a_publication_in_the_format_of_another_release_is_skipped(way: Way, change: dict[str, object]) -> None:
    for version in (1, 2):
        way.publish(numbered(version), version)
    path = way.folder / "publication-000002" / "manifest.json"
    body = json.dumps(json.loads(path.read_text().split("\n")[1]) | change)
    header = publication_folder.PublicationHeader(2, 2, xxhash.xxh3_64_hexdigest(body.encode()))
    path.write_text(f"{header.encoded()}\n{body}\n")
    assert latest(way.folder).manifest.version == 1


def flipped(path: Path, at: int) -> None:
    """Change the highest bit of a byte, after which the file is not UTF-8 any more."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x80
    path.write_bytes(data)


DAMAGES = {
    "a byte of the header": lambda folder: flipped(folder / "publication-000001" / "manifest.json", 5),
    "a byte of the manifest": lambda folder: flipped(folder / "publication-000002" / "manifest.json", -10),
    "no manifest": lambda folder: (folder / "publication-000001" / "manifest.json").unlink(),
    "no folder of readers": lambda folder: (folder / "publication-000001" / "readers").rmdir(),
    "a file with such a name": lambda folder: (folder / "publication-9").touch(),
    "a folder with such a name": lambda folder: (folder / "publication-9").mkdir(),
    "an empty folder with the name of a publication": lambda folder: (folder / "publication-000009").mkdir(),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_nothing_in_the_folder_keeps_later_versions_from_being_published(open_way, damage) -> None:
    way = open_way("Folder")
    for version in (1, 2):
        way.publish(numbered(version), version)
    damage(way.folder)
    for writer, version in ((way, 3), (open_way("Folder"), 3), (open_way("Folder"), 4), (open_way("Folder"), 5)):
        published = writer.publish(numbered(version), version)
        assert bits(fetch(reader(), published)) == bits(numbered(version))
    assert not list(way.folder.glob("publication-00000[12]"))


def test_a_publication_that_cannot_be_deleted_is_named_and_hinders_nobody(way: Way, monkeypatch, caplog) -> None:
    original = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if path.name == "publication-000001":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return original(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    for version in range(1, 5):
        way.publish(numbered(version), version)
    assert complete_numbers(way.folder) == [1, 3, 4]
    assert f"{way.folder / 'publication-000001'} is not needed any more and cannot be deleted" in caplog.text


def removed(folder: Path, number: int) -> None:
    shutil.rmtree(folder / f"publication-{number:06d}")


LOSSES = {
    "a changed byte": lambda folder: flipped(folder / "publication-000003" / "rank-00001.bin", 0),
    "a shorter file": lambda folder: os.truncate(folder / "publication-000003" / "rank-00001.bin", 1),
    "a missing file": lambda folder: (folder / "publication-000003" / "rank-00001.bin").unlink(),
    "a missing version between": lambda folder: removed(folder, 2),
    "a missing whole version": lambda folder: removed(folder, 1),
    "a changed byte of the whole version": lambda folder: flipped(folder / "publication-000001" / "rank-00000.bin", 0),
}


@pytest.mark.parametrize("lose", LOSSES.values(), ids=LOSSES)
def test_a_run_that_starts_again_publishes_whole_what_replicas_could_not_read(open_way, caplog, lose) -> None:
    way = open_way("Folder with changes")
    for version in range(1, 4):
        way.publish(changed(version), version)
    lose(way.folder)
    published = open_way("Folder with changes").publish(changed(3), 3)
    assert published.source.number == 4
    assert len(published.source.steps) == 1
    assert bits(fetch(reader(), published)) == bits(changed(3))
    assert "version 3 is published again" in caplog.text
    assert open_way("Folder with changes").publish(changed(3), 3) == published


def test_a_run_that_starts_again_uses_changes_that_are_intact(open_way: Callable[[str], Way]) -> None:
    way = open_way("Folder with changes")
    first = [way.publish(changed(version), version) for version in range(1, 4)][-1]
    assert len(first.source.steps) == 3
    assert open_way("Folder with changes").publish(changed(3), 3) == first


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


def test_a_replica_without_the_volume_names_the_field_the_folder_and_the_fix(way: Way) -> None:
    published = way.publish(WEIGHTS, 1)
    way.folder.rename(way.folder.with_name("elsewhere"))
    fix = r"spec\.publication\.folder: .*Folder, .* does not exist .* Mount the same volume .* in spec\.pods\.rollout"
    with pytest.raises(PublicationFolderMissing, match=fix):
        fetch(reader(), published)
