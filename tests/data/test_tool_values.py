import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.data.tool_values import Json, typed_value


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
def test_a_value_has_the_type_that_the_schema_names(text: str, schema: dict[str, object], value: Json) -> None:
    found = typed_value(text, schema)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "kind", "reason"),
    [
        ("2.5", "integer", "'2.5' is no integer"),
        ("1_000", "integer", "is no integer"),
        ("９", "integer", "is no integer"),
        ("1e999", "number", "is not a number"),
        ("nan", "number", "is not a number"),
        ("yes", "boolean", "'yes' is neither true nor false"),
        ("[1]", "object", "is no object"),
        ("{}", "array", "is no array"),
        ("[1", "array", "neither JSON nor a Python literal"),
        ("[NaN]", "array", "neither JSON nor a Python literal"),
        ("{1: 2}", "object", "neither JSON nor a Python literal"),
        ("[b'a']", "array", "neither JSON nor a Python literal"),
        ("[" * 100_000, "array", "neither JSON nor a Python literal"),
        ("0", "null", "'0' is not null"),
    ],
)
def test_a_value_of_another_type_is_refused_with_the_reason(text: str, kind: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason.replace("[", r"\[")):
        typed_value(text, {"type": kind})


def test_text_is_never_run() -> None:
    with pytest.raises(ValueError, match="neither JSON nor a Python literal"):
        typed_value("[__import__('os').getcwd()]", {"type": "array"})


SCHEMAS = st.recursive(
    st.dictionaries(st.sampled_from(["type", "enum", "anyOf"]), st.text(max_size=4) | st.integers() | st.none()),
    lambda inner: st.fixed_dictionaries({"anyOf": st.lists(inner, max_size=2)}),
    max_leaves=4,
)


@given(st.text(), st.sampled_from(["int", "number", "bool", "object", "array", "null", "any"]) | SCHEMAS)
def test_anything_has_a_value_of_its_type_or_a_reason(text: str, schema: str | dict[str, object]) -> None:
    expected = {"int": int, "number": int | float, "bool": bool, "object": dict, "array": list}
    try:
        value = typed_value(text, {"type": schema} if isinstance(schema, str) else schema)
    except ValueError:
        return
    if isinstance(schema, str) and schema in expected and value is not None:
        assert isinstance(value, expected[schema])
