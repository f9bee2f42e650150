import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.data.tool_values import JsonValue, typed_value


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "string"}, "5"),
        (" 5 ", {"type": "int32"}, 5),
        ("-5", {"type": "long"}, -5),
        ("2.50", {"type": "float"}, 2.5),
        ("2.0", {"type": "number"}, 2),
        ("1e3", {"type": "number"}, 1000),
        ("FALSE", {"type": "bool"}, False),
        ("null", {"type": "string"}, None),
        ("NULL", {"type": "integer"}, None),
        ("None", {"type": "string"}, "None"),
        ("None", {"type": ["string", "null"]}, None),
        ("[true, null]", {"type": "array"}, [True, None]),
        ("(1, 'a')", {"type": "array"}, [1, "a"]),
        ("{'a': True}", {"type": "dict"}, {"a": True}),
        ('{"a": [1, {"b": "ü"}]}', {"type": "object"}, {"a": [1, {"b": "ü"}]}),
        ("7", {"type": ["integer", "string"]}, 7),
        ("seven", {"type": ["integer", "string"]}, "seven"),
        ("7", {"anyOf": [{"type": "boolean"}, {"type": "integer"}]}, 7),
        ("7", {"enum": ["7", "8"]}, "7"),
        ("[1]", {}, [1]),
        ("plain", {}, "plain"),
        ("plain", {"type": "tuple"}, "plain"),
    ],
)
def test_a_value_has_the_type_that_the_schema_names(text: str, schema: dict[str, object], value: JsonValue) -> None:
    typed, problem = typed_value(text, schema)
    assert problem is None
    assert typed == value
    assert type(typed) is type(value)


@pytest.mark.parametrize(
    ("text", "kind", "reason"),
    [
        ("2.5", "integer", "'2.5' is not an integer"),
        ("1_000", "integer", "is not an integer"),
        ("９", "integer", "is not an integer"),
        ("1e999", "number", "is not a number"),
        ("nan", "number", "is not a number"),
        ("yes", ["boolean", "integer"], "'yes' is neither true nor false and 'yes' is not an integer"),
        ("[1]", "object", "is not an object"),
        ("{}", "array", "is not an array"),
        ("[1", "array", "neither JSON nor a Python literal"),
        ("[NaN]", "array", "neither JSON nor a Python literal"),
        ("{1: 2}", "object", "neither JSON nor a Python literal"),
        ("[b'a']", "array", "neither JSON nor a Python literal"),
        ("[" * 100_000, "array", "neither JSON nor a Python literal"),
        ("0", "null", "'0' is not null"),
    ],
)
def test_a_value_of_another_type_stays_text_and_the_reason_is_given(
    text: str, kind: str | list[str], reason: str
) -> None:
    value, problem = typed_value(text, {"type": kind})
    assert value == text
    assert problem is not None
    assert reason in problem


@pytest.mark.parametrize("kind", ["boolean", ["boolean", "null"]])
def test_a_boolean_that_is_neither_is_false_and_the_reason_is_given(kind: str | list[str]) -> None:
    value, problem = typed_value("yes", {"type": kind})
    assert value is False
    assert problem == "'yes' is neither true nor false"


def test_text_is_never_run() -> None:
    text = "[__import__('os').getcwd()]"
    assert typed_value(text, {"type": "array"}) == (text, f"{text!r} is neither JSON nor a Python literal")


SCHEMAS = st.recursive(
    st.dictionaries(st.sampled_from(["type", "enum", "anyOf"]), st.text(max_size=4) | st.integers() | st.none()),
    lambda inner: st.fixed_dictionaries({"anyOf": st.lists(inner, max_size=2)}),
    max_leaves=4,
)


@given(st.text(), st.sampled_from(["int", "number", "bool", "object", "array", "null", "any"]) | SCHEMAS)
def test_anything_has_a_value_of_its_type_or_a_reason(text: str, schema: str | dict[str, object]) -> None:
    expected = {"int": int, "number": int | float, "bool": bool, "object": dict, "array": list}
    value, problem = typed_value(text, {"type": schema} if isinstance(schema, str) else schema)
    if problem is None and isinstance(schema, str) and schema in expected and value is not None:
        assert isinstance(value, expected[schema])
