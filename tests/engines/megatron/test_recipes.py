"""Each recipe of `examples/` that trains with Megatron makes two updates with its own settings, on a small folder of published shape.

shrunk       the model's sizes and layers; devices: four processes; prompts of an update: as few as data-parallel ranks
             can divide; lengths of sequences
not shrunk   degrees of parallelism above 1 stay above 1 where four processes have room for them, and everything else in `spec.train`
             and `spec.algorithm`
"""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen35_trainer.manifest import load_manifest, parse_spec
from qwen35_trainer.manifest.training import TrainingSpec
from tests.distributed.group import Group
from tests.distributed.samples import batch_of, with_scenes
from tests.engines.megatron.test_folders import folder_of
from tests.models import qwen3_moe

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))
RECIPES = [file for file in EXAMPLES if load_manifest(file).spec.train.engine == "Megatron"]
RANKS, UPDATES = 4, 2
SHAPES = {True: "35B-A3B", False: "27B, untied"}
"""Published shapes of Qwen3.5 with and without experts."""


def shrunken(spec: TrainingSpec) -> dict[str, Any]:
    """The spec of a recipe for four processes and the model in folder `model`."""
    document: dict[str, Any] = spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
    document["accelerator"] = {"profile": "CPU", "devicesPerNode": RANKS}
    document["model"] |= {"name": "tiny", "source": {"path": "model"}}
    document["data"] |= {"train": [{"name": "t", "files": {"paths": ["t.jsonl"]}}], "validation": []}
    document["data"] |= {"maxPromptTokens": 8, "maxResponseTokens": 12}
    document["rewards"] = [{"type": "ExactMatch"}] if document.get("rewards") else []
    if spec.rollout is not None:
        document["rollout"] = {"engine": "Torch", "temperature": spec.rollout.temperature}
    small = degrees(spec.train.parallelism.model_dump())
    shares = RANKS // (small["tensor"] * small["pipeline"] * small["context"])
    micro = spec.train.batch.microBatchSequences
    prompts = shares * micro if spec.mode == "SFT" else shares // math.gcd(shares, spec.algorithm.groupSize)
    document["train"] |= {"nodes": 1, "parallelism": small}
    document["train"]["batch"] = document["train"].get("batch", {}) | {"promptsPerUpdate": prompts}
    document.pop("checkpoint", None)
    return document


def degrees(published: dict[str, int]) -> dict[str, int]:
    """Each degree above 1 becomes 2, one after another, unless that needs more than four processes."""
    small = dict.fromkeys(published, 1)
    for name in ("pipeline", "virtualPipeline", "tensor", "context", "expert", "expertTensor"):
        if published[name] > 1:
            small[name] = 2
            dense = small["tensor"] * small["pipeline"] * small["context"]
            if RANKS % dense or RANKS % (small["expertTensor"] * small["expert"] * small["pipeline"]):
                small[name] = 1
    return small


def different(recipes: list[Path]) -> list[Path]:
    """The recipes without those that shrink to what another one shrinks to, because they differ only in their devices."""
    by_settings: dict[str, Path] = {}
    for file in recipes:
        by_settings.setdefault(json.dumps(shrunken(load_manifest(file).spec), sort_keys=True), file)
    return list(by_settings.values())


def test_a_recipe_trains_with_megatron() -> None:
    assert RECIPES


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_degrees_stay_above_1(file: Path) -> None:
    published = load_manifest(file).spec.train.parallelism.model_dump()
    small = degrees(published)
    assert {name for name, degree in small.items() if degree > 1} == {
        name for name, degree in published.items() if degree > 1
    }


@pytest.mark.processes
@pytest.mark.parametrize("file", different(RECIPES), ids=lambda file: file.stem)
def test_its_settings_train(groups: Callable[[int], Group], tmp_path: Path, file: Path) -> None:
    recipe = load_manifest(file).spec
    document = shrunken(recipe)
    spec, problems = parse_spec(document)
    assert spec is not None, problems
    assert not problems
    kept = (
        "optimizer",
        "offload",
        "router",
        "activationCheckpointing",
        "headPrecision",
        "freeze",
        "multiTokenPrediction",
        "overrideTransformerConfig",
    )
    for section in kept:
        assert getattr(spec.train, section) == getattr(recipe.train, section)
    assert spec.algorithm == recipe.algorithm
    with_head = recipe.train.multiTokenPrediction is not None
    if "Qwen3-" in recipe.model.name:
        qwen3_moe.write(tmp_path / "model")
    else:
        folder_of(tmp_path, SHAPES["-A" in recipe.model.name], whole_head=with_head)
    count = UPDATES * spec.samples_per_update
    batch = batch_of(count, 0, supervised=recipe.mode == "SFT")
    pictures = recipe.data.train[0].name == "geo3k"
    batch = with_scenes(batch) if pictures else batch
    size = 1 if recipe.mode == "SFT" else recipe.algorithm.groupSize
    group = None if batch.group is None else np.arange(count) // size
    results = groups(RANKS).run(
        "train",
        spec=document,
        batches=[replace(batch, group=group, updates=UPDATES)],
        folder=tmp_path,
        pictures=pictures,
    )
    metrics = results[0]["metrics"]
    assert len(metrics) == UPDATES
    assert all(math.isfinite(each.loss) and 0 < each.gradient_norm < math.inf for each in metrics)
    assert all(each["metrics"] == metrics for each in results)
    if recipe.train.router.zLoss:
        assert all(each.means["router_z"] > 0 and each.means["router_load_balancing"] > 0 for each in metrics)
    assert all(("mtp_nll" in each.means) == with_head for each in metrics)
    before, after = results[0]["first"], results[0]["published"]
    assert before.keys() == after.keys()
    changed = {name for name, values in after.items() if not before[name].equal(values)}
    assert changed
    assert any(name.startswith("model.visual.") for name in changed) is pictures
    if recipe.train.offload.optimizer:
        assert {each["Optimizer"] for rank in results for each in rank["passes"]} == {0}
