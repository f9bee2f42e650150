"""Policies that look: whole runs whose rewards depend on pictures, in data of geo3k's shape."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from qwen35_trainer.progress.records import EvaluationRecord, UpdateRecord
from qwen35_trainer.progress.sample_file import read_samples
from tests.patience import PATIENCE

from .conftest import Ended, Write

TEMPLATE = Path(__file__).parents[2] / "examples" / "tiny" / "chat.jinja"
COLOURS = {"r": (255, 0, 0), "g": (0, 255, 0), "b": (0, 0, 255), "y": (255, 255, 0)}
SOURCE = {
    "name": "colours",
    "files": {"paths": ["train.jsonl"], "promptField": "problem", "answerField": "answer"},
}
SETTINGS: dict[str, object] = {
    "model.source.random": {"hiddenSize": 64, "intermediateSize": 64, "fullAttentionInterval": 2, "layers": 2}
    | {"characters": "rgby?\nuseaitn", "vision": {}},
    "data.train": [SOURCE],
    "data.validation": [SOURCE | {"name": "held-out", "files": SOURCE["files"] | {"paths": ["validation.jsonl"]}}],
    "data.chatTemplate": {"file": str(TEMPLATE)},
    "data.maxPromptTokens": 40,
    "data.maxResponseTokens": 1,
    "algorithm.groupSize": 8,
    "train.batch": {"promptsPerUpdate": 8, "microBatchSequences": 32, "removePadding": True},
    "train.optimizer": {"learningRate": 3e-3, "weightDecay": 0.0},
    "evaluation": {"everyUpdates": 0, "atStart": False},
}

LEARNING = (
    "--set",
    "train.updates=80",
    "--set",
    "train.batch.promptsPerUpdate=16",
    "--set",
    "train.optimizer.schedule=Linear",
)


def write_pictures(folder: Path, rows: int, *, blank: bool = False, seed: int = 0) -> None:
    """Write pictures of one colour each with noise, of several sizes, and rows that ask for the colour of the last one."""
    noise = np.random.default_rng(seed)
    (folder / "pictures").mkdir(exist_ok=True)
    for part, count in (("train", rows), ("validation", 32)):
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
    changes = {"mode": mode} | ({"async": {"stallSeconds": PATIENCE}} if mode == "Colocated" else {})
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


@pytest.mark.soak
def test_a_policy_learns_what_only_the_pictures_tell(local: Any, write: Write, tmp_path: Path) -> None:
    """The same prompts with blank pictures stay at chance."""
    blank = SOURCE | {"name": "blank", "files": SOURCE["files"] | {"paths": ["blank/validation.jsonl"]}}
    sources = [*SETTINGS["data.validation"], blank]
    (tmp_path / "blank").mkdir()
    write_pictures(tmp_path / "blank", 0, blank=True)
    file = written(write, tmp_path, {"data.validation": sources}, rows=512)
    ended = succeeded(local.run(file, *LEARNING))
    *_, evaluation = ended.of(EvaluationRecord)
    assert evaluation.reward_by_source["held-out"] >= 0.9
    assert evaluation.reward_by_source["blank"] <= 0.5
