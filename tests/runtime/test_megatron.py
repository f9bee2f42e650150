"""Whole runs that train with megatron-core. Only the engine and its degrees differ from the manifest of a run with FSDP."""

from pathlib import Path
from statistics import mean

import pytest

from qwen35_trainer.progress.records import EvaluationRecord, UpdateRecord

from .test_learning import MAX_DIFFERENCE, MAX_PROBE_DIFFERENCE

pytestmark = [pytest.mark.soak, pytest.mark.processes]

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE, PICTURES = EXAMPLES / "tiny-grpo.yaml", EXAMPLES / "tiny-grpo-vision.yaml"
BY_VLLM = EXAMPLES / "tiny-grpo-vllm.yaml"
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


def test_the_example_with_vllm_learns_on_two_nodes_when_only_the_engine_differs(command, tmp_path) -> None:
    """Two train processes, each with its half of a batch, and vLLM in a third, which generates while they train."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    for_two = ["train.nodes=2", "train.batch.microBatchSequences=128", "evaluation.everyUpdates=300"]
    changes = [*for_two, "train.engine=Megatron"]
    settings = [word for change in changes for word in ("--set", change)]
    ended = command.run(BY_VLLM, *settings, output=tmp_path / "out")
    assert ended.code == 0, ended.err
    assert {path.name for path in (ended.folder / "logs").glob("train-*")} == {"train-0.log", "train-1.log"}
    before, after = ended.of(EvaluationRecord)
    assert before.accuracy < 0.2
    assert after.accuracy >= 0.9
    updates = ended.of(UpdateRecord)
    assert len(updates) == 300
    assert ended.overlaps, "it generates while it trains"
    assert max(record.lag_max for record in updates) > 0
    probed = [record.probe_difference_mean for record in updates if record.probe_difference_mean is not None]
    assert probed
    assert mean(probed) <= MAX_DIFFERENCE, "the replica computes what the ranks compute, in bfloat16"
    assert max(probed) <= MAX_PROBE_DIFFERENCE
