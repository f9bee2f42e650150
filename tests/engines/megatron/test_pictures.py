"""Vision-language models in the Megatron engine. `test_parity.py` compares updates on pictures with those of the library's model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.group import Group
from tests.distributed.samples import batch_of, policy_spec_of, scenes_of, spec_of, with_scenes
from tests.distributed.test_parity import PICTURED, library_model
from tests.engines.megatron.test_parity import GRADIENTS, SMALL, TOTAL, assert_updates_as_fsdp

pytestmark = pytest.mark.processes

MIXTURE = PICTURED["vision-language MoE"]
TENSOR, PIPELINE = {"tensor": 2, "sequence": True}, {"pipeline": 2}
MICRO = {"batch": {"microBatchSequences": 4}}
TOWER = "model.visual."


def of_tower(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: each for name, each in tensors.items() if name.startswith(TOWER)}


LOSSES_OF_ROUTERS = {"router": {"loadBalancingLoss": 0.1, "zLoss": 0.01}}


def in_soak(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.soak)


@pytest.mark.parametrize(
    ("kind", "layout", "settings"),
    [
        ("vision-language MoE", TENSOR, {"kl": "Loss"}),
        ("vision-language", PIPELINE, {"kl": "Loss"}),
        ("vision-language MoE", PIPELINE | {"virtual": 2}, LOSSES_OF_ROUTERS),
        ("vision-language MoE", TENSOR | {"expert": 2}, LOSSES_OF_ROUTERS),
        in_soak("vision-language", TENSOR, {"kl": "Reward"}),
        in_soak("vision-language MoE", PIPELINE, {"algorithm": {"correction": {"type": "TokenTIS"}}}),
        in_soak("vision-language MoE", {"expert": 2}, {"kl": "Loss"} | LOSSES_OF_ROUTERS),
        in_soak("vision-language MoE", {"expert_tensor": 2}, LOSSES_OF_ROUTERS),
        in_soak("vision-language MoE", TENSOR | PIPELINE, {"kl": "Loss"} | LOSSES_OF_ROUTERS),
    ],
    ids=str,
)
def test_a_policy_update_on_pictures_is_that_of_the_fsdp_engine(
    groups: Callable[[int], Group], kind: str, layout: dict[str, Any], settings: dict[str, Any]
) -> None:
    """In some cases with a reference model, which has a tower of its own, and with losses of routers, which leave padding out. The
    gradients that are compared are those of all parameters, the tower's included.
    """
    ranks = max(2, layout.get("tensor", 1) * layout.get("pipeline", 1))
    spec, batch = policy_spec_of(ranks, **settings, **MICRO), with_scenes(batch_of(8, 0))
    assert_updates_as_fsdp(groups(ranks), spec, layout, batch, pictured=PICTURED[kind], pictures=True)


@pytest.mark.parametrize("kind", PICTURED)
def test_without_pictures_the_tower_is_published_as_it_is_and_the_rest_trains_as_a_text_model(
    groups: Callable[[int], Group], kind: str
) -> None:
    spec, batches = spec_of(2, **MICRO), [batch_of(8, seed, supervised=True) for seed in range(2)]
    result = groups(2).run("train", spec=spec, batches=batches, layout=TENSOR, pictured=PICTURED[kind])[0]
    theirs = groups(2).run("train_with_fsdp", spec=spec, batches=batches, pictured=PICTURED[kind])[0]
    built = library_model(kind).state_dict()
    assert result["published"].keys() == built.keys()
    for name, values in of_tower(built).items():
        assert torch.equal(result["published"][name], values), name
    for ours, other in zip(result["metrics"], theirs["metrics"], strict=True):
        assert ours.loss == pytest.approx(other.loss, rel=TOTAL)
        assert ours.gradient_norm == pytest.approx(other.gradient_norm, rel=GRADIENTS)


@pytest.mark.parametrize("pictures", [True, False], ids=["pictures", "text only"])
def test_a_checkpoint_is_continued_in_another_layout_and_by_the_fsdp_engine(
    groups: Callable[[int], Group], tmp_path: Path, pictures: bool
) -> None:
    batches = [scenes_of(seed) if pictures else batch_of(8, seed, supervised=True) for seed in range(2)]
    spec, model = spec_of(2, **MICRO), {"pictured": MIXTURE, "pictures": pictures}
    first, second = batches
    straight = groups(2).run("train", spec=spec, batches=batches, layout=TENSOR, **model)[0]
    saved = groups(2).run("train", spec=spec, batches=[first], layout=TENSOR, save=tmp_path, file_bytes=SMALL, **model)[
        0
    ]["published"]
    ours = groups(2).run("train", spec=spec, batches=[second], layout=PIPELINE, restore=tmp_path, **model)[0]
    assert all(torch.equal(ours["first"][name], values) for name, values in saved.items())
    theirs = groups(2).run("train_with_fsdp", spec=spec, batches=[second], restore=tmp_path, **model)[0]
    for continued in (ours, theirs):
        assert continued["metrics"][0].loss == pytest.approx(straight["metrics"][1].loss, rel=TOTAL)
        for name, values in straight["published"].items():
            step = values - saved[name]
            assert float((continued["published"][name] - values).norm()) <= 0.05 * float(step.norm()) + 1e-7, name


def test_copies_of_the_tower_step_together(groups: Callable[[int], Group]) -> None:
    """Each tensor-parallel rank computes the tower. Gradients that rounding makes different would let the copies drift apart."""
    spec, batches = spec_of(2, **MICRO), [scenes_of(seed) for seed in range(2)]
    first, second = groups(2).run("towers", spec=spec, batches=batches, layout=TENSOR, pictured=MIXTURE)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    built = of_tower(library_model("vision-language MoE").state_dict())
    assert {TOWER.removeprefix("model.") + name.removeprefix(TOWER) for name in built} == first.keys()
    assert any(not torch.equal(first[name.removeprefix("model.")], values) for name, values in built.items())


def test_a_prediction_head_with_pictures_is_refused(groups: Callable[[int], Group]) -> None:
    spec = spec_of(1, engine="Megatron", multiTokenPrediction={"lossWeight": 0.1})
    text, formed = groups(1).run("refusal_of_settings", spec=spec, pictured=MIXTURE)[0]
    assert "spec.train.multiTokenPrediction: the data have pictures" in text
    assert not formed
