"""A manifest of an earlier version: each old name is answered with the new one."""

import pytest

from qwen35_trainer.manifest import TrainingSpec, fields, parse_spec
from qwen35_trainer.manifest.renamed import FIELDS, VALUES
from tests.manifest.conftest import segments


@pytest.mark.parametrize("old", FIELDS)
def test_a_new_name_is_a_field_and_the_old_one_is_not(old):
    assert fields.at(TrainingSpec, segments(FIELDS[old])) is not None
    *parents, name = segments(old)
    section = fields.section(fields.at(TrainingSpec, parents)) if parents else TrainingSpec
    assert section is None or name not in fields.fields(section)


@pytest.mark.parametrize("old", [path for path in FIELDS if "[]" not in path])
def test_an_old_field_is_answered_with_its_new_name(document, old):
    _, problems = parse_spec(document({old: {}})["spec"])
    (problem,) = [problem for problem in problems if problem.path == f"spec.{old}"]
    assert problem.message == "this is not a known field."
    assert problem.fix == f"Renamed to spec.{FIELDS[old]}."


def test_an_old_field_of_a_list_is_answered_with_its_new_name(document):
    variable = {"name": "KEY", "secret": {"name": "vault", "key": "key"}}
    rule = {"name": "mine", "action": "Fail", "reasons": ["Evicted"]}
    _, problems = parse_spec(document({"pods.env": [variable], "failurePolicy.rules": [rule]})["spec"])
    assert {problem.path: problem.fix for problem in problems} == {
        "spec.pods.env[0].secret": "Renamed to spec.pods.env[].valueFrom.secretKeyRef.",
        "spec.failurePolicy.rules[0].reasons": "Renamed to spec.failurePolicy.rules[].onReasons.",
    }


@pytest.mark.parametrize("old", ["nvidia", "ascend", "cpu"])
def test_an_old_value_is_answered_with_its_new_spelling(document, old):
    _, problems = parse_spec(document({"accelerator.profile": old})["spec"])
    (problem,) = [problem for problem in problems if problem.path == "spec.accelerator.profile"]
    assert problem.fix == f"Renamed to {VALUES[old]}."
