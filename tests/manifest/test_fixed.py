"""What a resumed training must keep, compared across releases."""

from pathlib import Path

import pytest

from qwen35_trainer.manifest import dump_manifest, load_manifest
from qwen35_trainer.manifest.document import parse_value
from qwen35_trainer.manifest.fixed import FIXED, differences

OTHERWISE = {
    "mode": ({"mode": "Colocated"}, ["spec.mode: FullyAsync there, Colocated here"]),
    "seed": ({"seed": 7}, ["spec.seed: 0 there, 7 here"]),
    "model": ({"model.source.random.layers": 12}, ["spec.model.source.random.layers: 4 there, 12 here"]),
    "data": (
        {"data.train": [{"name": "sums", "gym": {"task": "chain_sum", "size": 64}}], "data.epochs": 3},
        ["spec.data.train[0].gym.task: basic_arithmetic there, chain_sum here", "spec.data.epochs: 1 there, 3 here"],
    ),
    "algorithm.groupSize": ({"algorithm.groupSize": 2}, ["spec.algorithm.groupSize: 8 there, 2 here"]),
    "train.engine": ({"train.engine": "Megatron"}, ["spec.train.engine: FSDP there, Megatron here"]),
    "train.freeze": ({"train.freeze": ["Vision"]}, ['spec.train.freeze: [] there, ["Vision"] here']),
    "train.optimizer.type": (
        {"train.optimizer.type": "Muon"},
        ["spec.train.optimizer.type: AdamW there, Muon here"],
    ),
}
MAY_DIFFER = {
    "train.updates": 99,
    "train.nodes": 2,
    "train.optimizer.learningRate": 0.1,
    "train.batch.promptsPerUpdate": 8,
    "algorithm.advantage": "RLOO",
    "rollout.nodes": 3,
    "checkpoint": {"keep": 9, "storage": {"path": "/elsewhere"}},
    "accelerator.devicesPerNode": 1,
}


@pytest.fixture
def compared(written):
    """compared(earlier, now): the differences of a written manifest and a parsed one, each by its changes."""

    def build(earlier, now) -> list[str]:
        text = dump_manifest(load_manifest(written(earlier)))
        return [
            str(difference) for difference in differences(parse_value(text)["spec"], load_manifest(written(now)).spec)
        ]

    return build


@pytest.mark.parametrize("path", OTHERWISE)
def test_a_fixed_field_is_named_with_both_values(compared, path):
    changes, lines = OTHERWISE[path]
    assert compared({}, changes) == lines


def test_adapters_are_fixed_as_a_whole(compared):
    (line,) = compared({}, {"train.lora": {}})
    assert line.startswith('spec.train.lora: not set there, {"rank": ')
    assert line.endswith("} here")
    (line,) = compared({"train.lora": {}}, {})
    assert line.endswith(" there, not set here")
    assert compared({"train.lora": {}}, {"train.lora": {"alpha": 3.0}}) == [
        "spec.train.lora.alpha: 32.0 there, 3.0 here"
    ]


def test_the_prediction_head_is_fixed_as_a_whole(compared):
    (line,) = compared({}, {"train.multiTokenPrediction": {}})
    assert line == 'spec.train.multiTokenPrediction: not set there, {"lossWeight": 0.1, "detached": false} here'


def test_every_fixed_field_is_compared():
    assert {*OTHERWISE, "train.lora", "train.multiTokenPrediction"} == set(FIXED)


def test_everything_else_may_change(compared):
    assert compared({}, MAY_DIFFER) == []


def test_a_field_that_the_earlier_release_did_not_know_counts_once_it_is_set(written):
    """Otherwise no run would survive a release that adds a field to a fixed section."""
    now = load_manifest(written({})).spec
    earlier = parse_value(dump_manifest(load_manifest(written({}))))["spec"]
    del earlier["data"]["shuffle"], earlier["model"]["precision"]
    assert differences(earlier, now) == []
    (difference,) = differences(earlier, load_manifest(written({"data.shuffle": False})).spec)
    assert str(difference) == "spec.data.shuffle: not set there, false here"


def test_a_field_that_this_release_does_not_know_any_more_counts(written):
    earlier = parse_value(dump_manifest(load_manifest(written({}))))["spec"]
    earlier["data"]["order"] = "Sorted"
    (difference,) = differences(earlier, load_manifest(written({})).spec)
    assert str(difference) == "spec.data.order: Sorted there, not set here"


def test_every_example_agrees_with_itself():
    for file in (Path(__file__).parents[2] / "examples").glob("*.yaml"):
        manifest = load_manifest(file)
        assert differences(parse_value(dump_manifest(manifest))["spec"], manifest.spec) == []
