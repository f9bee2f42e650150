"""Real process groups over gloo: ranks make the step that one makes, whatever the objective and the dealing."""

import pytest
import torch

from tests.distributed.distance import distance, moved
from tests.distributed.samples import batch_of, policy_spec_of, spec_of

LAYOUTS = {
    "three at a time": {"microBatchPerDevice": 3},
    "by tokens": {"dynamic": True, "maxTokensPerDevice": 40},
    "packed by tokens": {"dynamic": True, "maxTokensPerDevice": 40, "removePadding": True},
}


@pytest.mark.parametrize(
    ("experts", "samples", "layout"),
    [(0, 8, {}), (4, 8, {}), (0, 1, {}), *((0, 8, layout) for layout in LAYOUTS.values())],
    ids=["dense", "experts", "an idle rank", *LAYOUTS],
)
def test_two_ranks_make_the_policy_update_that_one_makes(groups, experts, samples, layout) -> None:
    batches, shape = [batch_of(samples, seed) for seed in (0, 1)], {"experts": experts}
    alone, together = (
        groups(ranks).run(
            "train",
            spec=policy_spec_of(ranks, kl="Reward", random=shape, batch=dict(batch)),
            batches=batches,
            rates=[1e-3, 1e-3],
        )[0]
        for ranks, batch in ((1, {}), (2, layout))
    )
    pairs = zip(alone["metrics"], together["metrics"], (1e-5, 1e-3), strict=True)
    for expected, actual, tolerance in pairs:
        assert actual.tokens == expected.tokens
        assert actual.loss == pytest.approx(expected.loss, rel=tolerance)
        assert actual.gradient_norm == pytest.approx(expected.gradient_norm, rel=tolerance)
    for expected, actual, allowed in zip(alone["gradients"], together["gradients"], (1e-4, 5e-3), strict=True):
        assert distance(actual, expected, expected) <= allowed
    assert distance(together["weights"], alone["weights"], moved(alone["first weights"], alone["weights"])) <= 2e-2


def test_muon_on_two_ranks_makes_the_step_of_one(groups) -> None:
    """Matrices that are cut over ranks, and experts that are dealt to them."""
    batches = [batch_of(8, seed, supervised=True) for seed in (0, 1)]
    alone, together = (
        groups(ranks).run(
            "train",
            spec=spec_of(ranks, random={"experts": 3}, optimizer={"type": "Muon"}, parallelism={"replicas": replicas}),
            batches=batches,
            rates=[1e-3, 1e-3],
        )[0]
        for ranks, replicas in ((1, 1), (4, 2))
    )
    assert together["metrics"][1].loss == pytest.approx(alone["metrics"][1].loss, rel=1e-3)
    for name, expected in alone["weights"].items():
        # The iteration runs in bfloat16: rounding of the gradient may move a direction's entries by one part in 256.
        assert (together["weights"][name] - expected).abs().max() <= 2e-4, name
        # The same direction as a whole, too, and of the same length.
        steps = [(each["weights"][name] - each["first weights"][name]).flatten() for each in (together, alone)]
        assert torch.cosine_similarity(*steps, dim=0) > 0.997, name
        assert float(steps[0].norm()) == pytest.approx(float(steps[1].norm()), rel=0.03), name


def test_degrees_that_do_not_divide_the_ranks_are_refused_by_every_rank(groups) -> None:
    spec = spec_of(2, parallelism={"replicas": 2})
    with pytest.raises(AssertionError, match="replicas 2 × context 1 does not divide 1 ranks"):
        groups(1).run("train", spec=spec, batches=[], rates=[])
