"""Prompts from JSON lines and Parquet files.

    path ─► resolve against the manifest's folder ─► rows ─► prompts
                     │                                 │        │
                     └──── missing, no format          │        └── missing field, wrong type, no answer
                                                       └── corrupt line, no Parquet

Every stage collects its problems; they are raised together. JSON lines are read by the standard library, line by
line: column-wise readers guess one type per column, which turns the answer "2024-01-01" into a date and gives each row
the fields of all others.
"""

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from qwen35_trainer.data.errors import DataError
from qwen35_trainer.data.prompt import Message, Prompt
from qwen35_trainer.spec.data import FileFormat, Files, Source

_EXTENSIONS: Mapping[str, FileFormat] = {".jsonl": "JSONLines", ".ndjson": "JSONLines", ".parquet": "Parquet"}
_NAMED_ROWS = 3

type Row = Mapping[str, object]


class _RowError(Exception):
    """Why one row is no prompt. Rows with the same reason are reported as one problem."""


@dataclass
class _Located:
    """A row and where a person finds it."""

    place: str
    row: Row


@dataclass
class _Problems:
    """Problems of one source, those of single rows grouped by file and reason."""

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


def read_prompts(source: Source, base: Path, *, answers_required: bool = False) -> list[Prompt]:
    """All prompts of a source of files, in the order of its files and their rows.

    base: folder that relative paths start from (the manifest's). answers_required: a row without an answer is a
    problem (a reward or SFT needs it). Nothing is fetched: paths are local files.
    Raises DataError with every problem of the source.
    """
    files = source.files
    assert files is not None, "the caller picks the reader by the kind of source"
    problems = _Problems(f"source {source.name}")
    prompts: list[Prompt] = []
    number = 0
    for path, form in _resolve(files, base, problems):
        for located in _rows(path, form, problems):
            try:
                prompts.append(_prompt(located.row, f"{source.name}/{number}", source.name, files, answers_required))
            except _RowError as invalid:
                problems.add_row(path, located.place, str(invalid))
            number += 1
    if not number and not problems.all():
        problems.add(f"{', '.join(files.paths)}: no rows. Add at least one, or remove the source.")
    if found := problems.all():
        raise DataError(found)
    return prompts


def _resolve(files: Files, base: Path, problems: _Problems) -> Iterator[tuple[Path, FileFormat]]:
    if files.volume is not None:
        claim = files.volume.persistentVolumeClaim.claimName
        problems.add(f"the volume {claim!r} is mounted only in a cluster. Outside one, name local files instead.")
        return
    for name in files.paths:
        path = base / name
        form = files.format or _EXTENSIONS.get(path.suffix.lower())
        if path.is_dir():
            problems.add(f"{path} is a folder. Name the files in it.")
        elif not path.exists():
            problems.add(f"{path} does not exist. {_neighbours(path)}")
        elif form is None:
            problems.add(f"{path}: the extension {path.suffix!r} tells no format. Set format: JSONLines or Parquet.")
        else:
            yield path, form


def _neighbours(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"Neither does its folder {folder}."
    names = sorted(entry.name for entry in folder.iterdir() if entry.suffix.lower() in _EXTENSIONS)
    if not names:
        return f"{folder} holds no .jsonl or .parquet file."
    return f"{folder} holds {', '.join(names[:10])}{' …' if len(names) > 10 else ''}."


def _rows(path: Path, form: Literal["JSONLines", "Parquet"], problems: _Problems) -> Iterable[_Located]:
    try:
        yield from _json_rows(path, problems) if form == "JSONLines" else _parquet_rows(path, problems)
    except OSError as error:
        problems.add(f"{path} cannot be read: {error.strerror or error}.")


def _json_rows(path: Path, problems: _Problems) -> Iterator[_Located]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place = f"line {number}"
            try:
                row = json.loads(line.decode("utf-8-sig").rstrip("\r\n"))
            except UnicodeDecodeError as error:
                problems.add_row(path, place, f"not UTF-8 ({error.reason} at byte {error.start})")
            except json.JSONDecodeError as error:
                problems.add_row(path, place, f"not JSON ({error.msg.removesuffix(' at')} at column {error.colno})")
            else:
                if isinstance(row, dict):
                    yield _Located(place, row)
                else:
                    problems.add_row(path, place, f"a JSON object is expected, found {_kind(row)}")


def _parquet_rows(path: Path, problems: _Problems) -> Iterator[_Located]:
    import datasets  # seconds to import, and only Parquet needs it

    datasets.disable_progress_bars()
    # `Dataset.from_parquet` and not `load_dataset`: the latter reports each use to the hub.
    with tempfile.TemporaryDirectory(prefix="qwen35-data-") as cache:
        try:
            table = datasets.Dataset.from_parquet(str(path), cache_dir=cache, keep_in_memory=True)
        except (ValueError, TypeError, datasets.exceptions.DatasetGenerationError) as error:
            problems.add(f"{path} is no readable Parquet file: {error.__cause__ or error}")
            return
    for number, row in enumerate(table):
        yield _Located(f"row {number}", row)


def _prompt(row: Row, identity: str, source: str, files: Files, answers_required: bool) -> Prompt:
    text = _text(_field(row, files.promptField), files.promptField)
    answer = None
    if answers_required or _has(row, files.answerField):
        answer = _answer(_field(row, files.answerField), files.answerField)
    if answers_required and answer is None:
        raise _RowError(f"answerField {files.answerField!r} is null; a reward or SFT needs an answer in every row")
    used = {files.promptField, files.answerField}
    return Prompt(identity, source, text, answer, {key: value for key, value in row.items() if key not in used})


def _has(row: Row, name: str) -> bool:
    try:
        _field(row, name)
    except _RowError:
        return False
    return True


def _field(row: Row, name: str) -> object:
    """The value of a field; `a.b` is field b of the mapping a, unless a field is itself named `a.b`."""
    if name in row:
        return row[name]
    value: object = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise _RowError(f"no field {name!r}; the row has {', '.join(row) or 'no fields'}")
        value = value[part]
    return value


def _text(value: object, name: str) -> str | tuple[Message, ...]:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value:
        return tuple(_message(entry, f"{name}[{index}]") for index, entry in enumerate(value))
    found = "an empty one" if value in ("", []) else _kind(value)
    raise _RowError(f"promptField {name!r}: a text or a list of chat messages is expected, found {found}")


def _message(value: object, name: str) -> Message:
    if isinstance(value, Mapping):
        role, content = value.get("role"), value.get("content")
        if isinstance(role, str) and isinstance(content, str):
            return {"role": role, "content": content}
    raise _RowError(f"{name}: a message with the texts role and content is expected, found {_kind(value)}")


def _answer(value: object, name: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise _RowError(f"answerField {name!r}: a text or a number is expected, found {_kind(value)}")


def _kind(value: object) -> str:
    """How a person would name the value in a data file."""
    match value:
        case None:
            return "null"
        case bool():
            return f"the boolean {str(value).lower()}"
        case int() | float():
            return f"the number {value}"
        case str():
            return f"the text {value[:40]!r}"
        case list():
            return f"a list of {len(value)}"
        case Mapping():
            return f"a mapping with {', '.join(map(str, value)) or 'no fields'}"
        case _:
            return f"a {type(value).__name__}"


def _places(places: list[str]) -> str:
    more = len(places) - _NAMED_ROWS
    return ", ".join(places[:_NAMED_ROWS]) + (f" and {more} more" if more > 0 else "")
