"""Keys and values of labels, wherever a pod template may have them; tests/controlplane compares them with the API server."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_operator.desired import all_objects
from qwen35_operator.desired.pod_overrides import label_syntax
from qwen35_operator.desired.pod_overrides.label_syntax import MAX_ANNOTATION_BYTES
from qwen35_operator.operator_settings import OperatorSettings

VALUES = ["", "a", "A-b_c.9", "0", "a" * 63]
NO_VALUES = ["a b", "-a", "a-", ".", "a/b", "ß", "a" * 64, "a\n", "*"]
KEYS = ["a", "A.b-c_d", "example.com/a", "a-b.c/" + "n" * 63, "a" * 63, ".".join(["a" * 62] * 4) + "/n"]
NO_KEYS = ["", "a b", "-a", "a/", "/a", "a/b/c", "Example.com/a", "a..b/c", "a_b/c", "a" * 64, "a" * 254 + "/n", "a\n"]


def requirement(key: str = "a", value: str = "b") -> dict[str, Any]:
    return {"key": key, "operator": "In", "values": [value]}


def node_affinity(*expressions: dict[str, Any]) -> dict[str, Any]:
    required = {"nodeSelectorTerms": [{"matchExpressions": list(expressions)}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}


def pod_affinity(key: str = "zone", **selector: Any) -> dict[str, Any]:
    term = {"weight": 1, "podAffinityTerm": {"topologyKey": key, "labelSelector": selector}}
    return {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [term]}}


def spread(key: str = "zone", **selector: Any) -> list[dict[str, Any]]:
    rest = {"maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule"}
    return [{"topologyKey": key, "labelSelector": selector} | rest]


REQUIRED = "nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchExpressions"
PREFERRED = "podAntiAffinity.preferredDuringSchedulingIgnoredDuringExecution[0].podAffinityTerm"
# How a key, or a value, gets into a template, and where it is found to be wrong.
KEY_PLACES: dict[str, Any] = {
    "metadata.labels.{}": lambda key: {"metadata": {"labels": {key: "x"}}},
    "spec.nodeSelector.{}": lambda key: {"spec": {"nodeSelector": {key: "x"}}},
    "spec.tolerations[0].key": lambda key: {"spec": {"tolerations": [{"key": key, "operator": "Exists"}]}},
    f"spec.affinity.{REQUIRED}[0].key": lambda key: {"spec": {"affinity": node_affinity(requirement(key=key))}},
    f"spec.affinity.{PREFERRED}.topologyKey": lambda key: {"spec": {"affinity": pod_affinity(key)}},
    "spec.topologySpreadConstraints[0].topologyKey": lambda key: {"spec": {"topologySpreadConstraints": spread(key)}},
}
VALUE_PLACES: dict[str, Any] = {
    "metadata.labels.a": lambda value: {"metadata": {"labels": {"a": value}}},
    "spec.nodeSelector.a": lambda value: {"spec": {"nodeSelector": {"a": value}}},
    "spec.tolerations[0].value": lambda value: {"spec": {"tolerations": [{"key": "a", "value": value}]}},
    f"spec.affinity.{REQUIRED}[0].values[0]": lambda value: {
        "spec": {"affinity": node_affinity(requirement(value=value))}
    },
    f"spec.affinity.{PREFERRED}.labelSelector.matchLabels.a": lambda value: {
        "spec": {"affinity": pod_affinity(matchLabels={"a": value})}
    },
    "spec.topologySpreadConstraints[0].labelSelector.matchExpressions[0].values[0]": lambda value: {
        "spec": {"topologySpreadConstraints": spread(matchExpressions=[requirement(value=value)])}
    },
}


@pytest.fixture
def refused(make_training):
    """refused({...}) are the paths of the problems with such a train pool's template, below spec.pods.train."""

    def paths(change: object) -> list[str]:
        problems = all_objects.problems(make_training({"pods.train": change}), OperatorSettings())
        assert all(problem.message and problem.fix for problem in problems)
        return [problem.path.removeprefix("spec.pods.train.") for problem in problems]

    return paths


@pytest.mark.parametrize("place", VALUE_PLACES)
def test_a_value_that_is_none_is_named_where_it_is(place, refused):
    for value in VALUES:
        assert refused(VALUE_PLACES[place](value)) == [], value
    for value in NO_VALUES:
        assert refused(VALUE_PLACES[place](value)) == [place], value


@pytest.mark.parametrize("place", KEY_PLACES)
def test_a_key_that_is_none_is_named_where_it_is(place, refused):
    for key in KEYS:
        assert refused(KEY_PLACES[place](key)) == [], key
    for key in filter(None, NO_KEYS):
        assert refused(KEY_PLACES[place](key)) == [place.format(key)], key


def test_keys_of_annotations_may_have_capitals_and_their_values_are_free(refused):
    assert refused({"metadata": {"annotations": {"Example.COM/Note": "a b ß"}}}) == []
    assert refused({"metadata": {"annotations": {"a note": "x"}}}) == ["metadata.annotations.a note"]


def test_annotations_are_bounded_all_together(refused):
    half = "x" * (MAX_ANNOTATION_BYTES // 2)
    assert refused({"metadata": {"annotations": {"a": half}}}) == []
    assert refused({"metadata": {"annotations": {"a": half, "b": half}}}) == ["metadata.annotations"]


def test_a_toleration_names_its_taint_or_all(refused):
    assert refused({"spec": {"tolerations": [{"operator": "Exists"}]}}) == []
    assert refused({"spec": {"tolerations": [{"effect": "NoSchedule"}]}}) == ["spec.tolerations[0].key"]
    both = {"key": "a", "operator": "Exists", "value": "b"}
    assert refused({"spec": {"tolerations": [both]}}) == ["spec.tolerations[0].value"]


def test_every_one_of_them_is_reported(refused):
    change = {
        "metadata": {"labels": {"a": "b c"}},
        "spec": {
            "nodeSelector": {"d e": "f g"},
            "affinity": node_affinity(requirement("h i"), requirement("j", "k l")),
        },
    }
    assert len(refused(change)) == 5


WORDS = st.sampled_from(["matchLabels", "matchExpressions", "topologyKey", "key", "values", "nodeAffinity", "a b"])
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inside: st.lists(inside, max_size=2) | st.dictionaries(WORDS, inside, max_size=3),
    max_leaves=12,
)


@given(affinity=ANYTHING, spread=ANYTHING, toleration=st.dictionaries(WORDS, ANYTHING, max_size=3))
def test_any_document_is_judged_without_an_exception(affinity, spread, toleration):
    spec = {"affinity": affinity, "topologySpreadConstraints": spread, "tolerations": [toleration]}
    for problem in label_syntax.problems({"metadata": {"labels": {}}, "spec": spec}, "spec.pods.train"):
        assert str(problem)
