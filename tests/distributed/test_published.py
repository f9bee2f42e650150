"""Folders as Qwen3.5 is published, in every precision and with parts that do not train: they load, and every weight moves.

Published configurations name bfloat16 for the text and nothing for the vision tower. Weights that train in bfloat16 hardly
change at a learning rate of 1e-6: its spacing is larger than the steps.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from qwen35_trainer.manifest import ModelSpec
from qwen35_trainer.models.qwen3_5.build_model import ModelSettings, build
from qwen35_trainer.models.qwen3_5.precision import PRECISIONS
from qwen35_trainer.rollout.torch import TorchEngine
from tests.distributed.samples import batch_of, scenes_of, spec_of
from tests.distributed.test_parity import Differences, Training, plain_loop
from tests.models import published
from tests.models.rounding import in_float64
from tests.profiles import SOAK
from tests.rollout.loading import load

UPDATES, RATE = 5, 1e-6
WEIGHTS: dict[str, tuple[str, dict[str, Any]]] = {
    "BF16": ("BF16", {}),
    "FP32": ("FP32", {}),
    "LoRA": ("BF16", {"lora": {"rank": 4, "alpha": 8.0}}),
    "frozen vision": ("BF16", {"freeze": ["Vision"]}),
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank": (1, {}),
    "2 ranks": (2, {"batch": {"removePadding": True, "microBatchSequences": 4}}),
    "2 ranks, offload": (2, {"offload": {"parameters": True, "gradients": True, "optimizer": True}}),
}
CASES = [
    ("0.8B, tied", "BF16", "1 rank"),
    ("27B, untied", "BF16", "2 ranks"),
    ("27B, untied", "LoRA", "2 ranks"),
    ("35B-A3B", "BF16", "2 ranks, offload"),
    ("35B-A3B, vision dtype named", "frozen vision", "2 ranks"),
    ("text only", "LoRA", "1 rank"),
]
"""Each shape, each way to hold weights, and each layout at least once; the soak test runs every combination."""
IMPOSSIBLE = ("text only", "frozen vision")
if SOAK:
    CASES = [case for case in itertools.product(published.SHAPES, WEIGHTS, LAYOUTS) if case[:2] != IMPOSSIBLE]


def batches_for(shape: str, count: int) -> list[Any]:
    if shape == "text only":
        return [batch_of(8, seed, supervised=True) for seed in range(count)]
    return [scenes_of(seed) for seed in range(count)]


def spec_for(held: str, layout: str, **optimizer: object) -> dict[str, Any]:
    (precision, train), (ranks, laid_out) = WEIGHTS[held], LAYOUTS[layout]
    spec = spec_of(ranks, optimizer=optimizer, **train, **laid_out)
    spec["model"] |= {"precision": precision, "source": {"path": "model"}}
    return spec


@pytest.mark.parametrize(("shape", "held", "layout"), CASES)
def test_weights_that_train_move(groups, tmp_path: Path, shape: str, held: str, layout: str) -> None:
    published.write(tmp_path / "model", shape, per_expert=layout == "2 ranks")
    batches = batches_for(shape, UPDATES)
    spec = spec_for(held, layout, weightDecay=0.0)
    results = groups(LAYOUTS[layout][0]).run(
        "train", spec=spec, batches=batches, rates=[RATE] * UPDATES, folder=tmp_path
    )
    result = results[0]
    before, after = ("adapters", "trained adapters") if held == "LoRA" else ("first weights", "weights")
    moved = learned = 0
    for name in result["gradients"][0]:
        had_gradient = sum(gradients[name].abs() for gradients in result["gradients"]) > 0
        assert result[after][name].dtype == torch.float32, name
        moved += int((result[before][name] != result[after][name])[had_gradient].sum())
        learned += int(had_gradient.sum())
    assert moved > 0.95 * learned > 0
    vision = {name for name in result["gradients"][0] if "visual" in name}
    assert bool(vision) == (shape != "text only" and held not in ("LoRA", "frozen vision"))
    if held == "frozen vision":
        frozen = {name: tensor for name, tensor in result["weights"].items() if "visual" in name}
        assert {tensor.dtype for tensor in frozen.values()} == {torch.bfloat16}
        assert all(torch.equal(tensor, result["first weights"][name]) for name, tensor in frozen.items())
    assert not any(other["published"] for other in results[1:])
    if held != "LoRA":
        assert_published(result, spec, tmp_path)


def assert_published(result: dict[str, Any], spec: dict[str, Any], folder: Path) -> None:
    """Every parameter once, in the type of published files, and the rollout model of the same folder has its types and takes it."""
    weights, model = result["published"], ModelSpec.model_validate(spec["model"])
    precision = PRECISIONS[model.precision]
    rollout = build(ModelSettings(model, seed=1, vocabulary=23, max_length=64, base=folder, precision=precision))
    assert weights.keys() == dict(rollout.named_parameters()).keys()
    for name, parameter in rollout.named_parameters():
        kept = name.endswith(("linear_attn.A_log", "linear_attn.norm.weight"))
        assert weights[name].dtype == parameter.dtype == (torch.float32 if kept else precision), name
        assert torch.equal(weights[name], result["weights"][name].to(parameter.dtype)), name
    load(TorchEngine(rollout, end_token=2, slots=1, max_length=64, seed=0), weights, 1)
    assert all(torch.equal(parameter, weights[name]) for name, parameter in rollout.named_parameters())


@pytest.mark.parametrize("shape", ["0.8B, tied", "35B-A3B"])
def test_in_float32_they_train_as_the_librarys_model_does(groups, tmp_path: Path, shape: str) -> None:
    model = published.write(tmp_path / "model", shape)
    kind = {"0.8B, tied": "vision-language", "35B-A3B": "vision-language MoE"}[shape]
    rates = [1e-3] * 3
    (result,) = groups(1).run(
        "train", spec=spec_for("FP32", "1 rank"), batches=batches_for(shape, 3), rates=rates, folder=tmp_path
    )
    metrics = result["metrics"]
    weights = {
        name: result["weights"][name] for name, _ in model.named_parameters()
    }  # a tied output layer has no entry there
    losses, norms = [each.loss for each in metrics], [each.gradient_norm for each in metrics]
    ours = Training(losses, norms, result["gradients"], weights, {})
    exact = plain_loop(in_float64(model), kind)
    assert not Differences.between(ours, plain_loop(model, kind), exact).too_large
