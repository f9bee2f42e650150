"""Router replay, in every layout, against the library's model whose routers are made to choose the same experts.

The experts are random, so they are not those that a router would choose. Routers choose for some tokens, and for all tokens of one
sequence. `pytest tests/engines/megatron/test_replay.py -s` prints what docs/numerics.md has.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from qwen35_trainer.data.expert_choices import NO_CHOICE, ReplayedChoices
from qwen35_trainer.engines.train_batch import TrainBatch
from tests.distributed.distance import distance
from tests.distributed.group import Group
from tests.distributed.samples import batch_of, policy_spec_of, spec_of
from tests.distributed.test_parity import SCORES, TEXT, library_model, scores_of
from tests.engines.chosen_experts import Recorded
from tests.engines.megatron import test_prediction_head
from tests.engines.megatron.test_parity import GRADIENTS, TOTAL, assert_equal_updates, joined
from tests.engines.megatron.test_router_losses import BALANCE, Z, of_sequence
from tests.models import qwen3_moe
from tests.models.rounding import allowed, in_float64

pytestmark = pytest.mark.processes

EXPERTS, TOP_K = 4, 2
"""Of each layer, and of each token, in all models here."""
LOSSES = {"router": {"loadBalancingLoss": BALANCE, "zLoss": Z}}
TENSOR, VIRTUAL = {"tensor": 2, "sequence": True}, {"pipeline": 2, "virtual": 2}
RECOMPUTED = {"activationCheckpointing": True}
TWO, FOUR = ({"batch": {"microBatchSequences": count}} for count in (2, 4))
LAYERS = {"Qwen3.5": 4, "Qwen3": 4, "Qwen3, 5 layers": 5, "Qwen3, 6 layers": 6}
LAYOUTS: dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]] = {
    "1 process": (1, "Qwen3.5", {}, {}),
    "1 process, recomputed, losses": (1, "Qwen3", {}, FOUR | RECOMPUTED | LOSSES),
    "tensor 2, losses": (2, "Qwen3.5", TENSOR, FOUR | LOSSES),
    "tensor 2, recomputed": (2, "Qwen3", TENSOR, FOUR | RECOMPUTED),
    "pipeline 2, recomputed, micro-batch 1": (2, "Qwen3.5", {"pipeline": 2}, RECOMPUTED),
    "pipeline 2, 3 and 2 layers": (2, "Qwen3, 5 layers", {"pipeline": 2}, TWO),
    "pipeline 2, virtual 2, recomputed, losses": (2, "Qwen3.5", VIRTUAL, TWO | RECOMPUTED | LOSSES),
    "pipeline 2, virtual 2, 4 and 2 layers": (2, "Qwen3, 6 layers", VIRTUAL, TWO),
    "expert 2": (2, "Qwen3", {"expert": 2}, {}),
    "expert 2, recomputed, losses": (2, "Qwen3.5", {"expert": 2}, TWO | RECOMPUTED | LOSSES),
    "expert tensor 2": (2, "Qwen3.5", {"expert_tensor": 2}, TWO),
    "tensor 2, pipeline 2, virtual 2, expert 2, recomputed, losses": (
        4,
        "Qwen3.5",
        TENSOR | VIRTUAL | {"expert": 2},
        TWO | RECOMPUTED | LOSSES,
    ),
}
"""Ranks, model, layout, and sections of spec.train."""


def tables_of(batch: TrainBatch, layers: int) -> list[ReplayedChoices | None]:
    """Random experts for each input, but none for about a quarter of the inputs, and for the fourth sample."""
    random, tables = np.random.default_rng(1), list[ReplayedChoices | None]()
    for sample, inputs in enumerate((batch.lengths - 1).tolist()):
        table = random.random((inputs, layers, EXPERTS)).argsort(-1)[..., :TOP_K].astype(np.int16)
        table[random.random(inputs) < 0.25] = NO_CHOICE
        tables.append(None if sample == 3 else table)
    return tables


def replaying(batch: TrainBatch, layers: int) -> TrainBatch:
    tables, ends = tables_of(batch, layers), batch.response_lengths.tolist()
    parts = (None if table is None else [(table, end)] for table, end in zip(tables, ends, strict=True))
    return replace(batch, replayed=tuple(parts))


def let_choose(text: Any, tables: Sequence[ReplayedChoices | None]) -> list[tuple[Tensor, Tensor]]:
    """Let the routers of a text model of the library choose the experts of `tables`, in one sequence after another.

    Returns a list that will have of each sequence, and of each layer, the logits (tokens, experts) and the choices (tokens, k).
    """
    remaining, seen = iter(tables), list[tuple[Tensor, Tensor]]()
    current: list[ReplayedChoices | None] = []

    def begin(*_: object) -> None:
        current[:] = [next(remaining)]

    def choose(layer: int, gate: Any, inputs: tuple[Tensor], routed: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        logits, chosen = F.linear(inputs[0].flatten(0, -2), gate.weight), routed[-1]
        rows = torch.full_like(chosen, NO_CHOICE)  # also for the last token, which the engine does not read
        if (table := current[0]) is not None:
            rows[: len(table)] = torch.from_numpy(table[:, layer].astype(np.int64))
        chosen = chosen.where(rows == NO_CHOICE, rows)
        seen.append((logits, chosen))
        probabilities = logits.softmax(-1).gather(1, chosen)
        return routed[0], probabilities / probabilities.sum(-1, keepdim=True), chosen

    text.register_forward_pre_hook(begin)
    for number, layer in enumerate(text.layers):
        layer.mlp.gate.register_forward_hook(partial(choose, number))
    return seen


@dataclass(frozen=True)
class Reference:
    """Of one batch: log-probs of trained tokens (samples, longest response), the whole loss, both losses of routers per token and
    layer, and the gradients.
    """

    scores: Tensor
    loss: float
    balance: float
    z: float
    gradients: dict[str, Tensor]


def samples() -> TrainBatch:
    return batch_of(8, 0, supervised=True)


def library(name: str) -> Any:
    return library_model("MoE") if name == "Qwen3.5" else qwen3_moe.model(num_hidden_layers=LAYERS[name])


@cache
def reference(name: str, *, losses: bool, replays: bool = True, float64: bool = False) -> Reference:
    model, batch, layers = library(name), samples(), LAYERS[name]
    model = in_float64(model) if float64 else model
    assert (model.config.num_experts, model.config.num_experts_per_tok) == (EXPERTS, TOP_K)
    seen = let_choose(model.model, tables_of(batch, layers) if replays else [None] * batch.samples)
    scores = list(scores_of(model, batch))
    loss = -sum(each.sum() for each in scores) / int(batch.trainable.sum())
    read = batch.lengths - 1  # the engine does not read the last token of a sequence
    ends = [read[each // layers] for each in range(len(seen))]
    sums = sum(of_sequence(logits[:end], chosen[:end]) for (logits, chosen), end in zip(seen, ends, strict=True))
    balance, z = sums / int(read.sum())
    loss = loss + BALANCE * balance + Z * z if losses else loss
    loss.backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    table = pad_sequence([each.detach() for each in scores], batch_first=True)
    return Reference(table, loss.item(), balance.item() / layers, z.item() / layers, gradients)


@pytest.mark.parametrize("name", ["Qwen3.5", "Qwen3"])
def test_the_choice_of_experts_matters(name: str) -> None:
    """Otherwise the other tests would pass without replay."""
    with_replay, without = (reference(name, losses=True, replays=replays) for replays in (True, False))
    assert float((with_replay.scores - without.scores).abs().max()) > 0.1
    assert with_replay.balance != pytest.approx(without.balance, rel=1e-2)
    for parameter in ("model.layers.0.mlp.gate.weight", "model.layers.3.mlp.experts.down_proj"):
        change = with_replay.gradients[parameter] - without.gradients[parameter]
        assert float(change.norm()) > 0.1 * float(without.gradients[parameter].norm())


@pytest.mark.parametrize("name", LAYOUTS)
def test_log_probs_and_gradients_are_those_of_the_replayed_experts(
    groups: Callable[[int], Group], tmp_path: Path, name: str
) -> None:
    ranks, model, layout, train = LAYOUTS[name]
    spec, folder = spec_of(ranks, random=TEXT["MoE"], **train), None
    if model != "Qwen3.5":
        qwen3_moe.write(tmp_path / "model", num_hidden_layers=LAYERS[model])
        spec["model"]["source"], folder = {"path": "model"}, tmp_path
    batch, losses = replaying(samples(), LAYERS[model]), "router" in train
    results = groups(ranks).run("train", spec=spec, batches=[batch], layout=layout, folder=folder)
    assert all(each["metrics"] == results[0]["metrics"] for each in results), "any rank can report"
    [metrics], expected = results[0]["metrics"], reference(model, losses=losses)
    scores = max(float((each["scores"][0] - expected.scores).abs().max()) for each in results)
    gradients = joined([part for each in results for part in each["gradients"]], expected.gradients)
    norm = float(torch.stack([each.norm() for each in expected.gradients.values()]).norm())
    exact = reference(model, losses=losses, float64=True)
    worst = distance(gradients, expected.gradients, allowed(expected.gradients, exact.gradients, GRADIENTS))
    totals = [abs(metrics.loss / expected.loss - 1), abs(metrics.gradient_norm / norm - 1)]
    print(f"\n| {name} | {scores:.0e} | {totals[0]:.0e} | {totals[1]:.0e} | {worst:.0e} |", end="")
    assert scores <= SCORES
    assert max(totals) <= TOTAL
    assert worst <= GRADIENTS
    if losses:
        assert metrics.means["router_load_balancing"] == pytest.approx(expected.balance, rel=TOTAL)
        assert metrics.means["router_z"] == pytest.approx(expected.z, rel=TOTAL)


def replay_in_model(model: test_prediction_head.Model) -> None:
    let_choose(model.text, tables_of(test_prediction_head.samples(), len(model.text.layers)))


@pytest.mark.parametrize(
    ("ranks", "layout", "train"),
    [(1, {}, FOUR | RECOMPUTED), (2, VIRTUAL, FOUR)],
    ids=["1 process, recomputed", "pipeline 2, virtual 2"],
)
def test_the_router_of_the_prediction_head_chooses(
    groups: Callable[[int], Group], tmp_path: Path, ranks: int, layout: dict[str, Any], train: dict[str, Any]
) -> None:
    shape = test_prediction_head.EXPERTS
    expected, exact = (
        test_prediction_head.reference(shape, prepare=replay_in_model, float64=float64) for float64 in (False, True)
    )
    spec, _ = test_prediction_head.spec_in(tmp_path, shape, ranks, **train)
    batch = replaying(test_prediction_head.samples(), layers=4)
    results = groups(ranks).run("train", spec=spec, batches=[batch], layout=layout or None, folder=tmp_path)
    [metrics] = results[0]["metrics"]
    gradients = joined([part for each in results for part in each["gradients"]], expected.gradients)
    assert metrics.loss == pytest.approx(expected.loss, rel=TOTAL)
    assert metrics.means["mtp_nll"] == pytest.approx(expected.head, rel=TOTAL)
    scale = allowed(expected.gradients, exact.gradients, GRADIENTS)
    assert distance(gradients, expected.gradients, scale) <= GRADIENTS


def recorded(batch: TrainBatch) -> tuple[TrainBatch, float]:
    """The batch with choices as a rollout has recorded them, and for which part of its inputs they are.

    Those of the first inputs of a sequence are missing, those of the fourth one were not recorded, and those of the fifth one are
    lost.
    """
    random, sources, recorded_inputs = np.random.default_rng(1), list[Recorded | None](), 0
    for sample, inputs in enumerate((batch.lengths - 1).tolist()):
        table = random.random((inputs, LAYERS["Qwen3.5"], EXPERTS)).argsort(-1)[sample:, :, :TOP_K].astype(np.uint8)
        source = Recorded(None if sample == 4 else table, int(batch.response_lengths[sample]))
        sources.append(None if sample == 3 else source)
        recorded_inputs += 0 if sample in (3, 4) else len(table)
    return replace(batch, choices=tuple(sources)), recorded_inputs / int((batch.lengths - 1).sum())


@pytest.mark.parametrize(
    ("layout", "settings"),
    [({"pipeline": 2}, {"kl": "Loss"}), (TENSOR | {"expert": 2}, {"kl": "Reward", **RECOMPUTED, **FOUR})],
    ids=["pipeline 2", "tensor 2, expert 2, recomputed"],
)
def test_a_policy_update_is_that_of_the_fsdp_engine(
    groups: Callable[[int], Group], layout: dict[str, Any], settings: dict[str, Any]
) -> None:
    """The routers of the reference model choose, with both engines."""
    spec = policy_spec_of(2, random=TEXT["MoE"], router={"replay": True}, **settings)
    batch, share = recorded(batch_of(8, 0))
    ours = groups(2).run("train", spec=spec, batches=[batch], layout=layout)[0]["metrics"][0]
    theirs = groups(2).run("train_with_fsdp", spec=spec, batches=[batch])[0]["metrics"][0]
    assert_equal_updates(ours, theirs)
    assert ours.means["replayed_token_share"] == pytest.approx(share)
    chosen = groups(2).run("train", spec=spec, batches=[batch_of(8, 0)], layout=layout)[0]["metrics"][0]
    assert chosen.means["replayed_token_share"] == 0.0
    assert chosen.gradient_norm != pytest.approx(ours.gradient_norm, rel=1e-2)


def test_replay_in_a_model_without_routers_is_refused_by_name(groups: Callable[[int], Group]) -> None:
    spec = policy_spec_of(1, random={}, router={"replay": True})
    with pytest.raises(AssertionError, match=r"spec\.train\.router: .* has no router; remove replay"):
        groups(1).run("train", spec=spec, batches=[])
