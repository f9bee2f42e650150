"""Answers with status 200 that are not what the Kubernetes API defines."""

import pytest

from qwen35_operator.kube import answers
from qwen35_operator.kube.api_errors import Unexpected


def test_an_api_group_without_kinds_may_list_null() -> None:
    assert answers.plurals("/apis/a/v1", {"resources": None}) == set()
    assert answers.plurals("/apis/a/v1", {"resources": [{"name": "pods"}]}) == {"pods"}


@pytest.mark.parametrize("answer", [{}, {"resources": "pods"}, {"resources": ["pods"]}], ids=str)
def test_an_answer_about_an_api_group_without_a_list_names_the_path_the_answer_and_the_likely_cause(answer) -> None:
    with pytest.raises(Unexpected, match=r"/apis/a/v1: the answer is not a list of resources, but \{.*proxies"):
        answers.plurals("/apis/a/v1", answer)


def test_the_last_page_of_a_list_has_no_token() -> None:
    page = answers.list_page("/api/v1/pods", {"metadata": {"resourceVersion": "5", "continue": ""}, "items": None})
    assert page == answers.ListPage([], "5", "")


METADATA = {"namespace": "system", "name": "operator", "uid": "u", "resourceVersion": "5"}


@pytest.mark.parametrize("spec", [{}, {"spec": None}, {"spec": {"leaseTransitions": 2}}], ids=str)
def test_a_lease_may_have_no_spec(spec) -> None:
    assert answers.lease("/leases/operator", {"metadata": METADATA, **spec}) == {"metadata": METADATA, **spec}


@pytest.mark.parametrize(
    "answer",
    [
        {"kind": "Status", "status": "Success"},
        {"metadata": {"name": "operator"}},
        {"metadata": METADATA, "spec": "free"},
        {"metadata": METADATA, "spec": {"leaseTransitions": "two"}},
    ],
    ids=str,
)
def test_an_answer_that_is_not_a_lease_is_unexpected(answer) -> None:
    with pytest.raises(Unexpected, match="/leases/operator: the answer is not a Lease"):
        answers.lease("/leases/operator", answer)
