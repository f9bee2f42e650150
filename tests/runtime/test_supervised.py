"""Supervised runs on conversations: with tool calls, and with images; packed."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qwen35_trainer.progress.records import EvaluationRecord, UpdateRecord
from qwen35_trainer.runtime.supervised import SupervisedLoop

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


@pytest.mark.parametrize("saved", [False, True])
async def test_a_finished_run_that_is_resumed_in_another_folder_saves_its_checkpoint_there(saved):
    calls: list[str] = []

    async def export_last(version: int) -> None:
        calls.append("export")

    async def save(_: object, version: int, copied: asyncio.Event) -> None:
        calls.append("save")
        copied.set()

    training: Any = SimpleNamespace(update=4, updates_total=4, saved=saved, export_last=export_last, save=save)
    supervised: Any = SimpleNamespace(updates=1)
    loop = SupervisedLoop(supervised, training, asyncio.Event(), must_save=not saved)
    assert await loop.run() == "Succeeded"
    assert calls == ["export", *([] if saved else ["save"])]
