"""Reads prompts from JSON Lines and Parquet files.

    path ─► resolve against the manifest's folder ─► rows ─► prompts
                     │                                 │        │
                     └──── missing, unknown format     │        └── missing field, wrong type, no answer
                                                       └── corrupt line, not Parquet

Every stage collects its problems, and one DataError reports all of them. The standard library reads JSON Lines, line by line:
column-wise readers infer one type per column, which turns the answer "2024-01-01" into a date and gives each row the
fields of all other rows.
"""

import codecs
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from qwen35_trainer.data.data_errors import DataError, RowError, json_fault, kind
from qwen35_trainer.data.prompt import Prompt
from qwen35_trainer.data.row import DataRow, prompt_of
from qwen35_trainer.data.row_sequence import RowSequence
from qwen35_trainer.data.source_rows import RowsDigest, SourceRows
from qwen35_trainer.manifest.data import FileFormat, FilesSpec, SourceSpec

_EXTENSIONS: Mapping[str, FileFormat] = {".jsonl": "JSONLines", ".ndjson": "JSONLines", ".parquet": "Parquet"}
_MAX_NAMED_ROWS = 3


@dataclass
class _Located:
    """A row of a data file, and its place in the file."""

    place: str
    row: DataRow


@dataclass
class _Problems:
    """Collects the problems of one data source. Problems of single rows are grouped by file and reason."""

    source: str
    texts: list[str] = field(default_factory=list)
    places: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    def add(self, text: str) -> None:
        self.texts.append(f"{self.source}: {text}")

    def add_row(self, path: Path, place: str, reason: str) -> None:
        self.places.setdefault((str(path), reason), []).append(place)

    def all(self) -> list[str]:
        grouped = [
            f"{self.source}: {path}, {_places(places)}: {reason}" for (path, reason), places in self.places.items()
        ]
        return self.texts + grouped


class FilePrompts(RowSequence[Prompt]):
    """The prompts of a source that consists of files. rows: number and digest of the rows from which they were read."""

    def __init__(self, prompts: Sequence[Prompt], rows: SourceRows) -> None:
        self._prompts, self.rows = prompts, rows

    def __len__(self) -> int:
        return len(self._prompts)

    def _row(self, row: int) -> Prompt:
        return self._prompts[row]


def read_prompts(source: SourceSpec, base: Path, *, answers_required: bool = False) -> FilePrompts:
    """Read all prompts of a data source that consists of files, in the order of the files and their rows.

    base: the folder of the manifest, to which paths are relative. answers_required: whether a row without an answer is
    a problem, because a reward or SFT needs the answer. Nothing is downloaded: all paths are local files.
    Raises DataError with every problem of the source.
    """
    files = source.files
    assert files is not None, "the caller chooses the reader by the kind of source"
    problems = _Problems(f"source {source.name}")
    prompts: list[Prompt] = []
    digest, number = RowsDigest(), 0
    for path, form in _resolve(files, base, problems):
        for located in _rows(path, form, problems):
            try:
                prompt = prompt_of(
                    located.row,
                    f"{source.name}/{number}",
                    source.name,
                    files,
                    path,
                    place=located.place,
                    answers_required=answers_required,
                    columnar=form == "Parquet",
                )
                prompts.append(prompt)
                digest.add(located.row)
            except RowError as invalid:
                problems.add_row(path, located.place, str(invalid))
            number += 1
    if not number and not problems.all():
        problems.add(f"{', '.join(files.paths)}: no rows. Add at least one, or remove the source.")
    if texts := problems.all():
        raise DataError(texts)
    return FilePrompts(prompts, digest.of(source.name))


def _resolve(files: FilesSpec, base: Path, problems: _Problems) -> Iterator[tuple[Path, FileFormat]]:
    if files.volume is not None:
        claim = files.volume.persistentVolumeClaim.claimName
        problems.add(f"the volume {claim!r} is mounted only in a cluster. Outside one, name local files instead.")
        return
    for name in files.paths:
        path = base / name
        form = _format(files, path)
        if (wrong := _misnamed(path, form)) is not None:
            problems.add(" ".join(wrong))
        elif form is not None:
            yield path, form


def misnamed(files: FilesSpec, base: Path) -> list[tuple[str, str]]:
    """Return (problem, fix) for each path that is a folder, does not exist or has no known format. No file is read."""
    paths = [base / name for name in files.paths]
    return [wrong for path in paths if (wrong := _misnamed(path, _format(files, path))) is not None]


def _misnamed(path: Path, form: FileFormat | None) -> tuple[str, str] | None:
    if path.is_dir():
        return f"{path} is a folder.", "Name the files in it."
    if not path.exists():
        return f"{path} does not exist.", _neighbours(path)
    if form is None:
        return (
            f"{path}: the extension {path.suffix!r} does not determine the format.",
            "Set format: JSONLines or Parquet.",
        )
    return None


def _format(files: FilesSpec, path: Path) -> FileFormat | None:
    return files.format or _EXTENSIONS.get(path.suffix.lower())


def _neighbours(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"Neither does its folder {folder}."
    names = sorted(entry.name for entry in folder.iterdir() if entry.suffix.lower() in _EXTENSIONS)
    if not names:
        return f"{folder} has no .jsonl or .parquet file."
    return f"{folder} holds {', '.join(names[:10])}{' …' if len(names) > 10 else ''}."


def _rows(path: Path, form: Literal["JSONLines", "Parquet"], problems: _Problems) -> Iterable[_Located]:
    try:
        yield from _json_rows(path, problems) if form == "JSONLines" else _parquet_rows(path, problems)
    except OSError as error:
        problems.add(f"{path} cannot be read: {error.strerror or error}.")


def _json_rows(path: Path, problems: _Problems) -> Iterator[_Located]:
    with path.open("rb") as lines:
        if (wrong := _other_format(next((line for line in lines if line.strip()), b""))) is not None:
            problems.add(f"{path}: {wrong}")
            return
        lines.seek(0)
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place = f"line {number}"
            try:
                row = json.loads(line.decode("utf-8-sig").rstrip("\r\n"))
            except UnicodeDecodeError as error:
                problems.add_row(path, place, f"not UTF-8 ({error.reason} at byte {error.start})")
            except (ValueError, RecursionError) as error:
                problems.add_row(path, place, f"not JSON ({json_fault(error)})")
            else:
                if isinstance(row, dict):
                    yield _Located(place, row)
                else:
                    problems.add_row(path, place, f"a JSON object is expected, found {kind(row)}")


def _other_format(line: bytes) -> str | None:
    """Return why a file is not JSON Lines, and what to do, if its first line with text shows that.

    Otherwise every line of the file would be reported.
    """
    if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in line[:2]:
        return "this is UTF-16. Save the file as UTF-8."
    if line.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        try:
            json.loads(line.decode("utf-8-sig"))
        except RecursionError:
            return None  # reported with its line
        except ValueError:
            return (
                "this is a JSON array over several lines. Write one object per line, without the brackets around all."
            )
    return None


def _parquet_rows(path: Path, problems: _Problems) -> Iterator[_Located]:
    import datasets  # seconds to import, and only Parquet needs it

    datasets.disable_progress_bars()
    # `Dataset.from_parquet` and not `load_dataset`: the latter reports each use to the hub.
    with tempfile.TemporaryDirectory(prefix="qwen35-data-") as cache:
        try:
            table = datasets.Dataset.from_parquet(str(path), cache_dir=cache, keep_in_memory=True)
            # Images stay encoded, as in the file, until a batch needs their pixels.
            table = table.cast(datasets.Features(_encoded(dict(table.features))))
        except (ValueError, TypeError, datasets.exceptions.DatasetGenerationError) as error:
            problems.add(f"{path} is not a readable Parquet file: {error.__cause__ or error}")
            return
    for number, row in enumerate(table):
        yield _Located(f"row {number}", row)


def _encoded(feature: Any) -> Any:  # noqa: ANN401  # datasets is untyped
    """Return a column's type, changed so that the datasets library yields images as bytes without decoding them."""
    import datasets

    match feature:
        case datasets.Image():
            return datasets.Image(decode=False)
        case datasets.List():
            return datasets.List(_encoded(feature.feature))
        case datasets.LargeList():
            return datasets.LargeList(_encoded(feature.feature))
        case dict():
            return {name: _encoded(each) for name, each in feature.items()}
    return feature


def _places(places: list[str]) -> str:
    more = len(places) - _MAX_NAMED_ROWS
    return ", ".join(places[:_MAX_NAMED_ROWS]) + (f" and {more} more" if more > 0 else "")
