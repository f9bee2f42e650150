"""docs/reference/labels.md says what the code does."""

import re
from pathlib import Path

import pytest
import yaml

from qwen35_operator.desired import all_objects, object_names, queueing
from qwen35_operator.desired.pod_overrides import reserved_fields
from qwen35_operator.device_profiles import PROFILES
from qwen35_operator.operator_settings import OperatorSettings

TEXT = (Path(__file__).parents[3] / "docs" / "reference" / "labels.md").read_text()
NAMED = {
    *(object_names.TRAINING, object_names.ATTEMPT, object_names.POOL, object_names.HASH, object_names.SPEC_HASH),
    *(object_names.LAST_CHECKPOINT, object_names.KNOWN_VERSION),
    *(object_names.RETRY, object_names.IMAGE, object_names.UPDATE, object_names.FORCE_START),
    *(*queueing.PREFIXES, *queueing.KEYS),
    *(
        *reserved_fields.VARIABLES,
        *reserved_fields.POD_FIELDS,
        *reserved_fields.RAY_CONTAINER_FIELDS,
        *reserved_fields.RESERVED_CONTAINERS,
    ),
    *reserved_fields.RAY_PORTS["head"].values(),
    *(variable for profile in PROFILES.values() for variable in profile.environment),
}


@pytest.mark.parametrize("name", sorted(NAMED))
def test_every_name_is_documented(name):
    assert f"`{name}`" in TEXT


def test_every_default_of_a_variable_is_documented():
    for profile in PROFILES.values():
        assert {value for value in profile.environment.values() if f"`{value}`" not in TEXT} == set()


def test_the_examples_are_within_the_fence(make_training):
    blocks = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        changes = {f"pods.{key}": value for key, value in yaml.safe_load(block)["pods"].items()}
        assert all_objects.problems(make_training(changes), OperatorSettings()) == []
