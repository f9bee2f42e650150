"""A run whose replica is vLLM's and whose prompts have images, in the process of the tests."""

from pathlib import Path

import pytest

from qwen35_trainer.progress.records import EvaluationRecord, UpdateRecord
from tests.rollout.test_vllm import process_restored
from tests.runtime.local import Local

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-grpo-vision.yaml"
CHANGES = {
    "rollout.engine": "VLLM",
    "model.source.random.headDim": 32,
    "model.source.random.linearHeadDim": 64,
    "train.updates": 3,
    "train.batch.promptsPerUpdate": 4,
    "algorithm.groupSize": 8,
    "evaluation.atStart": "false",
    "evaluation.everyUpdates": 3,
    "evaluation.samplesPerPrompt": 1,
    "checkpoint.everyUpdates": 3,
}


def test_three_updates_with_rollouts_by_vllm_from_prompts_with_images(tmp_path: Path) -> None:
    """The trainer computes nearly the same log-probabilities as vLLM, which computes in bfloat16."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    settings = [word for path, value in CHANGES.items() for word in ("--set", f"{path}={value}")]
    local = Local(tmp_path)
    try:
        with process_restored():
            ended = local.run(EXAMPLE, *settings, output=tmp_path / "out")
    finally:
        local.end()
    assert ended.code == 0, ended.err
    updates = ended.of(UpdateRecord)
    assert [record.update for record in updates] == [1, 2, 3]
    assert all(abs(record.behaviour_kl) < 1e-3 for record in updates if record.lag_max == 0)
    assert any(record.gradient_norm > 0 for record in updates)
    assert [record.update for record in ended.of(EvaluationRecord)] == [3]
