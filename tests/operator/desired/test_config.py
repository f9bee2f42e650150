"""The manifest that the pods read."""

from dataclasses import replace
from typing import Any

import pytest
import yaml
from pydantic import create_model

from qwen35_operator.desired import all_objects, config, spec_fields
from qwen35_operator.desired.first_defaults import FIRST_DEFAULTS
from qwen35_operator.operator_settings import OperatorSettings
from qwen35_trainer.manifest import load_manifest, parse_spec
from qwen35_trainer.manifest.train import TrainSpec
from qwen35_trainer.manifest.training import TrainingSpec
from tests.operator.desired.conftest import SPEC

CLAIM = {"persistentVolumeClaim": {"claimName": "disk", "path": "a/b"}}


@pytest.fixture
def read(tmp_path):
    """The manifest of a training's -config, loaded as the trainer loads it."""

    def load(training):
        file = tmp_path / "training.yaml"
        file.write_text(config.build(training)["data"]["training.yaml"])
        return load_manifest(file)

    return load


def test_the_trainer_reads_the_spec_that_was_asked_for(read, make_training):
    training = make_training({"train.nodes": 2, "seed": 5})
    manifest = read(training)
    assert manifest.metadata.name == "demo"
    assert manifest.spec == training.spec


def test_fields_with_their_defaults_are_left_out(make_training):
    text = config.build(make_training({"seed": 0, "rollout.temperature": 1.0, "train.lora": {}}))["data"][
        "training.yaml"
    ]
    spec = yaml.safe_load(text)["spec"]
    assert spec["train"] == {"updates": 10, "batch": {"promptsPerUpdate": 4}, "lora": {}}
    assert spec["rollout"] == {"nodes": 2}
    assert not {"seed", "mode", "suspend", "pods", "checkpoint", "algorithm"} & spec.keys()


def test_a_trainer_of_the_release_before_understands_the_config_of_a_later_operator(make_training, monkeypatch):
    """The later release has added a field and changed two defaults, which the API server has written into stored trainings."""
    later_train: Any = create_model("Later", __base__=TrainSpec, updates=(int, 99), nodes=(int, 4), addedField=(int, 3))
    later_spec: Any = create_model("LaterSpec", __base__=TrainingSpec, train=(later_train, later_train()))
    monkeypatch.setattr(spec_fields, "FIRST_DEFAULTS", {**FIRST_DEFAULTS, "train.addedField": 3})

    def read_before(train: dict[str, int]) -> tuple[int, int]:
        spec = later_spec.model_validate({**SPEC, "train": train})
        text = config.build(replace(make_training(), spec=spec))["data"]["training.yaml"]
        before, problems = parse_spec(yaml.safe_load(text)["spec"])
        assert before is not None, problems
        return before.train.nodes, before.train.updates

    assert read_before({"nodes": 1, "updates": 10, "addedField": 3}) == (1, 10)
    assert read_before({"nodes": 4, "updates": 99, "addedField": 3}) == (4, 99)
    with pytest.raises(AssertionError, match="addedField"):
        read_before({"nodes": 4, "updates": 99, "addedField": 7})


def test_a_claim_is_the_path_that_it_is_mounted_at(read, make_training):
    spec = read(make_training({"model.source": CLAIM, "checkpoint.storage": CLAIM})).spec
    assert spec.model.source.persistentVolumeClaim is None
    assert spec.model.source.path == "/var/lib/qwen35/model/a/b"
    assert spec.checkpoint.storage.path == "/var/lib/qwen35/checkpoints"


def test_files_of_a_claim_are_named_in_full(read, make_training):
    files = {"paths": ["x.jsonl", "sub/y.jsonl"], "volume": CLAIM}
    changes = {"data.train": [{"name": "rows", "files": files}], "rewards": [{"type": "Math"}]}
    (source,) = read(make_training(changes)).spec.data.train
    assert source.files.paths == ("/var/lib/qwen35/data/disk/a/b/x.jsonl", "/var/lib/qwen35/data/disk/a/b/sub/y.jsonl")
    assert source.files.volume is None


def test_paths_without_a_claim_lead_into_the_image(read, make_training):
    files = {"paths": ["tiny/train.jsonl"]}
    changes = {"data.train": [{"name": "rows", "files": files}], "rewards": [{"type": "Math"}]}
    spec = read(make_training(changes | {"checkpoint.storage": {"path": "/nfs/ckpt"}})).spec
    assert spec.data.train[0].files.paths == ("/opt/qwen35/examples/tiny/train.jsonl",)
    assert spec.checkpoint.storage.path == "/nfs/ckpt"


def test_the_trainer_does_not_notice_a_change_of_what_only_the_operator_reads(make_training):
    """An earlier trainer would refuse a field that it does not know."""
    assert config.build(make_training({"disruptionBudget": "HeadAndTrain"})) == config.build(make_training())


def test_neither_pods_nor_the_names_of_secrets_reach_the_trainer(read, make_training):
    variable = {"name": "WANDB_API_KEY", "valueFrom": {"secretKeyRef": {"name": "vault", "key": "wandb"}}}
    training = make_training({"pods.env": [variable], "suspend": True})
    assert "vault" not in config.build(training)["data"]["training.yaml"]
    assert read(training).spec.suspend is False


@pytest.mark.parametrize("path", ["/etc", "../other", "a/../../b"])
def test_a_path_that_leads_out_of_its_claim_is_a_problem(path, make_training):
    claim = {"persistentVolumeClaim": {"claimName": "disk", "path": path}}
    source = {"name": "rows", "files": {"paths": [path], "volume": claim}}
    changes = {
        "model.source": claim,
        "checkpoint.storage": claim,
        "data.train": [source],
        "rewards": [{"type": "Math"}],
    }
    paths = {problem.path for problem in all_objects.problems(make_training(changes), OperatorSettings())}
    assert paths == {
        "spec.model.source.persistentVolumeClaim.path",
        "spec.checkpoint.storage.persistentVolumeClaim.path",
        "spec.data.train[0].files.volume.persistentVolumeClaim.path",
        "spec.data.train[0].files.paths[0]",
    }
