"""The two jobs that `embedded.py` measures, and the inputs of each variant: one model folder, one set of prompts.

short      learns the demo's task: answers of at most 3 tokens, so that every sequence costs about the same
longTail   learns nothing: the output layer is zero, each of the 50 tokens comes equally often, one of them ends the
response. Lengths are geometric with mean 50, cut at 512; the learning rate rounds to zero in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from qwen35_trainer.data.tokenizer import character_tokenizer
from qwen35_trainer.manifest import ModelSourceSpec, ModelSpec, RandomModelSpec
from qwen35_trainer.models.qwen3_5.build_model import ModelSettings, build

type PartName = Literal["short", "longTail"]
type Mode = Literal["FullyAsync", "Colocated"]

DATA = Path(__file__).resolve().parent.parent / "examples" / "tiny"
PROMPTS, SAMPLES, PROMPT_TOKENS = 16, 16, 8
"""Per update; samples per prompt; tokens of every prompt."""
GOAL = 0.8
"""Held-out accuracy until which time is measured."""


@dataclass(frozen=True)
class Part:
    """Settings of a job. The last three fields tune the variants; docs/benchmarks.md lists other values that were tried."""

    name: PartName
    updates: int
    characters: str
    response_tokens: int
    learning_rate: float
    evaluate_every: int
    """Updates between evaluations; 0 is never."""
    max_tokens: int
    """Padded tokens of a micro-batch in our variants."""
    trl_threads: int
    trl_micro_batch: int
    """Sequences; the rest of an update's 256 is gradient accumulation."""

    @property
    def learns(self) -> bool:
        return self.name == "short"

    @property
    def schedule(self) -> Literal["Linear", "Constant"]:
        """Schedule of the learning rate."""
        return "Linear" if self.learns else "Constant"

    @property
    def extract(self) -> str:
        """Pattern of the first reward: the leading digit, or any digit of random text."""
        return r"^\d" if self.learns else r"\d"

    @property
    def skipped(self) -> int:
        """Updates before the steady window: caches fill, allocators grow, the pipeline settles."""
        return max(2, self.updates // 5)


PARTS: dict[PartName, Part] = {
    "short": Part(
        name="short",
        updates=300,
        characters="0123456789>=",
        response_tokens=3,
        learning_rate=1.5e-3,
        evaluate_every=20,
        max_tokens=4096,
        trl_threads=2,
        trl_micro_batch=256,
    ),
    "longTail": Part(
        name="longTail",
        updates=30,
        characters="0123456789>=abcdefghijklmnopqrstuvwxyz+-*/,.:;?",  # with 3 special tokens, 50
        response_tokens=512,
        learning_rate=1e-60,
        evaluate_every=0,
        max_tokens=2048,
        trl_threads=2,
        trl_micro_batch=64,
    ),
}


def save_model(part: Part, folder: Path) -> None:
    """Write the weights and the tokenizer that every variant loads."""
    tokenizer = character_tokenizer(part.characters)
    source = ModelSourceSpec(random=RandomModelSpec(characters=part.characters))
    spec = ModelSpec(name="tiny-qwen3.5", source=source, precision="FP32")
    model = build(
        ModelSettings(
            spec, seed=0, vocabulary=len(tokenizer), max_length=PROMPT_TOKENS + part.response_tokens, base=folder
        )
    )
    if not part.learns:
        model.lm_head.weight.data.zero_()
    model.config.use_cache = model.generation_config.use_cache = True  # or the peer generates without a cache
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
        config.bos_token_id = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_manifest(part: Part, mode: Mode, folder: Path) -> Path:
    """Write the manifest of our two variants into `folder`, which is next to the model. Returns its path."""
    spec: dict[str, Any] = {
        "mode": mode,
        "accelerator": {"profile": "CPU", "devicesPerNode": 1},
        "model": {"name": "tiny-qwen3.5", "precision": "FP32", "source": {"path": "../model"}},
        "data": {
            "train": [{"name": "train", "files": {"paths": [str(DATA / "train.jsonl")]}}],
            "maxPromptTokens": PROMPT_TOKENS,
            "maxResponseTokens": part.response_tokens,
        },
        "rewards": [
            {"name": "digit", "type": "ExactMatch", "extract": part.extract, "weight": 0.8},
            {"name": "nothing-else", "type": "ExactMatch", "weight": 0.2},
        ],
        "algorithm": {
            "advantage": "GRPO",
            "groupSize": SAMPLES,
            "loss": {"type": "PPOClip", "clipLow": 0.2, "clipHigh": 0.28},
        },
        "rollout": {"engine": "Torch", "nodes": 1, "maxSequencesPerReplica": PROMPTS * SAMPLES},
        "train": {
            "engine": "FSDP",
            "nodes": 1,
            "updates": part.updates,
            "batch": {"promptsPerUpdate": PROMPTS, "dynamicMicroBatches": True, "maxTokensPerDevice": part.max_tokens},
            "optimizer": {
                "learningRate": part.learning_rate,
                "weightDecay": 0.0,
                "schedule": part.schedule,
            },
        },
        "checkpoint": {"everyUpdates": 1_000_000},
        "tracking": {"tensorboard": False},
    }
    if part.evaluate_every:
        spec["data"]["validation"] = [{"name": "held-out", "files": {"paths": [str(DATA / "validation.jsonl")]}}]
        spec["evaluation"] = {"everyUpdates": part.evaluate_every, "atStart": False}
    if mode == "FullyAsync":
        spec["async"] = {"stalenessThreshold": 1.0, "maxVersionLag": 3, "batchesPerPublication": 1}
    manifest = {
        "apiVersion": "rl.qwen35.io/v1alpha1",
        "kind": "Qwen35Training",
        "metadata": {"name": f"{part.name.lower()}-{mode.lower()}"},
        "spec": spec,
    }
    path = folder / f"{mode}.yaml"
    path.write_text(yaml.safe_dump(manifest, sort_keys=False))
    return path
