"""The operator takes over the fields that it wrote by creating and patching, so that an apply can remove them."""

from copy import deepcopy

from qwen35_operator.kube.field_ownership import FIELD_MANAGER, taken_over


def entry(operation: str, fields: dict, manager: str = FIELD_MANAGER, **more: str) -> dict:
    return {"manager": manager, "operation": operation, "apiVersion": "v1", "fieldsV1": fields, **more}


CREATED = entry("Update", {"f:data": {".": {}, "f:a": {}}, "f:metadata": {"f:labels": {"f:x": {}}}}, time="t1")
FOREIGN = entry("Update", {"f:metadata": {"f:labels": {"f:team": {}}}}, "kubectl-edit")
STATUS = entry("Update", {"f:status": {}}, subresource="status")
APPLIED = entry("Apply", {"f:data": {"f:b": {}}}, time="t2")


def test_what_was_created_is_owned_by_apply_from_then_on():
    entries = [FOREIGN, CREATED, STATUS]
    before = deepcopy(entries)
    changed = taken_over(entries)
    assert changed == [FOREIGN, STATUS, {**CREATED, "operation": "Apply"}]
    assert taken_over(changed) is None
    assert entries == before


def test_a_release_that_was_taken_back_has_patched_what_a_later_one_had_applied():
    changed = taken_over([APPLIED, CREATED])
    union = {"f:data": {".": {}, "f:a": {}, "f:b": {}}, "f:metadata": {"f:labels": {"f:x": {}}}}
    assert changed == [{**APPLIED, "fieldsV1": union}]


def test_fields_of_another_version_of_the_kind_are_given_up():
    earlier = {**CREATED, "apiVersion": "v1beta1"}
    assert taken_over([APPLIED, earlier]) == [APPLIED]


def test_there_is_nothing_to_take_over_twice():
    for entries in ([], [FOREIGN], [STATUS], [APPLIED, FOREIGN]):
        assert taken_over(entries) is None
