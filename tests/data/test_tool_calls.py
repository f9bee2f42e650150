import re
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from qwen35_trainer.data import MalformedCall, ToolCall, parse_tool_calls
from tests.data.qwen import template

TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string"},
                "limit": {"type": "integer"},
                "exact": {"type": "boolean"},
                "filters": {"type": "object"},
                "sites": {"type": "array"},
            },
        },
    },
}


def parameter(name: str, value: str) -> str:
    return f"<parameter={name}>\n{value}\n</parameter>\n"


def call(*parameters: str, name: str = "search") -> str:
    return f"<tool_call>\n<function={name}>\n{''.join(parameters)}</function>\n</tool_call>"


def test_a_call_has_typed_arguments_and_the_text_before_it() -> None:
    parsed = parse_tool_calls(
        "我来查一下 🔍\n\n"
        + call(
            parameter("query", "天气\n明天"),
            parameter("limit", "3"),
            parameter("exact", "True"),
            parameter("filters", '{"语言": null}'),
            parameter("sites", "['a', None]"),
        ),
        [TOOL],
    )
    assert parsed.content == "我来查一下 🔍\n\n"
    arguments = {
        "query": "天气\n明天",
        "limit": 3,
        "exact": True,
        "filters": {"语言": None},
        "sites": ["a", None],
    }
    assert parsed.calls == (ToolCall("search", arguments),)
    assert parsed.stray == ()


def test_arguments_are_written_as_json_with_their_own_letters() -> None:
    [parsed_call] = parse_tool_calls(call(parameter("query", "北京 🎉")), [TOOL]).calls
    assert isinstance(parsed_call, ToolCall)
    assert parsed_call.arguments_json == '{"query": "北京 🎉"}'


def test_text_without_a_call_is_content() -> None:
    for text in ("", "no <function=a></function> call"):
        assert parse_tool_calls(text).content == text
        assert parse_tool_calls(text).calls == ()


def test_empty_values_are_kept() -> None:
    text = call("<parameter=query></parameter>", parameter("limit", ""), name="anything")
    assert parse_tool_calls(text).calls[0] == ToolCall(
        "anything", {"query": "", "limit": ""}, ("unknown tool 'anything'; there are none",)
    )
    assert parse_tool_calls(call("<parameter=query>\n</parameter>"), [TOOL]).calls == (
        ToolCall("search", {"query": ""}),
    )


@pytest.mark.parametrize(
    ("written", "value"), [("\n\na\n\n", "\na\n"), ("a", "a"), ("\n  a \n", "  a "), ("\na", "a"), ("\r\na", "\r\na")]
)
def test_one_newline_goes_from_each_end_and_nothing_else(written: str, value: str) -> None:
    text = call(f"<parameter=query>{written}</parameter>")
    assert parse_tool_calls(text, [TOOL]).calls == (ToolCall("search", {"query": value}),)


def test_a_value_may_hold_every_tag_but_its_own_closing_one() -> None:
    value = "<tool_call></tool_call> </function>\n<tool_call>\n<function=x>\n</function> <parameter=y>"
    text = call(parameter("query", value), parameter("limit", "1"))
    assert parse_tool_calls(text, [TOOL]).calls == (ToolCall("search", {"query": value, "limit": 1}),)


@pytest.mark.parametrize(
    "value",
    [
        "a\n<parameter=limit>\n1",
        "<parameter=query>",
        "a\n</function>\n</tool_call>\nb",
        f"{call()}\n{call(name='other')}",
        "<tool_call>\n<function=x>\n<parameter=y>\n</function>\n</tool_call>",
    ],
)
def test_a_value_may_quote_the_lines_of_a_call(value: str) -> None:
    text = call(parameter("query", value), parameter("limit", "1"))
    parsed = parse_tool_calls(text + call(parameter("limit", "7")), [TOOL])
    assert parsed.calls == (ToolCall("search", {"query": value, "limit": 1}), ToolCall("search", {"limit": 7}))


def test_a_parameter_left_open_ends_with_the_next_closing_tag_of_its_call() -> None:
    text = call("<parameter=query>\na\n", parameter("limit", "1"))
    assert parse_tool_calls(text, [TOOL]).calls == (ToolCall("search", {"query": "a\n<parameter=limit>\n1"}),)


def test_a_parameter_left_open_takes_nothing_from_later_calls() -> None:
    unclosed = call("<parameter=query>\na\n")
    parsed = parse_tool_calls("\n".join([unclosed, call(), unclosed, call(parameter("limit", "7")), unclosed]), [TOOL])
    malformed = MalformedCall(unclosed, "parameter 'query' is not closed")
    seven = ToolCall("search", {"limit": 7})
    assert parsed.calls == (malformed, ToolCall("search", {}), malformed, seven, malformed)


def test_several_calls_are_in_order_and_text_between_them_is_reported() -> None:
    text = "a" + call(parameter("limit", "1")) + "\n" + call(parameter("limit", "2")) + " so \n" + call() + "\nend"
    parsed = parse_tool_calls(text, [TOOL])
    assert [parsed_call.arguments for parsed_call in parsed.calls if isinstance(parsed_call, ToolCall)] == [
        {"limit": 1},
        {"limit": 2},
        {},
    ]
    assert (parsed.content, parsed.stray) == ("a", ("so", "end"))


WHOLE = call(parameter("query", "北京"), parameter("limit", "12"))


@pytest.mark.parametrize("length", range(len("<tool_call>\n<function=search>"), len(WHOLE)))
def test_a_call_cut_off_at_the_token_limit_is_marked_and_keeps_what_it_has(length: int) -> None:
    [parsed_call] = parse_tool_calls(WHOLE[:length], [TOOL]).calls
    assert isinstance(parsed_call, ToolCall)
    assert parsed_call.cut_off
    if "北京" in WHOLE[:length]:
        assert parsed_call.arguments["query"] == "北京"
    assert str(parsed_call.arguments.get("limit", "")) in ("", "1", "12")


def test_a_value_cut_off_keeps_what_only_looks_like_its_closing_tag() -> None:
    for value in ("a </para", "a <", "a\n</param>", "a\n<parameter=b>\n1"):
        [parsed_call] = parse_tool_calls(f"<tool_call>\n<function=search>\n<parameter=query>\n{value}", [TOOL]).calls
        assert parsed_call == ToolCall("search", {"query": value}, cut_off=True)


def test_a_call_cut_off_within_its_name_is_malformed_and_marked() -> None:
    for text in ("<tool_call>", "<tool_call>\n<func", "<tool_call>\n<function=sea"):
        [parsed_call] = parse_tool_calls(text, [TOOL]).calls
        assert isinstance(parsed_call, MalformedCall)
        assert parsed_call.cut_off
        assert parsed_call.text == text


def test_a_whole_call_is_not_cut_off() -> None:
    [parsed_call] = parse_tool_calls(WHOLE, [TOOL]).calls
    assert isinstance(parsed_call, ToolCall)
    assert not parsed_call.cut_off


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ("<tool_call>\n{}\n</tool_call>", "<function=NAME> is expected after <tool_call>"),
        ("<tool_call>\n<function=search\n</function>\n</tool_call>", "<function= has no name that ends in >"),
        ("<tool_call>\n<function= >\n</function>\n</tool_call>", "<function=> has no name"),
        (call("<parameter=query\nx\n</parameter>\n"), "<parameter= has no name that ends in >"),
        (call("<parameter=query>\nx\n"), "parameter 'query' is not closed"),
        (call(parameter("limit", "1"), parameter("limit", "2")), "parameter 'limit' is there twice"),
        (call(parameter("limit", "1"), "and\n"), "</function> is expected after"),
        ("<tool_call>\n<function=search>\n</function>\nx</tool_call>", "</tool_call> is expected after"),
    ],
)
def test_a_malformed_call_says_why_and_the_next_one_is_read(broken: str, reason: str) -> None:
    parsed = parse_tool_calls(broken + "\n" + call(parameter("limit", "7")), [TOOL])
    first, second = parsed.calls
    assert isinstance(first, MalformedCall)
    assert reason in first.reason
    assert first.text == broken
    assert not first.cut_off
    assert second == ToolCall("search", {"limit": 7})


def test_names_and_values_that_do_not_fit_the_tool_are_reported_and_kept_as_text() -> None:
    required = {"function": {"name": "f", "parameters": {"properties": {"n": {"type": "int"}}, "required": ["n", "m"]}}}
    text = call(parameter("n", "many"), parameter("other", "1"), name="f")
    assert parse_tool_calls(text, [required]).calls == (
        ToolCall(
            "f",
            {"n": "many", "other": "1"},
            ("parameter 'n': 'many' is not an integer", "f has no parameter 'other'; it has n", "f needs m"),
        ),
    )
    [unknown] = parse_tool_calls(call(parameter("n", "1"), name="g"), [required]).calls
    assert unknown == ToolCall("g", {"n": "1"}, ("unknown tool 'g'; there are f",))


FRAGMENTS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>", ">", "search", "\n"]
)


@given(st.lists(FRAGMENTS | st.text(max_size=3)).map("".join))
def test_no_text_makes_it_raise_and_none_is_lost(text: str) -> None:
    parsed = parse_tool_calls(text, [TOOL])
    assert text.startswith(parsed.content)
    assert bool(parsed.calls) == ("<tool_call>" in text)


LINES = ["<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=a>", "</function>\n</tool_call>"]
TEXT = st.text(st.characters(codec="utf-8")) | st.lists(st.sampled_from(LINES) | st.text(max_size=3)).map("\n".join)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
VALUES = {
    "string": TEXT.filter(lambda text: text.strip().lower() != "null"),
    "integer": st.integers(),
    "number": st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    "boolean": st.booleans(),
    "object": st.dictionaries(TEXT, JSON, max_size=3),
    "array": st.lists(JSON, max_size=3),
}
NAMES = st.text(st.characters(exclude_characters="<>\n", codec="utf-8"), min_size=1, max_size=8).filter(
    lambda name: name == name.strip()
)


LATER_CALL = re.compile(r"\n</function>\s*</tool_call>(.|\n)*<tool_call>\s*<function=[^<>\n]*>\s*<parameter=")


def unambiguous(value: object) -> bool:
    """Texts that the format, which has no escapes, can carry: no closing tag, no end of a call before a later one's value."""
    return "</parameter>" not in str(value) and not LATER_CALL.search(f"\n{value}")


@st.composite
def typed_arguments(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    names = draw(st.lists(NAMES, unique=True, max_size=4))
    kinds = {name: draw(st.sampled_from(sorted(VALUES))) for name in names}
    values = {name: draw(VALUES[kind].filter(unambiguous)) for name, kind in kinds.items()}
    return {name: {"type": kind} for name, kind in kinds.items()}, values


@pytest.mark.parametrize("published", ["qwen3_5_think", "qwen3_6"])
@given(arguments=typed_arguments())
def test_what_the_published_templates_write_is_read_back(
    published: str, arguments: tuple[Mapping[str, Any], Mapping[str, Any]]
) -> None:
    properties, values = arguments
    message = {
        "role": "assistant",
        "content": "好的 👌",
        "tool_calls": [{"function": {"name": "f", "arguments": values}}],
    }
    [text], _ = render_jinja_template([[{"role": "user", "content": "a"}, message]], chat_template=template(published))
    response = text.split("</think>\n\n", 1)[1].removesuffix("<|im_end|>\n")
    parsed = parse_tool_calls(response, [{"name": "f", "parameters": {"properties": properties}}])
    assert parsed.content == "好的 👌\n\n"
    assert parsed.calls == (ToolCall("f", values),)
