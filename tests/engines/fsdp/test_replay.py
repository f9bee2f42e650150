"""Router replay with FSDP: the trainer computes with given experts what the library's model does whose routers choose these.

The given experts are random, so that routers of no precision would choose them.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from qwen35_trainer.engines.fsdp.engine import FSDPEngine
from qwen35_trainer.engines.micro_batch import Offsets, micro_batch, response_scores
from qwen35_trainer.engines.origin import Origin
from qwen35_trainer.engines.train_batch import TrainBatch
from qwen35_trainer.models.qwen3_5.adapter import adapt
from tests.engines.chosen_experts import choices_for, choosing, recorded
from tests.engines.fsdp.test_engine import cut
from tests.models import qwen3_moe

pytestmark = pytest.mark.usefixtures("alone")
CPU = torch.device("cpu")
EXPERTS = 4
REPLAY = {"train.router": {"replay": True}}
PACKED = {"train.batch.removePadding": True}
SHARED = PACKED | {"train.batch.sharePrompts": True}
LAYOUTS = {"padded": {}, "packed": PACKED, "shared prompts": SHARED}


@pytest.fixture(params=["Qwen3.5", "Qwen3"])
def make(request, make_model) -> Callable[[], Any]:
    """Returns a model of a family, the same at each call."""
    return partial(make_model, experts=EXPERTS) if request.param == "Qwen3.5" else qwen3_moe.model


def layers_of(model: Any) -> int:
    return len(model.model.layers)


def replaying(make: Callable[[], Any], make_spec: Any, settings: dict[str, Any] | None = None) -> FSDPEngine:
    return FSDPEngine(Origin(make), make_spec(REPLAY | (settings or {})), CPU)


def expected(model: Any, batch: TrainBatch, choices: list[Any], log_probs_of: Any) -> Iterator[Tensor]:
    """Log-probs (T,) of each response under the library's model with these choices, with gradient."""
    for sample, own in enumerate(choices):
        with choosing(model, own):
            yield log_probs_of(model, cut(batch, slice(sample, sample + 1)))[0]


def scores(engine: FSDPEngine, batch: TrainBatch) -> np.ndarray:
    """The engine's log-probs of the trained tokens, as it computes them for a batch that trains."""
    read = engine._with_choices(batch)
    return engine._score("Current", read, Offsets.of(read), 1.0).values.numpy()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probs_are_those_of_the_replayed_experts(make, make_spec, make_batch, log_probs_of, layout) -> None:
    batch, model = make_batch(), make()
    choices = choices_for(batch, layers_of(model), EXPERTS)
    batch = replace(batch, choices=recorded(batch, choices))
    ours = scores(replaying(make, make_spec, LAYOUTS[layout]), batch)[batch.trainable]
    with torch.no_grad():
        theirs, unreplayed = (
            torch.cat(list(expected(model, batch, each, log_probs_of))).numpy()[batch.trainable]
            for each in (choices, [None] * batch.samples)
        )
    assert np.abs(ours - theirs).max() <= 2e-5
    assert np.abs(ours - unreplayed).max() > 0.1, "the routers' own choices would pass, too"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_the_replayed_experts(make, make_spec, make_batch, log_probs_of, layout) -> None:
    """Of every parameter, the routers' among them: only the choice is replayed, and not the weights of the chosen."""
    batch, library, ours = make_batch(), make(), adapt(make())
    choices = choices_for(batch, layers_of(library), EXPERTS)
    read = replaying(make, make_spec)._with_choices(replace(batch, choices=recorded(batch, choices)))
    everything = micro_batch(
        read,
        Offsets.of(read),
        np.arange(batch.samples),
        None,
        packed=layout != "padded",
        share_prompts=layout == "shared prompts",
        device=CPU,
    )
    response_scores(ours, everything, 1.0, with_entropy=False).log_probs[everything.responses.mask].sum().backward()
    torch.cat(list(expected(library, batch, choices, log_probs_of)))[torch.from_numpy(batch.trainable)].sum().backward()
    gradients = {name: parameter.grad for name, parameter in library.named_parameters()}
    routers = 0
    for name, parameter in ours.named_parameters():
        theirs = gradients[name]
        assert theirs is not None
        assert parameter.grad is not None, name
        difference = float((parameter.grad - theirs).norm() / theirs.norm().clamp(min=1e-8))
        assert difference <= 1e-4, name
        routers += ".gate.weight" in name and float(theirs.norm()) > 0
    assert routers == layers_of(library)


def test_an_update_replays_every_input_token_and_computes_activations_again_with_the_same_experts(
    make, make_spec, make_batch
) -> None:
    batch = make_batch()
    batch = replace(batch, choices=recorded(batch, choices_for(batch, layers_of(make()), EXPERTS)))
    settings = {"train.router": {"replay": True, "loadBalancingLoss": 0.5, "zLoss": 0.1}}
    metrics = [
        FSDPEngine(Origin(make), make_spec(settings | each), CPU).train(batch, [1e-3])[0]
        for each in (
            {},
            {"train.activationCheckpointing": True},
            {"train.router": {"loadBalancingLoss": 0.5, "zLoss": 0.1}},
        )
    ]
    assert [each.means.get("replayed_token_share") for each in metrics] == [1.0, 1.0, None]
    kept, again, unreplayed = ((each.loss, each.gradient_norm, each.means["router_load_balancing"]) for each in metrics)
    assert again == pytest.approx(kept, rel=1e-6)
    for replayed, own in zip(kept, unreplayed, strict=True):
        assert replayed != pytest.approx(own, rel=1e-3)


def test_a_sample_without_choices_is_computed_with_the_routers_own(make, make_spec, make_batch, log_probs_of) -> None:
    """Choices that are lost, that are absent, of an expert that does not exist, and of one input with an expert twice."""
    batch, model = make_batch(), make()
    random_choices = choices_for(batch, layers_of(model), EXPERTS)
    sources: list[Any] = list(recorded(batch, random_choices))
    choices: list[Any] = [own.astype(np.int16) for own in random_choices]
    sources[1], sources[6] = None, replace(sources[6], choices=None)
    random_choices[4][-1, 1] = [0, EXPERTS]
    choices[1] = choices[4] = choices[6] = None
    repeated = next(sample for sample, own in enumerate(choices) if own is not None and len(own) > 2)
    random_choices[repeated][1, -1] = 3
    choices[repeated][1] = -1
    batch = replace(batch, choices=tuple(sources))
    engine = replaying(make, make_spec)
    with torch.no_grad():
        theirs = torch.cat(list(expected(model, batch, choices, log_probs_of))).numpy()
    assert np.abs(scores(engine, batch) - theirs)[batch.trainable].max() <= 2e-5
    inputs = batch.lengths - 1
    [metrics] = engine.train(batch, [1e-3])
    share = (inputs.sum() - inputs[[1, 4, 6]].sum()) / inputs.sum()
    assert metrics.means["replayed_token_share"] == pytest.approx(share)


def test_the_routers_of_the_reference_model_choose(make, make_spec, make_batch, monkeypatch) -> None:
    """The weights at the batch's start are those of the rollout, or almost, and are replayed."""
    batch = make_batch(groups=4, updates=2)
    batch = replace(batch, choices=recorded(batch, choices_for(batch, layers_of(make()), EXPERTS)))
    settings = {
        "algorithm.kl.placement": "Loss",
        "algorithm.correction.type": "DecoupledPPO",
        "async.updatesPerBatch": 2,
        "train.batch.promptsPerUpdate": 2,
        "train.batch.microBatchSequences": 4,
    }
    engine, replayed = replaying(make, make_spec, settings), dict[str, bool]()
    score = engine._score

    def watched(policy: Any, batch: TrainBatch, *arguments: Any) -> Any:
        replayed[policy] = batch.replayed is not None
        return score(policy, batch, *arguments)

    monkeypatch.setattr(engine, "_score", watched)
    metrics = engine.train(batch, [1e-3] * 2)
    assert replayed == {"Reference": False, "Current": True}
    assert [each.means["replayed_token_share"] for each in metrics] == [1.0, 1.0]


def test_without_router_replay_choices_change_nothing(make, make_spec, make_batch) -> None:
    batch = make_batch()
    chosen = replace(batch, choices=recorded(batch, choices_for(batch, layers_of(make()), EXPERTS)))
    first, second = (FSDPEngine(Origin(make), make_spec(), CPU).train(each, [1e-3])[0] for each in (batch, chosen))
    assert first == second


def test_router_replay_of_a_dense_model_is_refused(make_model, make_spec) -> None:
    with pytest.raises(ValueError, match=r"spec\.train\.router: .* has no router; remove replay"):
        FSDPEngine(Origin(make_model), make_spec(REPLAY), CPU)
