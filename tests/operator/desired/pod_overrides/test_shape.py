"""Items of merged lists must have keys by which they can be merged."""

import pytest

from qwen35_operator.desired.pod_overrides import shape


@pytest.mark.parametrize("protocol", [["TCP"], {}, 6])
def test_a_second_key_that_is_not_a_string_is_refused(protocol):
    """The API server does not know the type of such a field, and a list cannot identify an item."""
    change = {"spec": {"containers": [{"name": "ray", "ports": [{"containerPort": 1, "protocol": protocol}]}]}}
    (problem,) = shape.problems(change, "spec.pods.train")
    assert problem.path == "spec.pods.train.spec.containers[0].ports[0].protocol"
    assert "is not a string" in problem.message


@pytest.mark.parametrize("port", [{}, {"protocol": None}, {"protocol": "UDP"}])
def test_a_second_key_may_be_absent(port):
    change = {"spec": {"containers": [{"name": "ray", "ports": [{"containerPort": 1, **port}]}]}}
    assert list(shape.problems(change, "spec.pods.train")) == []
