"""Real process groups over gloo: ranks make the step that one makes, whatever the objective and the dealing."""

from dataclasses import replace

import pytest
import torch

from qwen35_trainer.models.qwen3_5.precision import keeps_float32
from tests.distributed.distance import distance, moved
from tests.distributed.samples import batch_of, policy_spec_of, spec_of
from tests.patience import PATIENCE

LAYOUTS = {
    "three at a time": {"microBatchSequences": 3},
    "by tokens": {"dynamicMicroBatches": True, "maxTokensPerDevice": 40},
    "packed by tokens": {"dynamicMicroBatches": True, "maxTokensPerDevice": 40, "removePadding": True},
}


@pytest.mark.parametrize(
    ("experts", "samples", "layout"),
    [(0, 8, {}), (4, 8, {}), (0, 1, {}), *((0, 8, layout) for layout in LAYOUTS.values())],
    ids=["dense", "experts", "an idle rank", *LAYOUTS],
)
def test_two_ranks_make_the_policy_update_that_one_makes(groups, experts, samples, layout) -> None:
    two_ranks_agree_with_one(groups, experts, samples, layout)


@pytest.mark.parametrize("train", [{}, {"parallelism": {"context": 2}}], ids=["two shares", "one share"])
def test_advantages_that_are_whitened_over_the_batch_are_the_same_on_two_ranks(groups, train) -> None:
    algorithm = {"advantage": "ReinforcePlusPlus", "gamma": 0.9}
    two_ranks_agree_with_one(groups, 0, 8, {}, algorithm=algorithm, of_two=train)


@pytest.mark.parametrize("train", [{}, {"parallelism": {"context": 2}}], ids=["two shares", "one share"])
def test_two_ranks_make_the_update_over_candidates_that_one_makes(groups, train) -> None:
    algorithm = {"entropyCoefficient": 0.1}
    two_ranks_agree_with_one(
        groups, 0, 8, LAYOUTS["packed by tokens"], algorithm=algorithm, of_two=train, truncated=True
    )


def test_an_advantage_function_of_the_user_gets_the_whole_batch_on_each_of_two_ranks(groups) -> None:
    algorithm = {"advantage": "Function", "advantageFunction": "tests.distributed.own_advantage:relative_to_batch"}
    two_ranks_agree_with_one(groups, 0, 8, LAYOUTS["packed by tokens"], algorithm=algorithm)


def test_several_updates_of_a_batch_on_two_ranks_are_those_of_one(groups) -> None:
    """A rank's share of the batch consists of its shares of all updates. All layers stay gathered between their two passes."""
    algorithm = {"correction": {"type": "DecoupledPPO"}}
    gathered = {"reshardAfterForward": False}
    two_ranks_agree_with_one(groups, 0, 8, {"microBatchSequences": 2}, algorithm=algorithm, updates=2, of_two=gathered)


@pytest.mark.soak
@pytest.mark.parametrize(
    "algorithm",
    [
        {"loss": {"type": "GSPO"}, "correction": {"type": "TokenTIS"}},
        {"loss": {"type": "CISPO", "aggregation": "SequenceMeanTokenSum"}, "advantage": "RLOO"},
        {"loss": {"type": "GPG", "aggregation": "SequenceMeanTokenMean"}, "advantage": "DrGRPO"},
        {"loss": {"aggregation": "SequenceMeanTokenSumNorm"}, "correction": {"type": "IcePop"}},
        {"correction": {"type": "DecoupledPPO"}, "entropyCoefficient": 0.1},
        {"correction": {"type": "SequenceTIS"}, "kl": {"placement": "Loss", "coefficient": 0.1}},
        {"loss": {"type": "SAPO"}, "advantage": "OPO", "correction": {"type": "None"}},
        {
            "loss": {"type": "DPPOBinaryKL", "maxDivergence": 0.01},
            "advantage": "ReinforcePlusPlusBaseline",
            "correction": {"type": "None"},
        },
        {
            "kl": {"placement": "LossAndReward", "rewardCoefficient": 0.2, "rewardEstimator": "K1"},
            "advantage": "PassAtK",
        },
    ],
    ids=lambda algorithm: " ".join(str(value) for value in algorithm.values()),
)
def test_two_ranks_make_the_update_of_every_policy_that_one_makes(groups, algorithm) -> None:
    two_ranks_agree_with_one(groups, 0, 8, LAYOUTS["packed by tokens"], algorithm=algorithm)


def two_ranks_agree_with_one(
    groups, experts, samples, layout, *, of_two=None, updates=1, truncated=False, **sections
) -> None:
    """In two updates. layout: fields of `train.batch` of the two ranks. of_two: other sections of their `train`."""
    batches = [replace(batch_of(samples, seed, truncated=truncated), updates=updates) for seed in range(2 // updates)]
    shape = {"experts": experts}
    alone, together = (
        groups(ranks).run(
            "train",
            spec=policy_spec_of(ranks, kl="Reward", random=shape, batch=dict(batch), **sections, **train),
            batches=batches,
            rates=[1e-3] * len(batches),
        )[0]
        for ranks, batch, train in ((1, {}, {}), (2, layout, of_two or {}))
    )
    pairs = zip(alone["metrics"], together["metrics"], (1e-5, 1e-3), strict=True)
    for expected, actual, tolerance in pairs:
        assert actual.tokens == expected.tokens
        assert actual.loss == pytest.approx(expected.loss, rel=tolerance)
        assert actual.gradient_norm == pytest.approx(expected.gradient_norm, rel=tolerance)
    for expected, actual, allowed in zip(alone["gradients"], together["gradients"], (1e-4, 5e-3), strict=True):
        assert distance(actual, expected, expected) <= allowed
    assert distance(together["weights"], alone["weights"], moved(alone["first weights"], alone["weights"])) <= 2e-2


OFFLOAD = {"offload": {"parameters": True, "gradients": True, "optimizer": True}}


@pytest.mark.parametrize(
    ("ranks", "train"),
    [
        pytest.param(2, OFFLOAD, id="offload"),
        pytest.param(2, {"parallelism": {"context": 2}}, id="context parallel", marks=pytest.mark.soak),
        pytest.param(4, {"parallelism": {"copies": 2}} | OFFLOAD, id="HSDP, offload", marks=pytest.mark.soak),
        pytest.param(4, {"activationCheckpointing": True}, id="recomputed", marks=pytest.mark.soak),
    ],
)
def test_in_bfloat16_too_ranks_have_the_gradients_of_one(groups, ranks, train) -> None:
    """Of the vectors that compute in float32, which are sharded apart from the rest of their layer, as of everything else."""
    gradients = []
    for count, layout in ((1, {}), (ranks, train)):
        spec = spec_of(count, random={"initializerRange": 0.05}, **dict(layout))
        spec["model"]["precision"] = "BF16"
        [result, *_] = groups(count).run("train", spec=spec, batches=[batch_of(8, 0, supervised=True)], rates=[1e-3])
        gradients.append(result["gradients"][0])
    alone, together = gradients
    for name in (name for name in alone if keeps_float32(name)):
        assert distance({name: together[name]}, {name: alone[name]}, alone) <= 0.03, name
    assert distance(together, alone, alone) <= 0.1


def test_muon_on_two_ranks_makes_the_step_of_one(groups) -> None:
    """Matrices that are cut over ranks, and experts that are dealt to them."""
    batches = [batch_of(8, seed, supervised=True) for seed in (0, 1)]
    alone, together = (
        groups(ranks).run(
            "train",
            spec=spec_of(ranks, random={"experts": 3}, optimizer={"type": "Muon"}, parallelism={"copies": copies}),
            batches=batches,
            rates=[1e-3, 1e-3],
        )[0]
        for ranks, copies in ((1, 1), (4, 2))
    )
    assert together["metrics"][1].loss == pytest.approx(alone["metrics"][1].loss, rel=1e-3)
    for name, expected in alone["weights"].items():
        # The iteration runs in bfloat16: rounding of the gradient may move a direction's entries by one part in 256.
        assert (together["weights"][name] - expected).abs().max() <= 2e-4, name
        # The same direction as a whole, too, and of the same length.
        steps = [(each["weights"][name] - each["first weights"][name]).flatten() for each in (together, alone)]
        assert torch.cosine_similarity(*steps, dim=0) > 0.997, name
        assert float(steps[0].norm()) == pytest.approx(float(steps[1].norm()), rel=0.03), name


@pytest.mark.parametrize(
    "train",
    [
        {"batch": {"removePadding": True, "dynamicMicroBatches": True, "maxTokensPerDevice": 40}},
        {"parallelism": {"context": 2}, "batch": {"microBatchSequences": 3}, "activationCheckpointing": True},
    ],
    ids=["packed", "context parallel, recomputed"],
)
def test_two_ranks_have_the_router_losses_that_one_has(groups, train) -> None:
    """Large enough to move the gradient."""
    shape, router = {"experts": 4}, {"loadBalancingLoss": 0.5, "zLoss": 0.1}
    alone, together = (
        groups(ranks).run(
            "train",
            spec=spec_of(ranks, random=shape, router=router, **(dict(train) if ranks == 2 else {})),
            batches=[batch_of(8, 0, supervised=True)],
            rates=[1e-3],
        )[0]
        for ranks in (1, 2)
    )
    [expected], [actual] = alone["metrics"], together["metrics"]
    assert actual.loss == pytest.approx(expected.loss, rel=1e-5)
    assert actual.means == pytest.approx(expected.means, rel=1e-5)
    assert {"router_load_balancing", "router_z"} <= expected.means.keys()
    [expected], [actual] = alone["gradients"], together["gradients"]
    assert distance(actual, expected, expected) <= 1e-4


@pytest.mark.parametrize("parallelism", [{"copies": 2}, {"context": 2}, {"expert": 2}])
def test_every_group_that_an_engine_makes_has_the_time_out_of_the_manifest(groups, parallelism) -> None:
    """But the one of all ranks, whose time-out is set where it is made."""
    spec = spec_of(2, random={"experts": 4}, parallelism=parallelism, collectiveTimeoutSeconds=1234.0)
    [error_of_rank_0, _] = groups(2).run("timeouts", spec=spec)
    assert error_of_rank_0 - {float(PATIENCE)} == {1234.0}


def test_degrees_that_do_not_divide_the_ranks_are_refused_by_every_rank(groups) -> None:
    spec = spec_of(2, parallelism={"copies": 2})
    with pytest.raises(AssertionError, match="copies 2 × context 1 does not divide 1 ranks"):
        groups(1).run("train", spec=spec, batches=[], rates=[])
    spec = spec_of(2, random={"experts": 4}, parallelism={"expert": 2})
    with pytest.raises(AssertionError, match="copies 1 × expert 2 does not divide 1 ranks"):
        groups(1).run("train", spec=spec, batches=[], rates=[])
