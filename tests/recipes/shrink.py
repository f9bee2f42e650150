"""A recipe made small enough for the CPUs of any machine: its settings at another size.

model    a folder of the shape in which the recipe's model is published, with random weights: vision tower and experts included
devices  one node of as many processes as requested, so that FSDP shards; rollouts by the embedded engine, or by vLLM on request
data     rows in the format of the recipe's data set, and its reward: a few generated pictures for geo3k, sums for GSM8K
batch    DIVISOR times fewer sequences per micro-batch, at least one; as many prompts per update; two versions
"""

import io
import json
import random
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from qwen35_trainer.manifest import Manifest, dump_manifest
from qwen35_trainer.manifest.document import parse_document
from qwen35_trainer.manifest.overrides import apply_overrides
from qwen35_trainer.manifest.parse import parse_manifest
from tests.models import published

DIVISOR = 16
"""Of the sequences of a micro-batch."""
VERSIONS = 2
"""The second is generated with the weights that the first has trained."""

SHAPES = {True: "35B-A3B", False: "27B, untied"}
"""Published shapes with and without experts."""
LAYERS = {"num_hidden_layers": 2, "full_attention_interval": 2, "layer_types": ["linear_attention", "full_attention"]}
"""One layer of each kind."""
HEADS = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
"""The smallest heads of Gated DeltaNet that vLLM's kernels for the CPU have."""
WORDS = ["user", "assistant", "\n", "?", "0", "1", "+", "=", "</think>", r"\boxed{1}", r"\boxed{2}", "#### 0", "#### 1"]
"""Tokens of the model. An answer is one of them, so that random weights are right now and then."""
COLOURS = {"1": (255, 0, 0), "2": (0, 0, 255)}
"""Answer → colour of the last picture of its prompt."""


type Rollouts = Literal["Torch", "VLLM"]
"""The engine that generates: the embedded one, or that of the recipe with its settings."""


def changes(manifest: Manifest, ranks: int, rollouts: Rollouts = "Torch") -> dict[str, object]:
    """What shrinking replaces: paths below spec, and their new values. Parts of the rollout only where a recipe has them."""
    spec = manifest.spec
    micro = max(1, spec.train.batch.microBatchSequences // DIVISOR)
    changed: dict[str, object] = {
        "accelerator.profile": "CPU",
        "accelerator.devicesPerNode": ranks,
        "model.source": {"path": "model"},
        "data.maxPromptTokens": 24,
        "data.maxResponseTokens": 6,
        "train.nodes": 1,
        "train.updates": updates(manifest),
        "train.batch.promptsPerUpdate": max(ranks, micro),
        "train.batch.microBatchSequences": micro,
        "checkpoint.storage": None,
    }
    for part, sources in (("train", spec.data.train), ("validation", spec.data.validation)):
        for index in range(len(sources)):
            files = f"data.{part}[{index}].files"
            changed |= {f"{files}.paths[0]": f"{part}.parquet", f"{files}.volume": None}
    if spec.rollout is not None:
        changed |= {"rollout.nodes": 1, "rollout.tensorParallel": 1}
        changed |= {"rollout.engine": "Torch", "rollout.vllm": None} if rollouts == "Torch" else {}
    return changed


def updates(manifest: Manifest) -> int:
    """Return the number of updates of the shrunken recipe."""
    knobs = manifest.spec.async_
    return VERSIONS * knobs.updatesPerBatch * knobs.batchesPerPublication


def shrunken(manifest: Manifest, ranks: int = 1, rollouts: Rollouts = "Torch") -> Manifest:
    """Return the manifest with `changes`, for `ranks` train workers. Raises ManifestError where the result does not fit together."""
    document, _ = parse_document(dump_manifest(manifest))
    assert isinstance(document, dict)
    overrides = [f"{path}={json.dumps(value)}" for path, value in changes(manifest, ranks, rollouts).items()]
    return parse_manifest(apply_overrides(document, overrides))


def shape_of(manifest: Manifest) -> str:
    """Return the published shape (tests/models/published.py) of the recipe's model: -A3B is the name of a mixture of experts."""
    return SHAPES["-A" in manifest.spec.model.name]


def sees(manifest: Manifest) -> bool:
    """Whether the recipe's prompts have pictures."""
    return manifest.spec.data.train[0].name.startswith("geo3k")


def write(folder: Path, manifest: Manifest) -> Path:
    """Write a shrunken manifest with its model and its data to an empty folder, and return the manifest's file."""
    rollout = manifest.spec.rollout
    heads = HEADS if rollout is not None and rollout.engine == "VLLM" else {}
    published.write(folder / "model", shape_of(manifest), text=LAYERS | heads)
    published.write_tokenizer(folder / "model", WORDS)
    for part, count in (("train", 16), ("validation", 4)):
        rows = [(shown_row if sees(manifest) else sum_row)(part, number) for number in range(count)]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{part}.parquet")
    file = folder / "recipe.yaml"
    file.write_text(dump_manifest(manifest))
    return file


def shown_row(part: str, number: int) -> dict[str, object]:
    """Return a row as verl's data_preprocess/geo3k.py writes it: one or two pictures of one colour each."""
    draw = random.Random(f"{part} {number}")
    answers = draw.choices(list(COLOURS), k=draw.choice([1, 1, 2]))
    images = [{"bytes": _picture(COLOURS[answer], draw.choice([8, 16])), "path": None} for answer in answers]
    question = "<image>" * len(images) + "?"
    return _row("hiyouga/geometry3k", part, number, question, answers[-1]) | {"images": images}


def sum_row(part: str, number: int) -> dict[str, object]:
    """Return a row as verl's data_preprocess/gsm8k.py writes it: the last binary digit of a sum."""
    first, second = divmod(number + 16 * (part == "validation"), 8)
    return _row("openai/gsm8k", part, number, f"{first:b}+{second:b}=", str((first + second) % 2))


def _row(source: str, part: str, number: int, question: str, answer: str) -> dict[str, object]:
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": part, "index": number, "answer": answer, "question": question},
    }


def _picture(colour: tuple[int, int, int], side: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((side, side, 3), colour, np.uint8)).save(file, "PNG")
    return file.getvalue()
