"""Checks the chat messages of a data row, and converts them to this form:

    {role: user, content: "… <image> …"}                              text, or parts
    {role: assistant, content: …, reasoning_content: …, tool_calls: [{function: {name: …, arguments: {…}}}], weight: 0}
    {role: tool, content: …, name: …}

This is the form of OpenAI's chat interface, with two differences that Qwen3.5's template needs: the arguments of a call
are a mapping (a JSON text is parsed), and reasoning is a field next to the content. Only an assistant's turn that does
not train in SFT has a weight.

Only messages of users and tools may have images and videos. If an assistant's message had images, the model would learn to
write placeholders of images. Qwen3.5's template rejects images in a system message.
"""

import json
from collections.abc import Mapping, Sequence

from qwen35_trainer.data.data_errors import RowError, json_fault, kind
from qwen35_trainer.data.prompt import ChatMessage
from qwen35_trainer.data.row_media import RowMedia

_TEXT_FIELDS = ("reasoning_content", "name", "tool_call_id")
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Names that the reasoning of an assistant has in data: Qwen3.5's template, vLLM's responses, gpt-oss."""
_TRAINING_FIELDS = ("weight", "train")
"""Fields that say whether an assistant's turn trains: OpenAI's fine-tuning, axolotl."""
_ROLES_WITH_PICTURES = ("user", "tool")


def read_messages(entries: Sequence[object], name: str, media: RowMedia, *, columnar: bool) -> tuple[ChatMessage, ...]:
    """Read the chat messages in a field of a row. Raises RowError, naming the message, if a message is invalid.

    entries: the value of the field. name: name of the field. media: assigns the row's images and videos to the
    messages, in order. columnar: whether the file gives every row the fields of all other rows, with null where the row
    has no such field.
    """
    return tuple(_message(entry, f"{name}[{index}]", media, columnar=columnar) for index, entry in enumerate(entries))


def _message(value: object, name: str, media: RowMedia, *, columnar: bool) -> ChatMessage:
    entry = {key: each for key, each in value.items() if each is not None} if isinstance(value, Mapping) else {}
    role, content = entry.get("role"), entry.get("content")
    if entry.get("function_call"):
        raise RowError(f"{name}: function_call is not read. Write tool_calls in place of function_call")
    calls = _calls(entry.get("tool_calls") or [], f"{name}.tool_calls", columnar=columnar)
    if content is None and calls:
        content = ""
    if not isinstance(role, str) or not isinstance(content, str | list):
        raise RowError(f"{name}: {_wrong(value)}")
    message: dict[str, object] = {"role": role}
    if isinstance(content, str):
        message["content"] = media.split(content) if role in _ROLES_WITH_PICTURES else content
    else:
        message["content"] = _parts(content, f"{name}.content", role, media)
    for key in _TEXT_FIELDS:
        if key in entry:
            if not isinstance(entry[key], str):
                raise RowError(f"{name}.{key}: a text is expected, found {kind(entry[key])}")
            message[key] = entry[key]
    if role == "assistant":
        message |= _reasoning(entry, str(message["content"]), name)
        message |= _weight(entry, name)
    if calls:
        message["tool_calls"] = calls
    return message


def _reasoning(entry: Mapping[str, object], content: str, name: str) -> dict[str, str]:
    """Return the reasoning of an assistant's message as `reasoning_content`; nothing if it has none.

    Equal texts under several names are one. If the content contains the reasoning, as it does after generation without
    a parser, the template finds it there, and only `reasoning_content` is read.
    """
    texts: dict[str, str] = {}
    for key in _REASONING_FIELDS[:1] if "</think>" in content else _REASONING_FIELDS:
        value = entry.get(key, "")
        if not isinstance(value, str):
            raise RowError(f"{name}.{key}: a text is expected, found {kind(value)}")
        if value:
            texts[key] = value
    if len(set(texts.values())) > 1:
        raise RowError(f"{name}: {' and '.join(texts)} are different texts. Write one of them")
    return {"reasoning_content": next(iter(texts.values()))} if texts else {}


def _weight(entry: Mapping[str, object], name: str) -> dict[str, int]:
    """Return `weight: 0` for an assistant's message that does not train, otherwise nothing."""
    weights = {key: entry[key] for key in _TRAINING_FIELDS if key in entry}
    for key, value in weights.items():
        if value not in (0, 1):
            raise RowError(f"{name}.{key}: 0, 1, false or true is expected, found {kind(value)}")
    return {"weight": 0} if 0 in weights.values() else {}


def _wrong(value: object) -> str:
    """Return why a value is not a message: its role or its content is absent, or has the wrong type."""
    if not isinstance(value, Mapping) or not {"role", "content"} <= set(value):
        return f"a message with the texts role and content is expected, found {kind(value)}"
    role, content = value["role"], value["content"]
    if not isinstance(role, str):
        return f"role is {kind(role)}: write a text, such as user or assistant"
    if content is None:
        return f"content is null (role {role}, no tool_calls): write a text, or remove the message"
    return f"content is {kind(content)} (role {role}): write a text, or a list of parts"


def _parts(content: list[object], name: str, role: str, media: RowMedia) -> str | list[dict[str, str]]:
    """Convert the text, image and video parts of a message.

    If all parts are text, they are joined to one string, because templates of text models print a list literally.
    """
    parts: list[dict[str, str]] = []
    for index, value in enumerate(content):
        entry = {key: each for key, each in value.items() if each is not None} if isinstance(value, Mapping) else {}
        if isinstance(text := entry.get("text"), str):
            parts.append({"type": "text", "text": text})
        elif role not in _ROLES_WITH_PICTURES:
            raise RowError(
                f"{name}[{index}]: a part with a text is expected in a message of the role {role!r}, found "
                f"{kind(value)}. Show images and videos in a message of user or tool, or remove them"
            )
        elif media_type := media.take(entry):
            parts.append({"type": media_type})
        else:
            raise RowError(f"{name}[{index}]: a part with a text, an image or a video is expected, found {kind(value)}")
    if all("text" in part for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _has_null_field(value: object) -> bool:
    """Return whether a mapping, at any depth of a value, has a field that is null.

    A null in a list is a value of its own row: Parquet fills in fields only.
    """
    if isinstance(value, Mapping):
        return any(each is None or _has_null_field(each) for each in value.values())
    return isinstance(value, list) and any(map(_has_null_field, value))


def _calls(value: object, name: str, *, columnar: bool) -> list[dict[str, object]]:
    if not isinstance(value, list):
        raise RowError(f"{name}: a list of calls is expected, found {kind(value)}")
    return [_call(entry, f"{name}[{index}]", columnar=columnar) for index, entry in enumerate(value)]


def _call(value: object, name: str, *, columnar: bool) -> dict[str, object]:
    function = value.get("function", value) if isinstance(value, Mapping) else None
    called = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(called, str):
        raise RowError(f"{name}: a call with a function's name and arguments is expected, found {kind(value)}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise RowError(f"{name}: the arguments are not JSON ({json_fault(error)})") from error
    elif columnar and _has_null_field(arguments):
        raise RowError(
            f"{name}: an argument is null, and in this format an argument that other rows have is null too. "
            "Write the arguments as JSON text"
        )
    if not isinstance(arguments, Mapping | None):
        raise RowError(f"{name}: a mapping of arguments is expected, found {kind(arguments)}")
    return {"type": "function", "function": {"name": called, "arguments": dict(arguments or {})}}
