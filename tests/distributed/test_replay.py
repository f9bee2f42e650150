"""Router replay on two ranks: the same training as on one, however samples, sequences and experts are divided."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from qwen35_trainer.engines.train_batch import TrainBatch
from tests.distributed.distance import distance
from tests.distributed.group import Group
from tests.distributed.samples import batch_of, policy_spec_of
from tests.engines.chosen_experts import LostOn, choices_for, recorded

RANDOM = {"experts": 4, "layers": 2, "fullAttentionInterval": 2}
PACKED = {"batch": {"removePadding": True, "dynamicMicroBatches": True, "maxTokensPerDevice": 60}}
LOST = 3
"""The sample whose choices one rank cannot read."""


def batch() -> TrainBatch:
    plain = batch_of(8, 0)
    return replace(plain, choices=recorded(plain, choices_for(plain, layers=2, experts=4)))


def trained(groups: Callable[[int], Group], ranks: int, trains: TrainBatch, **train: Any) -> list[dict[str, Any]]:
    router = {"replay": True, "loadBalancingLoss": 0.5, "zLoss": 0.1}
    spec = policy_spec_of(ranks, random=RANDOM, router=router, **train)
    results: list[dict[str, Any]] = groups(ranks).run("train", spec=spec, batches=[trains], rates=[1e-3])
    return results


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Within the limits of `test_parity`: ranks add in another order."""
    [ours], [theirs] = actual["metrics"], expected["metrics"]
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
    assert ours.gradient_norm == pytest.approx(theirs.gradient_norm, rel=1e-5)
    assert ours.means == pytest.approx(theirs.means, rel=1e-4, abs=1e-6)
    assert distance(actual["gradients"][0], expected["gradients"][0], expected["gradients"][0]) <= 1e-4


@pytest.mark.parametrize(
    "train",
    [
        pytest.param({}, id="data"),
        pytest.param({"parallelism": {"context": 2}}, id="context"),
        pytest.param({"parallelism": {"context": 2}} | PACKED, id="context, packed"),
        pytest.param({"parallelism": {"expert": 2}} | PACKED, id="experts, packed"),
    ],
)
def test_two_ranks_replay_as_one(groups: Callable[[int], Group], train: dict[str, Any]) -> None:
    [alone] = trained(groups, 1, batch())
    [own] = trained(groups, 1, replace(batch(), choices=None))
    first, second = trained(groups, 2, batch(), **train)
    assert first["metrics"] == second["metrics"]
    assert first["metrics"][0].means["replayed_token_share"] == 1.0
    assert_same(first, alone)
    assert alone["metrics"][0].loss != pytest.approx(own["metrics"][0].loss, rel=1e-3)


def test_choices_that_one_rank_cannot_read_are_replayed_by_none_of_those_that_share_the_sequence(
    groups: Callable[[int], Group],
) -> None:
    whole = batch()
    assert whole.choices is not None
    sources: list[Any] = list(whole.choices)
    [alone] = trained(groups, 1, replace(whole, choices=(*sources[:LOST], None, *sources[LOST + 1 :])))
    sources[LOST] = LostOn(1, sources[LOST])
    first, _ = trained(groups, 2, replace(whole, choices=tuple(sources)), parallelism={"context": 2})
    assert first["metrics"][0].means["replayed_token_share"] < 1.0
    assert_same(first, alone)
