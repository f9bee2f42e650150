"""Experts that are divided over ranks, to which tokens travel: the same training as without an expert mesh."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.distance import distance, moved
from tests.distributed.samples import batch_of, spec_of
from tests.distributed.test_published import spec_for
from tests.models import published

BATCHES = [batch_of(8, seed, supervised=True) for seed in (0, 1)]
ROUTER = {"loadBalancingLoss": 0.5, "zLoss": 0.1}
MESH = {"parallelism": {"expert": 2}}


def trained(groups, ranks: int, batches=BATCHES, *, experts: int = 4, more: dict[str, Any] | None = None, **train: Any):
    """What rank 0 of `ranks` ranks returns. more: arguments of the job; train: sections of spec.train."""
    spec = spec_of(ranks, random={"experts": experts}, **train)
    rates = [1e-3] * len(batches)
    return groups(ranks).run("train", spec=spec, batches=batches, rates=rates, **more or {})[0]


def distance_of_all(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The distance of all weights together: the weights of norms begin at 0, and are only as large as what Adam makes of rounding."""
    assert ours.keys() == theirs.keys()
    apart = sum(float((ours[name] - each).square().sum()) for name, each in theirs.items())
    return math.sqrt(apart / sum(float(each.square().sum()) for each in theirs.values()))


def assert_same_training(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Loss, norm, gradient of each parameter and weights after two updates, to 1e-5.

    After an update of Adam the rounding of small gradients is larger, for it divides each by its size.
    """
    for ours, theirs in zip(actual["metrics"], expected["metrics"], strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
        assert ours.gradient_norm == pytest.approx(theirs.gradient_norm, rel=1e-5)
        assert ours.means == pytest.approx(theirs.means, rel=1e-5)
    for ours, theirs, allowed in zip(actual["gradients"], expected["gradients"], (1e-5, 1e-3), strict=True):
        assert distance(ours, theirs, theirs) <= allowed
    assert distance_of_all(actual["weights"], expected["weights"]) <= 1e-5
    assert (
        distance(actual["weights"], expected["weights"], moved(expected["first weights"], expected["weights"])) <= 2e-2
    )


@pytest.fixture(scope="module")
def plain(groups) -> dict[str, Any]:
    """Trained by 2 ranks without an expert mesh."""
    result: dict[str, Any] = trained(groups, 2, router=ROUTER)
    return result


@pytest.mark.parametrize(
    ("ranks", "layout", "train"),
    [
        pytest.param(2, {"expert": 2}, {}, id="2"),
        pytest.param(4, {"expert": 2}, {}, id="2 × 2"),
        pytest.param(4, {"expert": 2, "copies": 2}, {}, id="two copies", marks=pytest.mark.soak),
        pytest.param(4, {"expert": 4}, {}, id="4", marks=pytest.mark.soak),
        pytest.param(2, {"expert": 2}, {"activationCheckpointing": True}, id="recomputed"),
        pytest.param(2, {"expert": 2}, {"reshardAfterForward": False}, id="gathered", marks=pytest.mark.soak),
    ],
)
def test_an_expert_mesh_trains_as_fsdp_without_it(groups, plain, ranks, layout, train) -> None:
    divided = trained(groups, ranks, router=ROUTER, parallelism=layout, **train)
    assert_same_training(divided, plain)
    assert {"router_load_balancing", "router_z"} <= divided["metrics"][0].means.keys()


@pytest.mark.parametrize("experts", [[0, 1], [0, 2]], ids=["one rank gets all tokens", "one expert of each rank"])
def test_experts_and_ranks_without_a_token_take_part(groups, experts) -> None:
    more = {"experts_of_all": experts}
    plain = trained(groups, 2, more=more)
    divided = trained(groups, 2, more=more, **MESH)
    assert_same_training(divided, plain)
    unused = [number for number in range(4) if number not in experts]
    for name, gradient in divided["gradients"][0].items():
        if ".experts." in name:
            assert gradient[experts[0]].norm() > 0, name
            assert not gradient[unused].any(), name


def test_four_ranks_with_more_places_than_experts_of_a_part_train_as_two(groups) -> None:
    """Six experts on 4 ranks: each part of 3 is sharded as 2 and 1. One sample: 3 ranks compute a placeholder."""
    batches = [batch_of(1, seed, supervised=True) for seed in (0, 1)]
    batch = {"promptsPerUpdate": 1, "dynamicMicroBatches": True, "maxTokensPerDevice": 40}
    plain = trained(groups, 1, batches, experts=6, batch=dict(batch))
    divided = trained(groups, 4, batches, experts=6, batch=dict(batch), **MESH)
    assert_same_training(divided, plain)


@pytest.mark.parametrize(
    "train",
    [
        {"optimizer": {"type": "Muon"}},
        {"offload": {"parameters": True, "gradients": True, "optimizer": True}},
        pytest.param({"offload": {"optimizer": True}, "freeze": ["Router"]}, marks=pytest.mark.soak),
        {"lora": {"rank": 4, "targets": ["q_proj", "in_proj_qkv", "down_proj"]}},
    ],
    ids=["Muon", "offload", "frozen router", "LoRA"],
)
def test_an_expert_mesh_trains_as_without_it_whatever_steps(groups, train) -> None:
    plain = trained(groups, 2, **dict(train))
    divided = trained(groups, 2, **dict(train), **MESH)
    assert divided["metrics"][1].loss == pytest.approx(plain["metrics"][1].loss, rel=1e-4)
    for ours, theirs in zip(divided["gradients"], plain["gradients"], strict=True):
        assert distance(ours, theirs, theirs) <= 1e-3
    # Muon orthogonalises in bfloat16, where rounding of a gradient may move an entry by one part in 256.
    allowed = 1e-3 if "optimizer" in train else 1e-5
    assert distance_of_all(divided["weights"], plain["weights"]) <= allowed


def test_in_bfloat16_too_an_expert_mesh_has_the_gradients_of_fsdp(groups) -> None:
    gradients = []
    for layout in ({}, MESH):
        spec = spec_of(2, random={"experts": 4, "initializerRange": 0.05}, **layout)
        spec["model"]["precision"] = "BF16"
        [result, *_] = groups(2).run("train", spec=spec, batches=BATCHES[:1], rates=[1e-3])
        gradients.append(result["gradients"][0])
    assert distance(gradients[1], gradients[0], gradients[0]) <= 0.1


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(
    ("optimizer", "before", "after"),
    [
        ("AdamW", (2, 2), (2, 1)),
        ("Muon", (2, 2), (4, 2)),
        *(
            pytest.param("AdamW", *layouts, marks=pytest.mark.soak)
            for layouts in (((2, 1), (2, 2)), ((2, 2), (1, 1)), ((1, 1), (4, 2)))
        ),
        *(pytest.param("Muon", *layouts, marks=pytest.mark.soak) for layouts in (((2, 2), (2, 1)), ((1, 1), (2, 2)))),
    ],
    ids=lambda each: each if isinstance(each, str) else f"{each[0]} ranks, expert {each[1]}",
)
def test_a_checkpoint_continues_with_another_expert_mesh(groups, tmp_path: Path, optimizer, before, after) -> None:
    """Bit for bit: weights, and moments, which the next update shows."""
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    settings = {"optimizer": {"type": optimizer}}

    def run(layout: tuple[int, int], batches, seed: int = 5, **more: Any) -> dict[str, Any]:
        ranks, expert = layout
        return trained(
            groups, ranks, batches, more={"seed": seed} | more, parallelism={"expert": expert}, **dict(settings)
        )

    saved = run(before, BATCHES[:1], seed=0, save=folders[0])
    moved_on = run(after, [], restore=folders[0], save=folders[1])
    assert same(moved_on["weights"], saved["weights"])
    straight = run(before, BATCHES[1:], restore=folders[0])
    there_and_back = run(before, BATCHES[1:], restore=folders[1])
    assert there_and_back["metrics"] == straight["metrics"]
    assert same(there_and_back["weights"], straight["weights"])


@pytest.mark.parametrize(
    "per_expert", [pytest.param(False, marks=pytest.mark.soak), True], ids=["packed", "per expert"]
)
def test_what_ranks_of_an_expert_mesh_publish_is_the_source_to_the_bit(groups, tmp_path: Path, per_expert) -> None:
    model = published.write(tmp_path / "model", "35B-A3B", per_expert=per_expert)
    spec = spec_for("BF16", "2 ranks")
    spec["accelerator"]["devicesPerNode"], spec["train"]["parallelism"] = 4, {"expert": 2}
    results = groups(4).run("train", spec=spec, batches=[], rates=[], folder=tmp_path)
    weights = results[0]["published"]
    source = dict(model.named_parameters())
    assert weights.keys() == source.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, source[name].to(tensor.dtype)), name


def test_published_folders_train_with_an_expert_mesh(groups, tmp_path: Path) -> None:
    """A model with a vision tower; only the text's layers have experts."""
    published.write(tmp_path / "model", "35B-A3B", per_expert=True)
    results = {}
    for expert in (1, 2):
        spec = spec_for("FP32", "2 ranks")
        spec["train"]["parallelism"] = {"expert": expert}
        results[expert] = groups(2).run("train", spec=spec, batches=BATCHES, rates=[1e-3] * 2, folder=tmp_path)[0]
    plain, divided = results[1], results[2]
    assert divided["metrics"][1].loss == pytest.approx(plain["metrics"][1].loss, rel=1e-5)
    change = moved(plain["first weights"], plain["weights"])
    assert distance(divided["weights"], plain["weights"], change) <= 2e-2


def test_a_dense_folder_is_refused(groups, tmp_path: Path) -> None:
    """No manifest contains the number of experts of a folder."""
    published.write(tmp_path / "model", "text only")
    spec = spec_for("FP32", "2 ranks")
    spec["train"]["parallelism"] = {"expert": 2}
    with pytest.raises(AssertionError, match="expert: 2 devices divide the experts of a layer, and the model is dense"):
        groups(2).run("train", spec=spec, batches=[], rates=[], folder=tmp_path)
