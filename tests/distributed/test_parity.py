"""The engine against the transformers library's own model in float32, trained by a plain loop, in every layout.

Both score the first batch, and make three updates of the same batches. The tests compare losses, gradient norms, the gradient of
every parameter at every update, and the weights at the end. `pytest tests/distributed/test_parity.py -s` prints what docs/numerics.md has.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from qwen35_trainer.engines.fsdp.lora import DOWN, UP
from qwen35_trainer.engines.train_batch import TrainBatch
from qwen35_trainer.manifest import parse_spec
from tests.distributed.distance import distance, moved
from tests.distributed.group import Group
from tests.distributed.rank import remembering
from tests.distributed.samples import batch_of, batch_of_lengths, scenes_of, spec_of
from tests.models.rounding import allowed, in_float64
from tests.models.scenes import as_the_library_wants, vision_language

SAMPLES, RATES = 8, [1e-3, 1e-3, 1e-3]
SCORES, TOTALS, GRADIENTS, WEIGHTS = 1e-4, [1e-5, 1e-3, 1e-3], [1e-4, 5e-3, 5e-3], 2e-2
"""Allowed: of log-probs in nats, before the first update; relative, of loss and norm of each update; of each parameter's gradient
at each update, relative to its norm; of each parameter at the end, relative to the distance that it has moved."""
TEXT: dict[str, dict[str, Any]] = {"dense": {}, "MoE": {"experts": 4}}
LONG: dict[str, dict[str, Any]] = {"dense, long": {}, "MoE, long": {"experts": 4}}
"""Kinds whose sequences pass the delta rule's chunk of 64 positions, one or more times, or end next to a boundary."""
PICTURED: dict[str, dict[str, Any]] = {"vision-language": {}, "vision-language MoE": {"experts": 4}}
PACKED = {"batch": {"removePadding": True, "dynamicMicroBatches": True, "maxTokensPerDevice": 60}}
LORA = {"lora": {"rank": 4, "alpha": 8.0}}
OFFLOAD = {"offload": {"parameters": True, "gradients": True, "optimizer": True}}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 process, micro-batch 1": (1, {}),
    "1 process, micro-batch 2": (1, {"batch": {"microBatchSequences": 2}}),
    "1 process, micro-batch 4": (1, {"batch": {"microBatchSequences": 4}}),
    "1 process, packed": (1, PACKED),
    "1 process, packed, micro-batch 4": (1, {"batch": {"microBatchSequences": 4, "removePadding": True}}),
    "1 process, LoRA": (1, LORA),
    "1 process, recomputed activations": (1, {"activationCheckpointing": True}),
    "2 processes, FSDP": (2, {"batch": {"microBatchSequences": 4}}),
    "2 processes, FSDP, packed": (2, PACKED),
    "2 processes, HSDP": (2, {"parallelism": {"copies": 2}, "batch": {"microBatchSequences": 2}}),
    "2 processes, FSDP, offload": (2, OFFLOAD),
    "2 processes, FSDP, optimizer offload": (2, {"offload": {"optimizer": True}}),
    "2 processes, FSDP, packed, LoRA": (2, PACKED | LORA),
    "2 processes, context parallel": (2, {"parallelism": {"context": 2}}),
    "2 processes, context parallel, packed": (2, {"parallelism": {"context": 2}} | PACKED),
    "4 processes, FSDP, packed": (4, PACKED),
    "4 processes, HSDP 2 × 2": (4, {"parallelism": {"copies": 2}}),
    "4 processes, HSDP 2 × 2, offload, LoRA": (4, {"parallelism": {"copies": 2}} | OFFLOAD | LORA),
    "4 processes, HSDP 2 × 2, context parallel 2, packed": (
        4,
        {"parallelism": {"copies": 2, "context": 2}} | PACKED,
    ),
}


# Where a vision tower takes part in what differs: packing, sharding, parking, shared sequences.
WITH_PICTURES = (
    "1 process, micro-batch 2",
    "1 process, packed",
    "2 processes, FSDP, packed",
    "2 processes, FSDP, offload",
    "2 processes, FSDP, packed, LoRA",
    "2 processes, context parallel, packed",
    "4 processes, HSDP 2 × 2",
)
DENSE_WITH_PICTURES = ("2 processes, FSDP, packed", "4 processes, HSDP 2 × 2")
SELDOM = [
    *((layout, "MoE") for layout in WITH_PICTURES),
    *((layout, "vision-language") for layout in WITH_PICTURES if layout not in DENSE_WITH_PICTURES),
]
"""In `make soak` only: the same layout trains experts in a vision-language model, whose tower is that of the dense one."""
CASES = [
    pytest.param(*case, marks=[pytest.mark.soak] if case in SELDOM else [])
    for case in (
        *((layout, kind) for layout in LAYOUTS for kind in TEXT),
        *((layout, kind) for layout in WITH_PICTURES for kind in PICTURED),
    )
]


def batches(kind: str) -> list[TrainBatch]:
    if kind in PICTURED:
        return [scenes_of(seed) for seed in range(len(RATES))]
    if kind in LONG:
        return [batch_of_lengths([(1, 129), (63, 2), (64, 64), (65, 1), (5, 60), (130, 63)])]
    return [batch_of(SAMPLES, seed, supervised=True) for seed in range(len(RATES))]


def library_model(kind: str) -> Any:
    """The same weights in a fresh instance of the library's class, which nothing of ours has touched."""
    if kind in PICTURED:
        return vision_language(**PICTURED[kind])
    spec, _ = parse_spec(spec_of(1, random=(TEXT | LONG)[kind]))
    ours = remembering(spec, 0)
    model = type(ours)(ours.config)
    model.load_state_dict(ours.state_dict())
    return model


def scores_of(model: Any, batch: TrainBatch) -> Iterator[Tensor]:
    """Log-probs of trained tokens, 0 for others, sample by sample."""
    prompt = response = 0
    for i, (p, r) in enumerate(zip(batch.prompt_lengths, batch.response_lengths, strict=True)):
        ids = np.concatenate([batch.prompts[prompt : prompt + p], batch.responses[response : response + r]])
        tokens = torch.from_numpy(ids.astype(np.int64))
        shown = batch.pictures[i] if batch.pictures else None
        inputs = {"input_ids": tokens[None]} if shown is None else as_the_library_wants(tokens, shown)
        logits = model(**inputs | {"use_cache": False}).logits[0, p - 1 : -1]
        mask = torch.from_numpy(batch.trainable[response : response + r])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        yield logits.log_softmax(-1).gather(1, tokens[p:, None]).squeeze(1).where(mask, 0.0)
        prompt, response = prompt + p, response + r


@dataclass(frozen=True)
class Training:
    """Losses, gradient norms before clipping and clipped gradients of the updates; the weights after them and their change."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]
    moved: dict[str, Tensor]


def plain_loop(model: Any, kind: str, *, rate: float = RATES[0], frozen: str | None = None) -> Training:
    """`frozen`: parameters with this in their name have gradients and never step, as a faulty engine would have it."""
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    trained = list(named.values())
    spared = [each for name, each in named.items() if each.ndim == 1 or "conv1d" in name]
    decayed = [each for name, each in named.items() if each.ndim > 1 and "conv1d" not in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": spared, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=1e-8)
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    losses, norms, gradients = [], [], []
    for batch in batches(kind):
        total = 0.0
        for scores in scores_of(model, batch):
            part = -scores.sum() / int(batch.trainable.sum())
            part.backward()
            total += part.item()
        losses.append(total)
        norms.append(float(nn.utils.clip_grad_norm_(trained, 1.0)))
        gradients.append(
            {name: parameter.grad.clone() for name, parameter in named.items() if parameter.grad is not None}
        )
        optimizer.step()
        with torch.no_grad():
            for name, parameter in named.items():
                if frozen is not None and frozen in name:
                    parameter.copy_(before[name])
        optimizer.zero_grad()
    after = {name: parameter.detach() for name, parameter in named.items()}
    return Training(losses, norms, gradients, after, moved(before, after))


@cache
@torch.no_grad()
def reference_scores(kind: str) -> Tensor:
    """Before the first update; adapters change nothing then. (samples, longest response)"""
    return pad_sequence(list(scores_of(library_model(kind), batches(kind)[0])), batch_first=True)


@cache
def reference(kind: str) -> Training:
    return plain_loop(library_model(kind), kind)


@cache
def exact(kind: str) -> Training:
    return plain_loop(in_float64(library_model(kind)), kind)


def reference_with_adapters(kind: str, adapters: dict[str, Tensor], scale: float) -> Training:
    """The library's model plus scale · B·A·x, added by hooks, from the same first A and B, which have the engine's names."""

    def add(module: Any, x: tuple[Tensor], y: Tensor) -> Tensor:
        return y + scale * (x[0] @ getattr(module, DOWN).T @ getattr(module, UP).T)

    model = library_model(kind).requires_grad_(False)
    for name, first in adapters.items():
        owner, _, own_name = name.rpartition(".")
        module = model.get_submodule(owner)
        module.register_parameter(own_name, nn.Parameter(first.clone()))
        if own_name == DOWN:
            module.register_forward_hook(add)
    return plain_loop(model, kind)


@dataclass(frozen=True)
class Differences:
    """Of two trainings: of each update's loss, norm and gradients, and of the weights at the end."""

    losses: list[float]
    norms: list[float]
    gradients: list[float]
    weights: float

    @classmethod
    def between(cls, ours: Training, theirs: Training, exact: Training | None = None) -> "Differences":
        """exact: `theirs` in float64. What float32 rounds off in its first gradients is then no difference (tests/models/rounding.py)."""
        scales = list(theirs.gradients)
        if exact is not None:
            scales[0] = allowed(theirs.gradients[0], exact.gradients[0], GRADIENTS[0])
        gradients = zip(ours.gradients, theirs.gradients, scales, strict=True)
        return cls(
            [abs(own - other) / abs(other) for own, other in zip(ours.losses, theirs.losses, strict=True)],
            [abs(own - other) / other for own, other in zip(ours.norms, theirs.norms, strict=True)],
            [distance(own, other, scale) for own, other, scale in gradients],
            distance(ours.weights, theirs.weights, theirs.moved),
        )

    @property
    def too_large(self) -> set[str]:
        def beyond(differences: list[float], allowed: list[float]) -> bool:
            return any(not each <= limit for each, limit in zip(differences, allowed, strict=True))

        checks = {
            "losses": beyond(self.losses, TOTALS),
            "norms": beyond(self.norms, TOTALS),
            "gradients": beyond(self.gradients, GRADIENTS),
            "weights": beyond([self.weights], [WEIGHTS]),
        }
        return {name for name, failed in checks.items() if failed}


@pytest.fixture(scope="module")
def report() -> Iterator[dict[tuple[str, str], list[float]]]:
    rows: dict[tuple[str, str], list[float]] = {}
    yield rows
    for (layout, kind), figures in rows.items():
        print(f"\n| {layout} | {kind} | " + " | ".join(f"{figure:.0e}" for figure in figures) + " |", end="")


@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_updates_are_those_of_a_plain_loop(
    groups: Callable[[int], Group], report: dict[tuple[str, str], list[float]], layout: str, kind: str
) -> None:
    ranks, train = LAYOUTS[layout]
    results = groups(ranks).run(
        "train",
        spec=spec_of(ranks, random=TEXT.get(kind), **train),
        batches=batches(kind),
        rates=RATES,
        pictured=PICTURED.get(kind),
    )
    metrics, adapters = results[0]["metrics"], results[0]["adapters"]
    expected = reference_with_adapters(kind, adapters, 2.0) if adapters else reference(kind)
    assert bool(adapters) == ("lora" in train)
    ours = Training(
        [each.loss for each in metrics],
        [each.gradient_norm for each in metrics],
        results[0]["gradients"],
        results[0]["trained adapters" if adapters else "weights"],
        {},
    )
    differences = Differences.between(ours, expected, None if adapters else exact(kind))
    scores = max(float((result["scores"][0] - reference_scores(kind)).abs().max()) for result in results)
    totals = [max(pair) for pair in zip(differences.losses, differences.norms, strict=True)]
    report[layout, kind] = [
        scores,
        totals[0],
        max(totals[1:]),
        distance(ours.gradients[0], expected.gradients[0], expected.gradients[0]),
        max(differences.gradients[1:]),
        differences.weights,
    ]
    assert all(result["metrics"] == metrics for result in results)
    assert scores <= SCORES
    assert not differences.too_large, differences


@pytest.mark.parametrize(
    ("ranks", "train", "kind"),
    [
        pytest.param(2, {"parallelism": {"context": 2}, "batch": {"removePadding": True}}, "dense, long"),
        *(
            pytest.param(ranks, train, kind, marks=pytest.mark.soak)
            for kind in LONG
            for ranks, train in (
                (1, {"batch": {"microBatchSequences": 6}}),
                (2, {"batch": {"microBatchSequences": 3, "removePadding": True}} | OFFLOAD),
                (2, {"parallelism": {"context": 2}, "activationCheckpointing": True}),
                (4, {"parallelism": {"copies": 2, "context": 2}, "batch": {"removePadding": True}}),
            )
        ),
    ],
)
def test_an_update_of_sequences_longer_than_a_chunk_is_that_of_a_plain_loop(
    groups: Callable[[int], Group], ranks: int, train: dict[str, Any], kind: str
) -> None:
    spec, rates = spec_of(ranks, random=LONG[kind], **dict(train)), RATES[:1]
    [result, *_] = groups(ranks).run("train", spec=spec, batches=batches(kind), rates=rates)
    [metrics], expected = result["metrics"], reference(kind)
    assert float((result["scores"][0] - reference_scores(kind)).abs().max()) <= SCORES
    assert metrics.loss == pytest.approx(expected.losses[0], rel=TOTALS[0])
    assert metrics.gradient_norm == pytest.approx(expected.norms[0], rel=TOTALS[0])
    scale = allowed(expected.gradients[0], exact(kind).gradients[0], GRADIENTS[0])
    assert distance(result["gradients"][0], expected.gradients[0], scale) <= GRADIENTS[0]


@pytest.mark.parametrize("kind", TEXT)
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param({"frozen": "lm_head"}, id="the output layer never steps"),
        pytest.param({"frozen": "embed_tokens"}, id="embeddings never step"),
        pytest.param({"frozen": "layers.0."}, id="a layer never steps"),
        pytest.param({"frozen": "norm"}, id="norms never step"),
        pytest.param({"rate": RATES[0] / 2}, id="half the learning rate"),
        pytest.param({"rate": RATES[0] * 0.9}, id="nine tenths of the learning rate"),
    ],
)
def test_the_bounds_tell_a_faulty_training_from_a_right_one(kind: str, fault: dict[str, Any]) -> None:
    differences = Differences.between(plain_loop(library_model(kind), kind, **fault), reference(kind))
    assert "weights" in differences.too_large, differences
