"""Folders of runs: those that an earlier release recorded, and runs of given records."""

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import yaml

from qwen35_trainer.progress.records import RunRecord, to_line
from tests.manifest.conftest import document  # noqa: F401
from tests.progress.conftest import run  # noqa: F401
from tests.upgrade.recording import recordings

type MakeRun = Callable[..., Path]


@pytest.fixture
def recorded() -> list[Path]:
    """The finished and the running training of the earliest release."""
    return [recording.run for recording in recordings()[:2]]


@pytest.fixture
def make_run(tmp_path: Path, document: Callable[..., dict[str, object]]) -> MakeRun:  # noqa: F811
    """make_run("a", records, {"train.nodes": 2}) is the folder of a run with these records and settings."""

    def make(name: str, records: Iterable[RunRecord], changes: dict[str, object] | None = None) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "run.yaml").write_text(yaml.safe_dump(document(changes)))
        (folder / "metrics.jsonl").write_text("".join(f"{to_line(record)}\n" for record in records))
        return folder

    return make
