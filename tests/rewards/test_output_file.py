"""What functions of rewards print: a file of limited size."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qwen35_trainer.rewards.output_file import OutputFile

type Open = Callable[..., OutputFile]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    made: list[OutputFile] = []

    def start(max_bytes: int = 100, name: str = "rewards-0.log") -> OutputFile:
        made.append(OutputFile(tmp_path / "logs" / name, max_bytes))
        return made[-1]

    yield start
    for output in made:
        if output._thread.is_alive():
            output.close()


def write(output: OutputFile, *lines: str) -> None:
    """Write each line in a call of its own."""
    for line in lines:
        os.write(output.descriptor, f"{line}\n".encode())


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (folder / "logs").iterdir()}


def test_output_is_appended_to_that_of_earlier_processes(opened: Open, tmp_path: Path) -> None:
    for line in ("first", "second"):
        output = opened()
        write(output, line)
        output.close()
    assert contents(tmp_path) == {"rewards-0.log": "first\nsecond\n"}


def test_without_output_there_is_no_file(opened: Open, tmp_path: Path) -> None:
    opened().close()
    assert not (tmp_path / "logs").exists()


def test_the_last_part_of_too_much_output_is_kept(opened: Open, tmp_path: Path) -> None:
    output = opened(max_bytes=2**17)
    for number in range(100_000):
        write(output, f"line {number}")
    output.close()
    files = contents(tmp_path)
    assert sorted(files) == ["rewards-0.log", "rewards-0.log.1"]
    assert all(len(text) <= 2**17 for text in files.values())
    kept = (files["rewards-0.log.1"] + files["rewards-0.log"]).splitlines()
    assert kept[1:] == [f"line {number}" for number in range(100_000)][-len(kept) + 1 :]
    assert len(kept) > 2**16 / len("line 99999 ")


def test_output_that_cannot_be_written_is_lost_with_one_warning(
    opened: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "logs").write_text("a file in place of the folder")
    output = opened()
    for _ in range(3 * 2**16 // 1000):
        write(output, "x" * 1000)
    output.close()
    [record] = caplog.records
    assert f"output of rewards is missing in {tmp_path / 'logs' / 'rewards-0.log'}: " in record.getMessage()
