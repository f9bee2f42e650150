"""A merge patch turns one object into the other, and contains nothing else."""

from hypothesis import given
from hypothesis import strategies as st

from qwen35_operator.kube.merge_patch import merge_patch
from tests.virtual.patches import MERGE_PATCH, patched

LEAVES = st.integers(0, 2) | st.text(max_size=1) | st.lists(st.integers(0, 2), max_size=2)
OBJECTS = st.recursive(
    st.dictionaries(st.sampled_from("abc"), LEAVES, max_size=3),
    lambda inside: st.dictionaries(st.sampled_from("abc"), LEAVES | inside, max_size=3),
    max_leaves=8,
)


@given(before=OBJECTS, after=OBJECTS)
def test_the_patched_object_is_the_wanted_one(before, after):
    assert patched(before, merge_patch(before, after), MERGE_PATCH) == after


@given(same=OBJECTS)
def test_equal_objects_need_no_patch(same):
    assert merge_patch(same, same) == {}


def test_only_what_differs_is_in_the_patch():
    before = {"state": "Running", "progress": {"update": 1, "version": 1}, "retry": "a", "pools": [{"ready": 1}]}
    after = {"state": "Running", "progress": {"update": 2, "version": 1}, "pools": [{"ready": 2}], "restarts": 0}
    changes = {"progress": {"update": 2}, "retry": None, "pools": [{"ready": 2}], "restarts": 0}
    assert merge_patch(before, after) == changes
