"""Supervised runs on conversations: with tool calls, and with images; packed."""

from pathlib import Path

import pytest

from qwen35_trainer.progress.records import EvaluationRecord, UpdateRecord

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("example", ["tiny-sft-tools", "tiny-sft-vision"])
def test_an_example_of_conversations_lowers_the_loss_and_the_held_out_loss(local, tmp_path, example):
    ended = local.run(EXAMPLES / f"{example}.yaml", "--set", "train.updates=4", output=tmp_path / "out")
    assert ended.code == 0, ended.err
    losses = [record.loss for record in ended.of(UpdateRecord)]
    held_out = [record.loss for record in ended.of(EvaluationRecord)]
    assert len(losses) == 4
    assert losses[-1] < 0.8 * losses[0]
    assert held_out[-1] < 0.8 * held_out[0]
