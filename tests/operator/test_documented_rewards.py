"""The pages about own code, docs/rewards.md, algorithms.md and howto/own-reward.md: their examples are rendered, and called."""

import inspect
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from qwen35_operator.desired.object_names import POOL, TRAINING
from qwen35_operator.render import objects
from qwen35_trainer.manifest import parse_manifest
from tests.manifest.conftest import SMALL

DOCS = Path(__file__).parents[2] / "docs"
FOLDERS = {"configMap": "/opt/rewards", "image": "/opt/rewards", "claim": "/var/lib/qwen35/data/prompts"}


def _blocks(language: str, page: str = "rewards.md") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


HOWTO = "howto/own-reward.md"
PODS = [yaml.safe_load(block) for block in _blocks("yaml", HOWTO) if "PYTHONPATH" in block]


def _containers(sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The containers of Ray, by pool."""
    changed = SMALL | {"spec": SMALL["spec"] | sections}
    job = next(child for child in objects(parse_manifest(changed)) if child["kind"] == "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    groups = {"head": cluster["headGroupSpec"]} | {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    return {pool: group["template"]["spec"]["containers"][0] for pool, group in groups.items()}


@pytest.mark.parametrize(("way", "sections"), list(zip(FOLDERS, PODS, strict=True)), ids=FOLDERS)
def test_the_folder_of_the_code_is_on_the_path_of_the_head(way, sections):
    head = _containers(sections)["head"]
    assert {"name": "PYTHONPATH", "value": FOLDERS[way]} in head["env"]
    mounted = {mount["mountPath"] for mount in head["volumeMounts"]}
    assert (FOLDERS[way] in mounted) == (way != "image")
    assert way != "image" or head["image"] == sections["pods"]["image"]


def test_the_policy_for_a_judge_selects_the_head_of_the_training():
    [policy] = [
        document
        for block in _blocks("yaml", HOWTO)
        if (document := yaml.safe_load(block)).get("kind") == "NetworkPolicy"
    ]
    assert set(policy["spec"]["podSelector"]["matchLabels"]) == {TRAINING, POOL}
    assert policy["spec"]["policyTypes"] == ["Egress"]


@pytest.mark.parametrize("code", _blocks("python"))
def test_the_functions_can_be_called_as_rewards(code, monkeypatch):
    verl = ModuleType("my_verl_rewards")
    verl.compute_score = lambda data_source, solution_str, ground_truth, extra_info: {"score": 0.5}
    monkeypatch.setitem(sys.modules, "my_verl_rewards", verl)
    names: dict[str, object] = {"__name__": "my_rewards"}
    exec(code, names)
    [function] = [value for value in names.values() if inspect.isfunction(value) and value.__module__ == "my_rewards"]
    arguments = ("prompt", "response", None, {"data_source": "gsm8k"})
    inspect.signature(function).bind(*arguments)
    if not inspect.iscoroutinefunction(function):
        assert 0 <= function(*arguments) <= 1


def test_an_own_algorithm_is_mounted_where_it_is_looked_for_and_where_it_is_imported():
    _, chosen, pods = map(yaml.safe_load, _blocks("yaml", "algorithms.md"))
    containers = _containers(chosen | pods)
    for pool in ("head", "train"):
        assert {"name": "PYTHONPATH", "value": "/opt/algorithm"} in containers[pool]["env"]
        assert "/opt/algorithm" in {mount["mountPath"] for mount in containers[pool]["volumeMounts"]}
