"""Whole runs that train with megatron-core. Only the engine and its degrees differ from the manifest of a run with FSDP."""

from pathlib import Path

import pytest

from qwen35_trainer.progress.records import EvaluationRecord, UpdateRecord

pytestmark = [pytest.mark.soak, pytest.mark.processes]

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE, PICTURES = EXAMPLES / "tiny-grpo.yaml", EXAMPLES / "tiny-grpo-vision.yaml"
MEGATRON = ("train.engine=Megatron", "accelerator.devicesPerNode=2")


@pytest.mark.parametrize(
    ("example", "changes"),
    [
        (EXAMPLE, ("train.parallelism.tensor=2",)),
        (EXAMPLE, ("train.parallelism.pipeline=2",)),
        (PICTURES, ("train.parallelism.tensor=2", "train.batch.removePadding=false")),
    ],
    ids=["tensor", "pipeline", "pictures"],
)
def test_two_ranks_train_and_the_replicas_compute_what_they_compute(command, tmp_path, example, changes) -> None:
    changes = [*MEGATRON, *changes, "train.updates=4", "evaluation.atStart=false"]
    settings = [word for change in changes for word in ("--set", change)]
    ended = command.run(example, *settings, output=tmp_path / "out")
    assert ended.code == 0, ended.err
    updates = ended.of(UpdateRecord)
    assert len(updates) == 4
    fresh = [record for record in updates if record.lag_max == 0]
    assert fresh
    assert all(abs(record.behaviour_kl) < 1e-5 for record in fresh), "published weights are those that train"


def test_the_example_learns(command, tmp_path) -> None:
    changes = [*MEGATRON, "train.parallelism.tensor=2", "train.updates=300", "evaluation.everyUpdates=300"]
    settings = [word for change in changes for word in ("--set", change)]
    ended = command.run(EXAMPLE, *settings, output=tmp_path / "out")
    assert ended.code == 0, ended.err
    assert ended.of(EvaluationRecord)[-1].accuracy >= 0.9
