"""YAML means here what it means to kubectl."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.manifest.document import dump_document, parse_document

# As sigs.k8s.io/yaml, which kubectl uses, reads them.
SCALARS = {
    "1e-6": 1e-6,
    "1.5e3": 1500.0,
    ".5": 0.5,
    "010": 8,
    "0o17": 15,
    "0x1F": 31,
    "0b11": 3,
    "1_000": 1000,
    "+5": 5,
    "1:30": "1:30",
    "2026-01-01": "2026-01-01",
    "Off": False,
    "no": False,
    "y": True,
    "~": None,
    "": None,
}


@pytest.mark.parametrize(("text", "value"), SCALARS.items(), ids=repr)
def test_scalars_are_read_as_kubectl_reads_them(text, value):
    assert parse_document(f"key: {text}") == ({"key": value}, [])


def told(text):
    document, (problem,) = parse_document(text)
    assert document is None
    return problem.message, problem.fix


def test_broken_yaml_is_reported_with_its_line():
    assert told("a: 1\n  b: 2\n") == ("line 2, column 4: mapping values are not allowed here.", "The line: b: 2")


def test_a_key_that_is_written_twice_is_refused():
    assert told("a: 1\nb: 2\na: 3\n") == ("line 3, column 1: the key a is written twice.", "The line: a: 3")


def test_a_key_that_yaml_takes_for_a_boolean_is_refused():
    assert told("n: 3")[0] == "line 1, column 1: the key n is read as a boolean, quote it."


def test_a_key_that_looks_like_a_number_is_a_text():
    assert parse_document("{1: a}") == ({"1": "a"}, [])


def test_several_documents_are_listed():
    text = "kind: Qwen35Training\nmetadata: {name: a}\n---\nkind: Secret\n---\n- 1\n"
    assert told(text)[0] == "there are 3 documents (1: Qwen35Training a, 2: Secret, 3: list)."


def test_an_empty_document_does_not_count_as_a_second_one():
    assert parse_document("---\na: 1\n---\n") == ({"a": 1}, [])


def test_an_empty_file_is_reported():
    assert told("# nothing\n")[0] == "the file is empty."


def test_anchors_and_merges_work():
    assert parse_document("a: &x {k: 1}\nb: {<<: *x, j: 2}") == ({"a": {"k": 1}, "b": {"k": 1, "j": 2}}, [])


# Unicode's own line ends, which PyYAML folds into spaces, stand in no manifest.
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x85\u2028\u2029"))
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(TEXT, inside, max_size=3),
    max_leaves=8,
)


@given(value=PLAIN)
def test_what_is_dumped_is_read_back(value):
    assert parse_document(dump_document({"key": value})) == ({"key": value}, [])


@given(word=st.sampled_from([*SCALARS, "n", "N", "<<", "null", "1_0", ".inf", "0b1", "-"]))
def test_texts_that_look_like_something_else_are_read_back(word):
    assert parse_document(dump_document({word: word})) == ({word: word}, [])


def test_equal_parts_are_written_out_without_anchors():
    part = {"k": 1}
    assert dump_document({"a": part, "b": part}) == "a:\n  k: 1\nb:\n  k: 1\n"
