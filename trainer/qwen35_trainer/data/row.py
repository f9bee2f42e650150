"""Converts a row of a data file to a prompt."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

from qwen35_trainer.data.data_errors import RowError, half_character, json_fault, kind
from qwen35_trainer.data.messages import read_messages
from qwen35_trainer.data.prompt import Prompt, Tool
from qwen35_trainer.data.row_media import RowMedia
from qwen35_trainer.manifest.data import FilesSpec

type DataRow = Mapping[str, object]


def prompt_of(
    row: DataRow,
    identity: str,
    source: str,
    files: FilesSpec,
    file: Path,
    *,
    place: str,
    answers_required: bool,
    columnar: bool,
) -> Prompt:
    """Convert a row of a data file to a prompt. Raises RowError if the row is malformed.

    identity: id of the prompt. source: name of the source. files: settings of the source. file: the data file, to whose
    folder paths of images are relative. place: the row's place in the file, such as "line 3". answers_required: whether
    a row without an answer is refused. columnar: whether the format (Parquet) gives every row the fields of all other
    rows, with null where the row has no such field.
    """
    images, videos = _optional(row, files.imagesField), _optional(row, files.videosField)
    media = RowMedia.of_row(images, files.imagesField, videos, files.videosField, file.parent)
    text = _text(_required(row, files.promptField, "promptField"), files.promptField, media, columnar=columnar)
    media.check_used()
    answer = None
    if answers_required or _has(row, files.answerField):
        answer = _answer(_required(row, files.answerField, "answerField"), files.answerField)
    if answers_required and answer is None:
        raise RowError(
            f"answerField {files.answerField!r} is null or NaN; a reward or SFT needs an answer in every row"
        )
    used = {files.promptField, files.answerField, files.imagesField, files.videosField, files.toolsField}
    return Prompt(
        identity,
        source,
        text,
        answer,
        metadata={key: value for key, value in row.items() if key not in used},
        tools=_tools(_optional(row, files.toolsField), files.toolsField, columnar=columnar),
        images=tuple(media.images),
        videos=tuple(media.videos),
        place=f"{file}, {place}",
    )


def _has(row: DataRow, name: str) -> bool:
    try:
        _field(row, name)
    except KeyError:
        return False
    return True


def _optional(row: DataRow, name: str) -> object:
    return _field(row, name) if _has(row, name) else None


def _required(row: DataRow, name: str, setting: str) -> object:
    """Return the value of the field `name`. Raises RowError if the row does not have it.

    setting: the field of `files` in the manifest that contains the name, for the error.
    """
    if not _has(row, name):
        names = ", ".join(row) or "no fields"
        raise RowError(f"{setting} {name!r}: no such field. Set {setting} to a field of the row, which has {names}")
    return _field(row, name)


def _field(row: DataRow, name: str) -> object:
    """Return the value of a field. Raises KeyError if the row does not have it.

    The name `a.b` means the field named `a.b` or, if there is none, field b of the mapping in field a.
    """
    if name in row:
        return row[name]
    value: object = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise KeyError(name)
        value = value[part]
    return value


def _text(value: object, name: str, media: RowMedia, *, columnar: bool) -> str | tuple[Mapping[str, object], ...]:
    if isinstance(value, str) and value:
        parts = media.split(value)
        return value if isinstance(parts, str) else ({"role": "user", "content": parts},)
    if isinstance(value, list) and value:
        return read_messages(value, name, media, columnar=columnar)
    actual = "an empty one" if value in ("", []) else kind(value)
    raise RowError(f"promptField {name!r}: a text or a list of chat messages is expected, found {actual}")


def _answer(value: object, name: str) -> str | None:
    """Return the text of a reference answer; None for null and NaN, which columns of numbers have in place of null.

    Such columns are read as floats, so the integer 72 is the float 72.0 there, and its text is "72".
    """
    if isinstance(value, str) and (half := half_character(value)) is not None:
        raise RowError(f"answerField {name!r}: {half}. Write the whole character, or remove the half")
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, float):
        return None if math.isnan(value) else str(value).removesuffix(".0")
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise RowError(f"answerField {name!r}: a text or a number is expected, found {kind(value)}")


def _tools(value: object, name: str, *, columnar: bool) -> tuple[Tool, ...]:
    """Read the tools of a row: a list of schemas, or a JSON text of such a list.

    columnar: whether nulls are removed, because in a columnar file they stand for fields that only other rows have.
    """
    if isinstance(value, str) and value:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RowError(f"toolsField {name!r}: not JSON ({json_fault(error)})") from error
    if not value:
        return ()
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise RowError(f"toolsField {name!r}: a list of JSON schemas is expected, found {kind(value)}")
    tools = _without_null(value) if columnar else value
    return tuple(map(_in_envelope, tools)) if isinstance(tools, list) else ()


def _in_envelope(tool: Tool) -> Tool:
    """Return a tool as a template gets it from a server: {type: function, function: {name, description, parameters}}.

    A function without this form is put into it. A tool without a name, or of another type, is returned unchanged.
    """
    if "function" in tool or "name" not in tool or tool.get("type", "function") != "function":
        return tool
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _without_null(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _without_null(each) for key, each in value.items() if each is not None}
    return [_without_null(each) for each in value] if isinstance(value, list) else value
