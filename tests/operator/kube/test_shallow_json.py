"""JSON that is nested too deeply for Python is read without what is too deep, and any other JSON as it is."""

import copy
import json
import tracemalloc
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_operator.kube import shallow_json
from qwen35_operator.kube.shallow_json import MAX_DEPTH, TOO_DEEP
from qwen35_operator.kube.text_lines import lines

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('[]{}",:\\ aé\n', max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('[{}]"\\a', max_size=3), inner, max_size=4),
    max_leaves=30,
)


def nested(levels: int, opening: str = '{"a":', closing: str = "}") -> str:
    return opening * levels + "1" + closing * levels


def levels_of(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(levels_of, value.values()), default=0)
    return 1 + max(map(levels_of, value), default=0) if isinstance(value, list) else 0


@given(values, st.booleans(), st.sampled_from([None, 1]))
def test_what_is_not_too_deep_is_read_as_it_is(value, plain, indent):
    text = json.dumps(value, ensure_ascii=plain, indent=indent).encode()
    assert shallow_json.loads(text) == value
    assert shallow_json.shallow(text) is text
    assert shallow_json.depth(text) == levels_of(value)


@given(st.lists(values, min_size=1, max_size=3), st.integers(MAX_DEPTH - 3, MAX_DEPTH + 30))
def test_what_is_too_deep_is_left_out_and_all_values_next_to_it_stay(beside, levels):
    """The deep part stands between other values, in the same list and in the lists around it."""
    deep: object = "bottom"
    for _ in range(levels):
        deep = [*beside, deep, *beside]
    read = shallow_json.loads(json.dumps(deep).encode())
    assert levels_of(read) <= MAX_DEPTH
    for level in range(min(levels, MAX_DEPTH)):
        if level < MAX_DEPTH - max(map(levels_of, beside)) - 1:
            assert read[: len(beside)] == beside
            assert read[len(beside) + 1 :] == beside
        read = read[len(beside)]
    assert read == ("bottom" if levels <= MAX_DEPTH else TOO_DEEP)


@pytest.mark.parametrize("levels", [MAX_DEPTH + 1, 1_900, 10_000], ids=["just too deep", "python fails", "API server"])
@pytest.mark.parametrize(("opening", "closing"), [('{"a":', "}"), ("[", "]"), ('[{"}":', "}]")])
def test_any_depth_can_be_read_and_copied(levels, opening, closing):
    text = (
        f'{{"metadata": {{"name": "x"}}, "spec": {nested(levels, opening, closing)}, "status": {{"state": "Running"}}}}'
    )
    read = shallow_json.loads(text.encode())
    assert (read["metadata"], read["status"]) == ({"name": "x"}, {"state": "Running"})
    assert TOO_DEEP in json.dumps(copy.deepcopy(read["spec"]))


@pytest.mark.parametrize("kept", [50, 700, 1_499])
def test_a_text_that_is_cut_off_is_refused(kept):
    text = nested(250).encode()
    with pytest.raises(ValueError, match="Expecting"):
        shallow_json.loads(text[:kept])


@given(st.lists(values, max_size=5), st.booleans(), st.sampled_from([None, 1]))
def test_of_a_list_each_item_is_replaced_and_all_else_is_read_as_it_is(items, first, indent):
    beside = {"apiVersion": "v1", "kind": "List", "metadata": {"resourceVersion": "5", "continue": '"items":[{'}}
    answer = {"items": items} | beside if first else beside | {"items": items}
    text = json.dumps(answer, indent=indent).encode()
    assert shallow_json.loads_list(text, lambda item: item) == answer
    assert shallow_json.loads_list(text, lambda item: [item])["items"] == [[item] for item in items]


@pytest.mark.parametrize("levels", [MAX_DEPTH + 1, 1_900, 10_000])
def test_an_item_of_a_list_that_is_too_deep_spoils_no_other(levels):
    text = f'{{"items":[{{"name":"a"}},{nested(levels)},{{"name":"b"}}],"metadata":{{}}}}'
    first, deep, last = shallow_json.loads_list(text.encode(), lambda item: item)["items"]
    assert (first, last) == ({"name": "a"}, {"name": "b"})
    assert levels_of(deep) <= MAX_DEPTH
    assert TOO_DEEP in json.dumps(deep)


@pytest.mark.parametrize("text", ["", '{"items":[', '{"items":[{}', '{"items":[{},', '{"items":[]'])
def test_a_list_that_is_cut_off_is_refused(text):
    with pytest.raises(ValueError, match="Expecting"):
        shallow_json.loads_list(text.encode(), lambda item: item)


@pytest.mark.parametrize("answer", [{"items": None, "metadata": {}}, {"kind": "Status"}, [{"items": []}]])
def test_an_answer_without_a_list_is_read_as_any_other(answer):
    assert shallow_json.loads_list(json.dumps(answer).encode(), lambda item: 1) == answer


def test_a_page_of_objects_that_take_much_memory_is_parsed_one_at_a_time():
    """Six trainings of 300 kB each, as anybody may create them. Parsed together they would take 43 MB."""
    item = '{"metadata":{"name":"x"},"spec":{"a":[' + ",".join(["{}"] * 100_000) + "]}}"
    text = ('{"items":[' + ",".join([item] * 6) + "]}").encode()
    tracemalloc.start()
    try:
        read = shallow_json.loads_list(text, lambda item: item["metadata"])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert read == {"items": [{"name": "x"}] * 6}
    assert peak < 20 * 2**20


@given(st.lists(values, max_size=5), st.integers(1, 40))
async def test_lines_come_whole_whatever_the_chunks(events, size):
    text = "\n".join([*map(json.dumps, events), nested(200)]).encode()

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(text), size):
            yield text[start : start + size]

    *whole, last = [shallow_json.shallow(line) async for line in lines(chunks())]
    assert [json.loads(line) for line in whole] == events
    assert all(line.endswith(b"\n") for line in whole)
    assert levels_of(json.loads(last)) == MAX_DEPTH
