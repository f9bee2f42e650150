"""Policies that look: whole runs whose rewards depend on pictures, in data of geo3k's shape."""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from qwen35_trainer.progress.records import EvaluationRecord, UpdateRecord
from qwen35_trainer.progress.sample_file import read_samples
from tests.models import published
from tests.patience import PATIENCE

from .conftest import Ended, Write

EXAMPLES = Path(__file__).parents[2] / "examples"
CHARACTERS = "rgby?\nuseaitn"
PUBLISHED: dict[str, object] = {"model.source": {"path": "model"}, "data.chatTemplate": {}}
"""Changes to train a folder of published shape."""
SPREAD = 0.05
"""Standard deviation of the weights of that folder, with which it learns."""
HEADS = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
"""The smallest heads of Gated DeltaNet that vLLM's kernels for the CPU have."""
LEARNING: dict[str, object] = {
    "train.batch": {"promptsPerUpdate": 16, "microBatchSequences": 64, "removePadding": True},
    "train.optimizer": {"learningRate": 3e-3, "weightDecay": 0.0, "schedule": "Linear"},
}
SMALLER_STEPS: dict[str, object] = {"train.optimizer": LEARNING["train.optimizer"] | {"learningRate": 1.5e-3}}
"""For the model with random weights. At twice that rate, one step may make it certain of a wrong colour, so that it samples no other
again."""
COLOURS = {"r": (255, 0, 0), "g": (0, 255, 0), "b": (0, 0, 255), "y": (255, 255, 0)}
SOURCE = {
    "name": "colours",
    "files": {"paths": ["train.jsonl"], "promptField": "problem", "answerField": "answer"},
}
SETTINGS: dict[str, object] = {
    "model.source.random": {"hiddenSize": 64, "intermediateSize": 64, "fullAttentionInterval": 2, "layers": 2}
    | {"characters": CHARACTERS, "vision": {}},
    "data.train": [SOURCE],
    "data.validation": [SOURCE | {"name": "held-out", "files": SOURCE["files"] | {"paths": ["validation.jsonl"]}}],
    "data.chatTemplate": {"file": str(published.TEMPLATE)},
    "data.maxPromptTokens": 40,
    "data.maxResponseTokens": 1,
    "algorithm.groupSize": 8,
    "train.batch": {"promptsPerUpdate": 8, "microBatchSequences": 32, "removePadding": True},
    "train.optimizer": {"learningRate": 3e-3, "weightDecay": 0.0},
    "evaluation": {"everyUpdates": 0, "atStart": False},
}
SEEN_BY_VLLM = SETTINGS["model.source.random"] | {"headDim": 32, "linearHeadDim": 64}
"""The model of SETTINGS with the smallest heads that vLLM's kernels for the CPU have."""

BY_VLLM = (
    "mode=Colocated",
    'async={"batchesPerPublication": 1}',
    "rollout.engine=VLLM",
    "model.source.random.headDim=32",
    "model.source.random.linearHeadDim=64",
    "train.updates=3",
    "train.batch.promptsPerUpdate=4",
    "train.batch.microBatchSequences=32",
    "algorithm.groupSize=8",
    "evaluation.atStart=false",
    "evaluation.everyUpdates=3",
    "evaluation.samplesPerPrompt=1",
    "checkpoint.everyUpdates=3",
)
"""Changes of the example, for three updates with vLLM, which takes turns with the trainer."""


def write_pictures(folder: Path, rows: int, *, held_out: int = 32, blank: bool = False, seed: int = 0) -> None:
    """Write pictures of one colour each with noise, of several sizes, and rows that ask for the colour of the last one.

    rows, held_out: numbers of rows to train on and to evaluate.
    """
    noise = np.random.default_rng(seed)
    (folder / "pictures").mkdir(exist_ok=True)
    for part, count in (("train", rows), ("validation", held_out)):
        draw = random.Random(f"{seed} {part}")
        lines = []
        for number in range(count):
            names, colour = [], ""
            for place in range(draw.choice([1, 1, 2])):
                colour, side = draw.choice(list(COLOURS)), draw.choice([8, 16])
                shade = np.array((128, 128, 128) if blank else COLOURS[colour]) * 0.8 + 20
                pixels = np.clip(shade + noise.normal(0, 15, (side, side, 3)), 0, 255).astype(np.uint8)
                names.append(f"pictures/{part}-{number}-{place}.png")
                Image.fromarray(pixels).save(folder / names[-1])
            lines.append(json.dumps({"problem": "<image>" * len(names) + "?", "answer": colour, "images": names}))
        (folder / f"{part}.jsonl").write_text("\n".join(lines) + "\n")


def write_published(folder: Path, text: dict[str, Any] | None = None) -> None:
    """Write a vision-language folder of published shape, with a tokenizer, its chat template, and the settings of its processor.

    text: other values of fields of the text model.
    """
    published.write(folder, "0.8B, tied", spread=SPREAD, text=text)
    published.write_tokenizer(folder, CHARACTERS)


def written(write: Write, folder: Path, changes: dict[str, object] | None = None, **options: Any) -> Path:
    """Write a manifest and its pictures. options: as for `write_pictures`."""
    file = write(folder, SETTINGS | (changes or {}))
    write_pictures(folder, **{"rows": 24} | options)
    return file


def shown_prompts(folder: Path) -> Iterator[str]:
    for moment in read_samples(folder / "samples.jsonl"):
        for sample in moment.samples:
            yield sample.prompt


def damage(folder: Path, row: int) -> None:
    """Cut off the first picture of a row behind its header."""
    picture = folder / "pictures" / f"train-{row}-0.png"
    picture.write_bytes(picture.read_bytes()[:60])


def succeeded(ended: Ended) -> Ended:
    assert ended.code == 0, ended.err
    return ended


@pytest.mark.parametrize("mode", ["FullyAsync", "Colocated"])
def test_a_policy_trains_on_pictures_and_continues_after_a_resume(
    local: Any, write: Write, tmp_path: Path, mode: str
) -> None:
    """In mode Colocated with a folder of published shape, whose pictures of 16 × 16 pixels are as large as its processor allows."""
    changes: dict[str, object] = {"mode": mode}
    if mode == "Colocated":
        write_published(tmp_path / "model")
        changes |= {"async": {"stallSeconds": PATIENCE}} | PUBLISHED
    file = written(write, tmp_path, changes)
    succeeded(local.run(file, "--set", "train.updates=2"))
    ended = succeeded(local.run(file, "--set", "train.updates=3", "--resume", "auto"))
    updates = ended.of(UpdateRecord)
    assert [record.update for record in updates] == [1, 2, 3]
    # The replica and the trainer read the same pictures, and compute the same log-probabilities.
    assert updates[0].lag_max == 0
    assert all(abs(record.behaviour_kl) < 1e-6 for record in updates if record.lag_max == 0)
    assert any(record.gradient_norm > 0 for record in updates)  # chance decides whether a group has a right answer
    *_, evaluation = ended.of(EvaluationRecord)
    assert evaluation.update == 3
    assert any("[image train-" in prompt for prompt in shown_prompts(ended.folder))


def test_a_damaged_picture_costs_its_own_group_and_is_named_with_file_and_row(
    local: Any, write: Write, tmp_path: Path
) -> None:
    file = written(write, tmp_path, {"data.validation": []})
    damage(tmp_path, 5)
    ended = succeeded(local.run(file, "--set", "train.updates=2"))
    lines = "".join(log.read_text() for log in (ended.folder / "logs").iterdir())
    assert f"prompt colours/5 ({tmp_path}/train.jsonl, line 6)" in lines
    assert "train-5-0.png: the image is damaged" in lines
    assert [record.update for record in ended.of(UpdateRecord)] == [1, 2]


def test_a_damaged_picture_ends_a_supervised_run_with_file_and_row(local: Any, tmp_path: Path) -> None:
    whole = (EXAMPLES / "tiny" / "images" / "1-140.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[:60])
    row = json.dumps({"prompt": "<image>where?", "images": ["cut.png"], "answer": "1"})
    (tmp_path / "rows.jsonl").write_text(f"{row}\n" * 12)
    changes = (f"data.train[0].files.paths[0]={tmp_path}/rows.jsonl", "evaluation.atStart=false")
    settings = [word for change in changes for word in ("--set", change)]
    ended = local.run(EXAMPLES / "tiny-sft-vision.yaml", *settings, output=tmp_path / "out")
    assert ended.code == 1
    assert re.search(r"prompt train/\d+ \(.*rows.jsonl, line \d+\): .*cut.png: the image is damaged", ended.err)


def test_what_a_run_cannot_show_is_refused_with_file_and_row_before_it_starts(
    local: Any, write: Write, tmp_path: Path
) -> None:
    file = written(write, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    Image.new("RGB", (96, 96)).save(tmp_path / "large.png")
    (tmp_path / "text.png").write_text("no picture")
    rows[0] |= {"problem": "<image>?", "images": ["large.png"]}
    rows[1] |= {"problem": "<image>?", "images": ["text.png"]}
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    ended = local.run(file)
    assert ended.code == 2
    assert f"colours/0 (166 tokens with its 1 images and 0 videos; {tmp_path}/train.jsonl, line 1)" in ended.err
    assert f"prompt colours/1 ({tmp_path}/train.jsonl, line 2): {tmp_path}/text.png: not a readable image" in ended.err
    rows[0] |= {"problem": "<image><image>?"}
    rows[1] = {"problem": "<video>?", "videos": [{"frames": [], "fps": 2}], "answer": "r"}
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    ended = local.run(file)
    assert f"{tmp_path}/train.jsonl, line 1: more than 1 image placeholders for 1 images" in ended.err
    assert f"{tmp_path}/train.jsonl, line 2: videos[0]: the video has no frames" in ended.err


def test_rollouts_by_vllm_from_prompts_with_images_train(command: Any, tmp_path: Path) -> None:
    """In processes of their own, one for each side of a device, which never work at the same time.

    The trainer computes nearly the same log-probabilities as vLLM, which computes in bfloat16.
    """
    pytest.importorskip("vllm", reason="vLLM is not installed")
    settings = [word for change in BY_VLLM for word in ("--set", change)]
    ended = succeeded(command.run(EXAMPLES / "tiny-grpo-vision.yaml", *settings, output=tmp_path / "out"))
    updates = ended.of(UpdateRecord)
    assert [record.update for record in updates] == [1, 2, 3]
    assert {record.lag_max for record in updates} == {0}
    assert all(abs(record.behaviour_kl) < 1e-3 for record in updates)
    assert any(record.gradient_norm > 0 for record in updates)
    assert [record.update for record in ended.of(EvaluationRecord)] == [3]
    assert ended.overlaps == []


@pytest.mark.soak
@pytest.mark.parametrize("engine", ["Torch", "VLLM"])
@pytest.mark.parametrize(
    ("source", "updates"), [pytest.param(SMALLER_STEPS, 100, id="random"), pytest.param(PUBLISHED, 120, id="published")]
)
def test_a_policy_learns_what_only_the_pictures_tell(
    request: pytest.FixtureRequest,
    write: Write,
    tmp_path: Path,
    source: dict[str, object],
    updates: int,
    engine: str,
) -> None:
    """The same prompts with blank pictures stay at chance. vLLM generates in processes of its own."""
    blank = SOURCE | {"name": "blank", "files": SOURCE["files"] | {"paths": ["blank/validation.jsonl"]}}
    sources = [*SETTINGS["data.validation"], blank]
    (tmp_path / "blank").mkdir()
    write_pictures(tmp_path / "blank", 0, held_out=128, blank=True)
    changes = LEARNING | source | {"data.validation": sources, "train.updates": updates, "rollout.engine": engine}
    if source == PUBLISHED:
        write_published(tmp_path / "model", HEADS if engine == "VLLM" else None)
    elif engine == "VLLM":
        changes["model.source.random"] = SEEN_BY_VLLM
    starts = request.getfixturevalue("local" if engine == "Torch" else "command")
    ended = succeeded(starts.run(written(write, tmp_path, changes, rows=512)))
    *_, evaluation = ended.of(EvaluationRecord)
    rewards = [round(record.reward_mean, 2) for record in ended.of(UpdateRecord)][:: updates // 10]
    assert evaluation.reward_by_source["held-out"] >= 0.9, rewards
    # A guess of four colours is right in 0.25 of 128 prompts, with a standard deviation of 0.04.
    assert evaluation.reward_by_source["blank"] <= 0.4


@pytest.mark.soak
def test_the_example_learns_to_see(local: Any, tmp_path: Path) -> None:
    ended = succeeded(local.run(EXAMPLES / "tiny-grpo-vision.yaml", output=tmp_path / "out"))
    first, *_, last = ended.of(EvaluationRecord)
    assert first.accuracy < 0.2
    assert last.accuracy >= 0.9
