"""docs/reference/labels.md says what the code does."""

import re
from pathlib import Path

import pytest
import yaml

from qwen35_operator.desired import names, objects_of, overrides, queueing
from qwen35_operator.profiles import PROFILES
from qwen35_operator.settings import Settings

TEXT = (Path(__file__).parents[3] / "docs" / "reference" / "labels.md").read_text()
NAMED = {
    *(names.TRAINING, names.ATTEMPT, names.POOL, names.HASH, names.SPEC_HASH),
    *(*queueing.PREFIXES, *queueing.KEYS),
    *(*overrides.VARIABLES, *overrides.POD, *overrides.RAY_CONTAINER, *overrides.RESERVED),
    *overrides.PORTS["head"].values(),
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
        assert objects_of.problems(make_training(changes), Settings()) == []
