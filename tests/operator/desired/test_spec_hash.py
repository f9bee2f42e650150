"""The hash changes when an attempt cannot take over what changed, and not when a release changes."""

from dataclasses import replace
from typing import Any

import pytest
from pydantic import BaseModel, create_model
from pydantic_core import PydanticUndefined, to_jsonable_python

from qwen35_operator.desired import spec_fields
from qwen35_operator.desired.first_defaults import FIRST_DEFAULTS
from qwen35_operator.desired.spec_hash import LIVE_FIELDS, spec_hash
from qwen35_trainer.manifest import fields
from qwen35_trainer.manifest.base import Section
from qwen35_trainer.manifest.train import TrainSpec
from qwen35_trainer.manifest.training import TrainingSpec
from tests.operator.desired.conftest import SPEC

LIVE = {
    "suspend": True,
    "evaluation.everyUpdates": 7,
    "checkpoint.everyUpdates": 7,
    "checkpoint.keep": 7,
    "checkpoint.graceSeconds": 7,
    "failurePolicy.maxRestarts": 7,
    "cleanupSecondsAfterFinished": 7,
    "activeDeadlineSeconds": 7,
    "rollout.nodes": 7,
    "rollout.minNodes": 1,
    "rollout.maxNodes": 7,
    "rollout.autoscale": {"growAboveTrainIdle": 0.2},
}
FIXED = {
    "seed": 7,
    "train.nodes": 2,
    "train.optimizer": {"learningRate": 7e-6},
    "rollout.maxSequencesPerReplica": 7,
    "accelerator.devicesPerNode": 2,
    "async": {"maxVersionLag": 7},
    "checkpoint.storage": {"path": "/elsewhere"},
    "pods.image": "registry.example/trainer:7",
    "pods.train": {"spec": {"priorityClassName": "high"}},
    "data.maxResponseTokens": 7,
    "train.lora": {},
}


@pytest.mark.parametrize("path", LIVE)
def test_what_a_running_attempt_takes_over_leaves_the_hash(path, make_training):
    assert spec_hash(make_training({path: LIVE[path]})) == spec_hash(make_training())


@pytest.mark.parametrize("path", FIXED)
def test_everything_else_changes_the_hash(path, make_training):
    assert spec_hash(make_training({path: FIXED[path]})) != spec_hash(make_training())


@pytest.mark.parametrize(
    "written", [{"seed": 0, "mode": "FullyAsync"}, {"train.optimizer": {}}, {"train.optimizer": {"beta1": 0.9}}]
)
def test_a_default_that_is_written_out_leaves_the_hash(written, make_training):
    assert spec_hash(make_training(written)) == spec_hash(make_training())


def test_who_the_training_is_leaves_the_hash(make_training):
    training = make_training()
    other = replace(training, generation=9, labels={"team": "a"}, uid="1" * 36)
    assert spec_hash(other) == spec_hash(training)


# Of a release that changes two defaults and adds a field.
LaterTrainSpec: Any = create_model(
    "LaterTrainSpec", __base__=TrainSpec, nodes=(int, 4), activationCheckpointing=(bool, True), addedField=(int, 3)
)
LaterSpec: Any = create_model("LaterSpec", __base__=TrainingSpec, train=(LaterTrainSpec, LaterTrainSpec()))


@pytest.mark.parametrize("added", [{}, {"addedField": 3}], ids=["", "with the default of the new field"])
def test_a_release_with_other_defaults_and_more_fields_computes_the_same(make_training, monkeypatch, added):
    training = make_training({"train.nodes": 1, "train.activationCheckpointing": False})
    stored = {**SPEC, "train": {**SPEC["train"], "nodes": 1, "activationCheckpointing": False, **added}}
    monkeypatch.setattr(spec_fields, "FIRST_DEFAULTS", {**FIRST_DEFAULTS, "train.addedField": 3})
    later = replace(training, spec=LaterSpec.model_validate(stored))
    assert spec_hash(later) == spec_hash(training)
    stored["train"]["nodes"] = 4
    assert spec_hash(replace(training, spec=LaterSpec.model_validate(stored))) != spec_hash(training)


def test_how_pydantic_writes_a_spec_does_not_matter(make_training, monkeypatch):
    def other_format(*_: object, **__: object) -> None:
        raise AssertionError("the hash depends on pydantic's serializer")

    for name in ("model_dump", "model_dump_json"):
        monkeypatch.setattr(BaseModel, name, other_format)
    spec_hash(make_training())


def test_every_field_has_a_first_default_if_it_has_a_default():
    present = dict(defaults(TrainingSpec, ""))
    assert present.keys() == FIRST_DEFAULTS.keys(), "add the defaults of new fields to first_defaults.py"


def test_the_live_fields_are_fields():
    names = set(every_path(TrainingSpec, ""))
    assert names >= LIVE_FIELDS


def defaults(model: type[BaseModel], path: str):
    """The default of every field that has one and is not a section, by path."""
    for name, field in fields.fields(model).items():
        default = field.get_default(call_default_factory=True)
        if default is not PydanticUndefined and not isinstance(default, Section):
            yield f"{path}{name}", to_jsonable_python(default)
        for inner, suffix in below(field.annotation):
            yield from defaults(inner, f"{path}{name}{suffix}.")


def every_path(model: type[BaseModel], path: str):
    for name, field in fields.fields(model).items():
        yield f"{path}{name}"
        for inner, suffix in below(field.annotation):
            yield from every_path(inner, f"{path}{name}{suffix}.")


def below(annotation: object):
    """The section in a field, with what its path has in addition."""
    if (section := fields.section(annotation)) is not None:
        yield section, ""
    if (item := fields.item(annotation)) is not None and (section := fields.section(item)) is not None:
        yield section, "[]"
