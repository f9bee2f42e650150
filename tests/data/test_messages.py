"""Messages, tools, images and videos of rows, as read from files."""

import base64
import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from qwen35_trainer.data import DataError, Prompt, PromptSet, Video
from qwen35_trainer.manifest.data import SourceSpec


def read(folder: Path, *rows: dict[str, Any], name: str = "a.jsonl") -> list[Prompt]:
    if name.endswith(".jsonl"):
        (folder / name).write_text("\n".join(json.dumps(row) for row in rows))
    else:
        datasets.Dataset.from_list(list(rows)).to_parquet(folder / name)
    return list(PromptSet.load([SourceSpec.model_validate({"name": "s", "files": {"paths": [name]}})], folder))


def problems(folder: Path, *rows: dict[str, Any], name: str = "a.jsonl") -> list[str]:
    with pytest.raises(DataError) as raised:
        read(folder, *rows, name=name)
    return list(raised.value.problems)


def user(content: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": content}]


def test_calls_reasoning_and_tool_results_are_kept(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"ü": 1}'}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "reasoning_content": "b", "tool_calls": [call]},
        {"role": "tool", "content": "c", "name": "f", "tool_call_id": "1"},
    ]
    [prompt] = read(tmp_path, {"prompt": messages, "tools": [{"name": "f", "parameters": {"default": None}}]})
    assert prompt.text == (
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "b",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"ü": 1}}}],
        },
        {"role": "tool", "content": "c", "name": "f", "tool_call_id": "1"},
    )
    assert prompt.tools == ({"type": "function", "function": {"name": "f", "parameters": {"default": None}}},)


def test_tools_may_be_one_json_text(tmp_path: Path) -> None:
    [prompt] = read(tmp_path, {"prompt": "a", "tools": '[{"name": "f"}]'})
    assert prompt.tools == ({"type": "function", "function": {"name": "f"}},)


@pytest.mark.parametrize(
    "tool", [{"name": "f", "description": "d"}, {"type": "function", "name": "f", "description": "d"}]
)
def test_a_tool_without_the_form_of_a_server_gets_it(tmp_path: Path, tool: dict[str, Any]) -> None:
    [prompt] = read(tmp_path, {"prompt": "a", "tools": [tool]})
    assert prompt.tools == ({"type": "function", "function": {"name": "f", "description": "d"}},)


def test_other_tools_stay_as_they_are(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}, {"type": "browser"}, {"type": "custom", "name": "g"}]
    [prompt] = read(tmp_path, {"prompt": "a", "tools": tools})
    assert list(prompt.tools) == tools


@pytest.mark.parametrize("field", ["reasoning", "thinking"])
def test_reasoning_has_several_names(tmp_path: Path, field: str) -> None:
    message = {"role": "assistant", "content": "a", field: "b"}
    [prompt] = read(tmp_path, {"prompt": [message, message | {"reasoning_content": "b"}, message | {field: None}]})
    expected = {"role": "assistant", "content": "a", "reasoning_content": "b"}
    assert prompt.text == (expected, expected, {"role": "assistant", "content": "a"})


def test_reasoning_in_the_content_is_not_read_twice(tmp_path: Path) -> None:
    content = "<think>b</think>a"
    [prompt] = read(tmp_path, {"prompt": [{"role": "assistant", "content": content, "reasoning": "b"}]})
    assert prompt.text == ({"role": "assistant", "content": content},)


@pytest.mark.parametrize("fields", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"weight": 1, "train": False}])
def test_a_turn_that_does_not_train_has_the_weight_0(tmp_path: Path, fields: dict[str, Any]) -> None:
    [prompt] = read(tmp_path, {"prompt": [{"role": "assistant", "content": "a"} | fields]})
    assert prompt.text == ({"role": "assistant", "content": "a", "weight": 0},)


@pytest.mark.parametrize("fields", [{"weight": 1}, {"train": True}, {"weight": None, "train": None}])
def test_a_turn_that_trains_has_no_weight(tmp_path: Path, fields: dict[str, Any]) -> None:
    [prompt] = read(tmp_path, {"prompt": [{"role": "assistant", "content": "a"} | fields]})
    assert prompt.text == ({"role": "assistant", "content": "a"},)


def test_parts_of_text_alone_are_one_text(tmp_path: Path) -> None:
    [prompt] = read(tmp_path, {"prompt": user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])})
    assert prompt.text == ({"role": "user", "content": "ab"},)


def test_images_stand_where_their_marks_are(tmp_path: Path) -> None:
    [prompt] = read(tmp_path, {"prompt": "<image> or <image>?", "images": ["a.png", "/b.png"]})
    assert prompt.text == (
        {
            "role": "user",
            "content": [
                {"type": "image"},
                {"type": "text", "text": " or "},
                {"type": "image"},
                {"type": "text", "text": "?"},
            ],
        },
    )
    assert prompt.images == (tmp_path / "a.png", Path("/b.png"))


def test_a_mark_is_text_where_the_row_has_no_images(tmp_path: Path) -> None:
    [prompt] = read(tmp_path, {"prompt": user("<image> is a tag")})
    assert prompt.text == ({"role": "user", "content": "<image> is a tag"},)


def test_parts_may_bring_their_own_images_between_those_of_the_column(tmp_path: Path) -> None:
    uri = "data:image/png;base64," + base64.b64encode(b"second").decode()
    content = [
        {"type": "image"},
        {"type": "image_url", "image_url": {"url": uri}},
        {"type": "image", "image": "third.png"},
        {"type": "image"},
    ]
    [prompt] = read(tmp_path, {"prompt": user(content), "images": ["first.png", "last.png"]})
    assert prompt.images == (tmp_path / "first.png", b"second", tmp_path / "third.png", tmp_path / "last.png")
    assert prompt.text == ({"role": "user", "content": [{"type": "image"}] * 4},)


@pytest.mark.parametrize("role", ["user", "tool"])
def test_users_and_tools_show_images(tmp_path: Path, role: str) -> None:
    [prompt] = read(tmp_path, {"prompt": [{"role": role, "content": [{"type": "image", "image": "a.png"}]}]})
    assert prompt.text == ({"role": role, "content": [{"type": "image"}]},)


@pytest.mark.parametrize("role", ["assistant", "system", "developer"])
@pytest.mark.parametrize(
    "part", [{"type": "image"}, {"type": "image_url", "image_url": "a.png"}, {"type": "video", "video": None}]
)
def test_no_other_role_shows_images_or_videos(tmp_path: Path, role: str, part: dict[str, Any]) -> None:
    reply = {"role": role, "content": [{"type": "text", "text": "see"}, part]}
    [problem] = problems(tmp_path, {"prompt": [*user("a"), reply], "images": ["b.png"]})
    assert f"line 1: prompt[1].content[1]: a part with a text is expected in a message of the role {role!r}" in problem
    assert problem.endswith("Show images and videos in a message of user or tool, or remove them")


def test_a_video_is_its_frames_and_their_rate(tmp_path: Path) -> None:
    row = {"prompt": "<video>what?", "videos": [{"frames": ["0.png", "1.png"], "fps": 2}]}
    [prompt] = read(tmp_path, row)
    assert prompt.videos == (Video((tmp_path / "0.png", tmp_path / "1.png"), 2.0),)


def test_images_of_parquet_files_stay_bytes(tmp_path: Path) -> None:
    features = datasets.Features({"prompt": datasets.Value("string"), "images": datasets.List(datasets.Image())})
    rows = {"prompt": ["<image>a"], "images": [[{"bytes": b"no image at all", "path": None}]]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "a.parquet")
    source = SourceSpec.model_validate({"name": "s", "files": {"paths": ["a.parquet"]}})
    [prompt] = PromptSet.load([source], tmp_path)
    assert prompt.images == (b"no image at all",)


def test_what_parquet_fills_in_from_other_rows_is_taken_out(tmp_path: Path) -> None:
    first = {"prompt": [{"role": "user", "content": "a", "name": None}], "tools": [{"name": "f", "strict": None}]}
    second = {"prompt": [{"role": "user", "content": "a", "name": "n"}], "tools": [{"name": "g", "strict": True}]}
    prompt, _ = read(tmp_path, first, second, name="a.parquet")
    assert prompt.text == ({"role": "user", "content": "a"},)
    assert prompt.tools == ({"type": "function", "function": {"name": "f"}},)


def test_a_null_argument_in_parquet_is_refused_since_it_may_be_another_rows(tmp_path: Path) -> None:
    calls = [
        {"function": {"name": "f", "arguments": arguments}} for arguments in ({"a": 1, "b": None}, {"a": 1, "b": 2})
    ]
    rows = [{"prompt": [{"role": "assistant", "content": "", "tool_calls": [call]}]} for call in calls]
    [problem] = problems(tmp_path, *rows, name="a.parquet")
    assert "row 0: prompt[0].tool_calls[0]: an argument is null" in problem
    assert problem.endswith("Write the arguments as JSON text")


def test_a_null_inside_an_argument_in_parquet_is_refused_too(tmp_path: Path) -> None:
    arguments = [{"filters": [{"a": 1, "b": 2}]}, {"filters": [{"a": 1, "b": None}]}]
    calls = [{"function": {"name": "f", "arguments": each}} for each in arguments]
    rows = [{"prompt": [{"role": "assistant", "content": "", "tool_calls": [call]}]} for call in calls]
    [problem] = problems(tmp_path, *rows, name="a.parquet")
    assert "row 1: prompt[0].tool_calls[0]: an argument is null" in problem


def test_a_null_in_a_list_of_parquet_is_a_value_of_its_row(tmp_path: Path) -> None:
    calls = [{"function": {"name": "f", "arguments": {"sites": sites}}} for sites in (["a", None], ["b", "c"])]
    rows = [{"prompt": [{"role": "assistant", "content": "", "tool_calls": [call]}]} for call in calls]
    prompt, _ = read(tmp_path, *rows, name="a.parquet")
    assert isinstance(prompt.text, tuple)
    [call] = prompt.text[0]["tool_calls"]  # type: ignore[misc]
    assert call["function"]["arguments"] == {"sites": ["a", None]}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "<image>", "images": ["a", "b"]}, "2 images and 1 placeholders: write <image> or a part"),
        ({"prompt": "<image><image>", "images": ["a"]}, "more than 1 image placeholders for 1 images"),
        ({"prompt": "none", "images": ["a"]}, "1 images and 0 placeholders"),
        ({"prompt": user([{"type": "video"}])}, "more than 0 video placeholders for 0 videos"),
        (
            {"prompt": "<image>", "images": ["ftp://a/b.png"]},
            "images[0]: ftp://a/b.png is not downloaded. Save it next to",
        ),
        ({"prompt": "<image>", "images": ["data:image/png;base64,?"]}, "images[0]: the data URI is not base64"),
        (
            {"prompt": "<image>", "images": [3]},
            "images[0]: a path, a data URI or bytes are expected, found the number 3",
        ),
        ({"prompt": "<video>", "videos": ["a.mp4"]}, "videos[0]: {frames: [image, …], fps: frames per second}"),
        ({"prompt": "<video>", "videos": [{"frames": ["a"], "fps": 0}]}, "videos[0]: fps 0 is not above 0"),
        ({"prompt": user([{"type": "sound"}])}, "prompt[0].content[0]: a part with a text, an image or a video"),
        (
            {"prompt": user("a") + user(None)},
            "prompt[1]: content is null (role user, no tool_calls): write a text, or remove the message",
        ),
        ({"prompt": user(3)}, "prompt[0]: content is the number 3 (role user): write a text, or a list of parts"),
        ({"prompt": [{"role": None, "content": "a"}]}, "prompt[0]: role is null: write a text, such as user or"),
        ({"prompt": [{"role": "user"}]}, "prompt[0]: a message with the texts role and content is expected, found a"),
        ({"prompt": [{"role": "user", "content": "a", "name": 3}]}, "prompt[0].name: a text is expected, found the"),
        ({"prompt": "a", "tools": "[{"}, "toolsField 'tools': not JSON"),
        ({"prompt": "a", "tools": "[" * 200_000}, "toolsField 'tools': not JSON (nested too deeply)"),
        (
            {"prompt": [{"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}]},
            "prompt[0]: function_call is not read. Write tool_calls in place of function_call",
        ),
        (
            {"prompt": [{"role": "assistant", "content": "a", "reasoning": "b", "thinking": "c"}]},
            "prompt[0]: reasoning and thinking are different texts. Write one of them",
        ),
        (
            {"prompt": [{"role": "assistant", "content": "a", "weight": 0.5}]},
            "prompt[0].weight: 0, 1, false or true is expected, found the number 0.5",
        ),
        (
            {"prompt": "a", "answer": "\ud83d"},
            "answerField 'answer': half of a character in UTF-16, '\\ud83d' after ''",
        ),
        ({"prompt": "a", "tools": ["f"]}, "toolsField 'tools': a list of JSON schemas is expected, found a list of 1"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_with_the_reason(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    [problem] = problems(tmp_path, row)
    assert f"a.jsonl, line 1: {reason}" in problem


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({"function": {"arguments": {}}}, "a call with a function's name and arguments is expected"),
        ({"function": {"name": "f", "arguments": "{"}}, "the arguments are not JSON"),
        (
            {"function": {"name": "f", "arguments": f'{{"a": {"9" * 5000}}}'}},
            "the arguments are not JSON (an integer has",
        ),
        ({"function": {"name": "f", "arguments": "[1]"}}, "a mapping of arguments is expected, found a list of 1"),
    ],
)
def test_a_call_that_cannot_be_rendered_is_named(tmp_path: Path, call: dict[str, Any], reason: str) -> None:
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    [problem] = problems(tmp_path, {"prompt": [message]})
    assert f"prompt[0].tool_calls[0]: {reason}" in problem
