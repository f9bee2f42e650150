"""Strategic merge: what it does to each kind of field, and what holds for all changes."""

import copy
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from qwen35_operator.desired.pod_overrides.merge import merge

TEMPLATE: dict[str, Any] = {
    "metadata": {"labels": {"a": "1", "b": "2"}},
    "spec": {
        "restartPolicy": "Never",
        "tolerations": [{"key": "gpu"}],
        "containers": [
            {
                "name": "ray",
                "env": [{"name": "X", "value": "1"}, {"name": "Y", "value": "2"}],
                "resources": {"limits": {"memory": "1Gi"}},
                "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
            }
        ],
        "volumes": [{"name": "shm", "emptyDir": {}}],
    },
}
NAMES = st.sampled_from(["ray", "logs", "X", "Y", "Z"])
VALUES = st.none() | st.text(max_size=3) | st.dictionaries(st.sampled_from("ab"), st.none() | st.text(max_size=2))


def items(key: str, **fields: st.SearchStrategy) -> st.SearchStrategy:
    entry = st.fixed_dictionaries({key: NAMES}, optional=fields | {"value": VALUES})
    return st.lists(entry, max_size=3, unique_by=lambda item: item[key])


CONTAINERS = items(
    "name",
    env=items("name"),
    volumeMounts=items("mountPath"),
    resources=st.dictionaries(st.sampled_from(["limits", "requests"]), VALUES),
)
CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "metadata": st.fixed_dictionaries({}, optional={"labels": st.dictionaries(st.sampled_from("abc"), VALUES)}),
        "spec": st.fixed_dictionaries(
            {},
            optional={
                "containers": CONTAINERS,
                "volumes": items("name"),
                "tolerations": st.none() | st.lists(st.dictionaries(st.sampled_from("ab"), VALUES), max_size=2),
                "affinity": VALUES,
            },
        ),
    },
)


@given(change=CHANGES)
def test_merging_twice_is_merging_once(change):
    once = merge(TEMPLATE, change)
    assert merge(once, change) == once


@given(change=CHANGES)
def test_what_is_merged_stays_as_it_was(change):
    template, kept = copy.deepcopy(TEMPLATE), copy.deepcopy(change)
    merge(template, change)
    assert template == TEMPLATE
    assert change == kept


@given(change=CHANGES)
def test_items_that_were_there_keep_their_places(change):
    merged = merge(TEMPLATE, change)["spec"]
    assert merged["containers"][0]["name"] == "ray"
    assert merged["volumes"][0]["name"] == "shm"
    env = [entry["name"] for entry in merged["containers"][0]["env"]]
    assert env[:2] == ["X", "Y"]


@given(change=CHANGES)
def test_no_list_names_anything_twice(change):
    spec = merge(TEMPLATE, change)["spec"]
    for named in (spec["containers"], spec["volumes"], spec["containers"][0]["env"]):
        assert len({item["name"] for item in named}) == len(named)


def test_an_empty_change_changes_nothing():
    assert merge(TEMPLATE, {}) == TEMPLATE


def test_null_takes_a_key_out():
    assert merge(TEMPLATE, {"metadata": {"labels": {"a": None, "none": None}}})["metadata"]["labels"] == {"b": "2"}


def test_null_in_something_new_leaves_nothing_behind():
    change = {"spec": {"containers": [{"name": "logs", "image": "i", "resources": {"limits": {"cpu": None}}}]}}
    assert merge(TEMPLATE, change)["spec"]["containers"][1] == {
        "name": "logs",
        "image": "i",
        "resources": {"limits": {}},
    }


def test_variables_merge_by_name():
    change = {
        "spec": {"containers": [{"name": "ray", "env": [{"name": "Y", "value": "3"}, {"name": "Z", "value": "4"}]}]}
    }
    env = merge(TEMPLATE, change)["spec"]["containers"][0]["env"]
    assert env == [{"name": "X", "value": "1"}, {"name": "Y", "value": "3"}, {"name": "Z", "value": "4"}]


def test_tolerations_are_replaced_as_a_whole():
    assert merge(TEMPLATE, {"spec": {"tolerations": [{"key": "spot"}]}})["spec"]["tolerations"] == [{"key": "spot"}]


def test_ports_are_distinguished_by_protocol_and_tcp_is_the_default():
    dns = {"name": "dns", "ports": [{"containerPort": 53}, {"containerPort": 53, "protocol": "UDP"}]}
    once = merge(TEMPLATE, {"spec": {"containers": [dns]}})
    named = {"name": "dns", "ports": [{"containerPort": 53, "protocol": "TCP", "name": "tcp"}]}
    ports = merge(once, {"spec": {"containers": [named]}})["spec"]["containers"][1]["ports"]
    assert ports == [
        {"containerPort": 53, "protocol": "TCP", "name": "tcp"},
        {"containerPort": 53, "protocol": "UDP"},
    ]
