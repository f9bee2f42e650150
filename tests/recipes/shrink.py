"""A recipe made small enough for the CPUs of any machine: its settings at another size.

model            the same family and kind with random weights, experts and vision tower included
devices          one node of as many processes as asked for, so that FSDP shards; rollouts by the embedded engine
data, rewards    binary sums, and a reward that random weights earn every other time
batch            prompts and sequences divided by DIVISOR; two batches
"""

import json
import re

from qwen35_trainer.manifest import Manifest, dump_manifest
from qwen35_trainer.manifest.document import parse_document
from qwen35_trainer.manifest.overrides import apply_overrides
from qwen35_trainer.manifest.parse import parse_manifest

DIVISOR = 8
"""Of prompts per update and of sequences per micro-batch; one of these is left."""

BATCHES = 2
"""The second is generated with the weights that the first has trained."""

SHAPE = {"hiddenSize": 32, "intermediateSize": 32, "layers": 2, "fullAttentionInterval": 2, "linearValueHeads": 4}
ALPHABET = {"characters": "01+="}
SUMS = [(f"{first:b}+{second:b}=", str((first + second) % 2)) for first in range(16) for second in range(16)]
"""Prompts of the data that every shrunken recipe reads, and the last digits of their sums."""


def changes(manifest: Manifest, ranks: int) -> dict[str, object]:
    """What shrinking replaces: paths below spec, and their new values. Rollout and rewards only where a recipe has them."""
    spec = manifest.spec
    batch = spec.train.batch
    experts = {"experts": 4} if re.search(r"-A\d+B$", spec.model.name) else {}
    changed: dict[str, object] = {
        "accelerator.profile": "CPU",
        "accelerator.devicesPerNode": ranks,
        "model.source": {"random": SHAPE | ALPHABET | experts | {"vision": {}}},
        "data.train": [{"name": "train", "files": {"paths": ["train.jsonl"]}}],
        "data.maxPromptTokens": 10,
        "data.maxResponseTokens": 6,
        "train.nodes": 1,
        "train.updates": BATCHES * spec.async_.updatesPerBatch,
        "train.batch.promptsPerUpdate": batch.promptsPerUpdate // DIVISOR,
        "train.batch.microBatchSequences": max(1, batch.microBatchSequences // DIVISOR),
        "checkpoint.storage": None,
    }
    if spec.data.validation:
        changed["data.validation"] = [{"name": "held-out", "files": {"paths": ["validation.jsonl"]}}]
    if spec.rollout is not None:
        changed |= {"rollout.engine": "Torch", "rollout.nodes": 1, "rollout.tensorParallel": 1}
        changed["rewards"] = [{"type": "ExactMatch", "extract": "[01]"}]
    return changed


def shrunken(manifest: Manifest, ranks: int = 1) -> Manifest:
    """Return the manifest with `changes`, for `ranks` train workers. Raises ManifestError where the result does not fit together."""
    document, _ = parse_document(dump_manifest(manifest))
    assert isinstance(document, dict)
    overrides = [f"{path}={json.dumps(value)}" for path, value in changes(manifest, ranks).items()]
    return parse_manifest(apply_overrides(document, overrides))
