"""An operator of a later release, which has other defaults, disturbs no training, and neither does the way back.

    this release ─► training begins ─► later definition and operator ─► another begins ─► this release again
                                            each time: the same Ray clusters, pods and attempts

The API server stores a training with the defaults of its time. The later release reads them as values that are not its defaults.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, create_model

from qwen35_trainer.manifest import TrainingSpec, parse
from qwen35_trainer.manifest.checkpoint import CheckpointSpec
from qwen35_trainer.manifest.data import DataSpec
from qwen35_trainer.manifest.train import TrainSpec
from tests.controlplane.live_training import LiveTraining
from tests.controlplane.test_upgrade import Picture
from tests.virtual import defaults
from tests.virtual.operators import VirtualOperator

pytestmark = pytest.mark.worlds("memory", only=True)

CHANGED: dict[str, Any] = {
    "seed": 7,
    "data.maxResponseTokens": 1024,
    "train.activationCheckpointing": True,
    "checkpoint.keep": 9,
}
"""Defaults of the later release: of a field of the spec itself, of three sections, and the last of them of a live field."""


def with_defaults(model: type[BaseModel], section: str) -> Any:
    """A model with the later defaults of its section; "" is the spec itself."""
    own = {
        path.removeprefix(f"{section}."): value for path, value in CHANGED.items() if path.rpartition(".")[0] == section
    }
    fields: dict[str, Any] = {name: (model.model_fields[name].annotation, value) for name, value in own.items()}
    return create_model(f"Later{model.__name__}", __base__=model, **fields)


LaterTrainSpec = with_defaults(TrainSpec, "train")
LaterCheckpointSpec = with_defaults(CheckpointSpec, "checkpoint")
LaterSpec: Any = create_model(
    "LaterSpec",
    __base__=with_defaults(TrainingSpec, ""),
    data=(with_defaults(DataSpec, "data"), ...),
    train=(LaterTrainSpec, LaterTrainSpec()),
    checkpoint=(LaterCheckpointSpec, LaterCheckpointSpec()),
)


def later_schema() -> Mapping[str, Any]:
    """This release's definition with the later defaults."""
    schema = json.loads(json.dumps(defaults.schema_of(defaults.DEFINITION)))
    for path, value in CHANGED.items():
        field = schema["properties"]["spec"]
        for name in path.split("."):
            field = field["properties"][name]
        assert field["default"] != value
        field["default"] = value
    return dict(schema)


@contextmanager
def later_release(operator: VirtualOperator) -> Iterator[None]:
    """Replace definition and operator by those of the later release, and afterwards by this one's."""
    schema = later_schema()
    operator.stop()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(defaults, "_schema", lambda: schema)
        patch.setattr(parse, "TrainingSpec", LaterSpec)
        operator.start()
        yield
        operator.stop()
    operator.start()


def begin(training: LiveTraining) -> None:
    training.apply()
    for pool, nodes in (("head", 1), ("train", 1), ("rollout", 2)):
        training.until_pods(pool, nodes)
    training.report()
    training.until_condition("Ready", "True", "Running")


def assert_undisturbed(training: LiveTraining, before: Picture, update: int) -> None:
    """The training is as it was after its report was seen, and after a minute, in which children are repaired."""
    training.report(update=update, version=update)
    training.until(lambda: training.status["progress"]["update"] == update, "the report is seen")
    training.plane.wait(60)
    assert Picture.of(training) == before


def value(document: Any, path: str) -> Any:
    for name in path.split("."):
        document = document[name]
    return document


def test_other_defaults_restart_no_training_and_neither_does_the_way_back(
    live_training: LiveTraining, operator: VirtualOperator
):
    later = LiveTraining(live_training.plane, live_training.namespace, "later")
    begin(live_training)
    before, spec = Picture.of(live_training), live_training.body["spec"]
    with later_release(operator):
        assert_undisturbed(live_training, before, 2)
        assert live_training.body["spec"] == spec
        # The manifest that a restarted attempt reads contains the values that are not defaults any more.
        manifest = yaml.safe_load(live_training.get("configmaps", "demo-config")["data"]["training.yaml"])
        for path in CHANGED:
            assert value(manifest["spec"], path) == value(spec, path)
        begin(later)
        begun = Picture.of(later)
        for path, default in CHANGED.items():
            assert value(later.body["spec"], path) == default
    assert_undisturbed(live_training, before, 3)
    assert_undisturbed(later, begun, 3)
    live_training.edit(suspend=True)
    live_training.until(lambda: live_training.order, "a real change still reaches the trainer")
