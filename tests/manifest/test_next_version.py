"""Notices about values that v1beta1 will refuse. The manifests are valid today."""

from copy import deepcopy
from typing import Any

import pytest

from qwen35_trainer.manifest import next_version, parse_manifest
from tests.manifest.conftest import SMALL, set_at

CASES: dict[str, Any] = {
    "spec.train.collectiveTimeoutSeconds": 0.5,
    "spec.async.stallSeconds": 90.25,
    "spec.publication.timeoutSeconds": 1.5,
    "spec.failurePolicy.backoffSeconds": 0.1,
    "spec.train.freeze": ["Router", "Router"],
    "spec.train.lora": {"targets": ["q_proj", "q_proj"]},
    "spec.failurePolicy.rules": [{"name": "a", "action": "Fail", "onExitCodes": [137, 137], "onReasons": ["a", "a"]}],
}
WHOLE: dict[str, Any] = {
    "spec.train.collectiveTimeoutSeconds": 1,
    "spec.async.stallSeconds": 90.0,
    "spec.failurePolicy.rules": [{"name": "a", "action": "Fail", "onExitCodes": [137, 1]}],
}


def noticed(path: str, value: Any) -> list[str]:
    manifest = deepcopy(SMALL)
    set_at(manifest["spec"], path.removeprefix("spec."), value)
    return [notice.path for notice in next_version.notices(parse_manifest(manifest).spec)]


@pytest.mark.parametrize("path", CASES)
def test_a_value_that_v1beta1_refuses_is_noticed(path):
    assert noticed(path, CASES[path])
    assert all(each.startswith(path) for each in noticed(path, CASES[path]))


def test_the_time_limit_of_a_reward_is_noticed():
    manifest = deepcopy(SMALL)
    manifest["spec"]["rewards"][0]["timeoutSeconds"] = 0.5
    (notice,) = next_version.notices(parse_manifest(manifest).spec)
    assert (notice.path, notice.fix) == ("spec.rewards[0].timeoutSeconds", "Use 1.")


@pytest.mark.parametrize("path", WHOLE)
def test_whole_seconds_and_distinct_items_are_not(path):
    assert noticed(path, WHOLE[path]) == []
