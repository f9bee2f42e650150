"""The engine against the transformers library's own model in float32, trained by a plain loop, in every layout.

Both score the first batch, and make three updates of the same batches. `pytest tests/distributed/test_parity.py -s` prints what docs/numerics.md has.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from qwen35_trainer.engines.batch import TrainBatch
from qwen35_trainer.engines.fsdp.lora import DOWN, UP
from qwen35_trainer.spec import parse_spec
from tests.distributed.group import Group
from tests.distributed.rank import remembering
from tests.distributed.samples import batch_of, scenes_of, spec_of
from tests.models.scenes import as_the_library_wants, vision_language

SAMPLES, RATES = 8, [1e-4, 1e-4, 1e-4]
SCORES, FIRST, THIRD = 1e-4, 1e-5, 1e-3
"""Allowed: of log-probs in nats, before the first update; relative, of the first update and of the third."""
TEXT: dict[str, dict[str, Any]] = {"dense": {}, "MoE": {"experts": 4}}
PICTURED: dict[str, dict[str, Any]] = {"vision-language": {}, "vision-language MoE": {"experts": 4}}
PACKED = {"batch": {"removePadding": True, "dynamic": True, "maxTokensPerDevice": 60}}
LORA = {"lora": {"rank": 4, "alpha": 8.0}}
OFFLOAD = {"offload": {"parameters": True, "gradients": True, "optimizer": True}}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 process, micro-batch 1": (1, {}),
    "1 process, micro-batch 2": (1, {"batch": {"microBatchPerDevice": 2}}),
    "1 process, micro-batch 4": (1, {"batch": {"microBatchPerDevice": 4}}),
    "1 process, packed": (1, PACKED),
    "1 process, packed, micro-batch 4": (1, {"batch": {"microBatchPerDevice": 4, "removePadding": True}}),
    "1 process, LoRA": (1, LORA),
    "1 process, recomputed activations": (1, {"activationCheckpointing": True}),
    "2 processes, FSDP": (2, {"batch": {"microBatchPerDevice": 4}}),
    "2 processes, FSDP, packed": (2, PACKED),
    "2 processes, HSDP": (2, {"parallelism": {"replicas": 2}, "batch": {"microBatchPerDevice": 2}}),
    "2 processes, FSDP, offload": (2, OFFLOAD),
    "2 processes, FSDP, optimizer offload": (2, {"offload": {"optimizer": True}}),
    "2 processes, FSDP, packed, LoRA": (2, PACKED | LORA),
    "2 processes, sequence parallel": (2, {"parallelism": {"context": 2}}),
    "2 processes, sequence parallel, packed": (2, {"parallelism": {"context": 2}} | PACKED),
    "4 processes, FSDP, packed": (4, PACKED),
    "4 processes, HSDP 2 × 2": (4, {"parallelism": {"replicas": 2}}),
    "4 processes, HSDP 2 × 2, offload, LoRA": (4, {"parallelism": {"replicas": 2}} | OFFLOAD | LORA),
    "4 processes, HSDP 2 × 2, sequence parallel 2, packed": (
        4,
        {"parallelism": {"replicas": 2, "context": 2}} | PACKED,
    ),
}


# Where a vision tower takes part in what differs: packing, sharding, parking, shared sequences.
WITH_PICTURES = (
    "1 process, micro-batch 2",
    "1 process, packed",
    "2 processes, FSDP, packed",
    "2 processes, FSDP, offload",
    "2 processes, FSDP, packed, LoRA",
    "2 processes, sequence parallel, packed",
    "4 processes, HSDP 2 × 2",
)
CASES = [
    *((layout, kind) for layout in LAYOUTS for kind in TEXT),
    *((layout, kind) for layout in WITH_PICTURES for kind in PICTURED),
]


def batches(kind: str) -> list[TrainBatch]:
    if kind in PICTURED:
        return [scenes_of(seed) for seed in range(len(RATES))]
    return [batch_of(SAMPLES, seed, supervised=True) for seed in range(len(RATES))]


def library_model(kind: str) -> Any:
    """The same weights in a fresh instance of the library's class, which nothing of ours has touched."""
    if kind in PICTURED:
        return vision_language(**PICTURED[kind])
    spec, _ = parse_spec(spec_of(1, random=TEXT[kind]))
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
        yield logits.log_softmax(-1).gather(1, tokens[p:, None]).squeeze(1).where(mask, 0.0)
        prompt, response = prompt + p, response + r


def plain_loop(model: Any, kind: str) -> list[tuple[float, float]]:
    """Loss and gradient norm of each update."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATES[0], betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    found = []
    for batch in batches(kind):
        total = 0.0
        for scores in scores_of(model, batch):
            part = -scores.sum() / int(batch.trainable.sum())
            part.backward()
            total += part.item()
        found.append((total, float(nn.utils.clip_grad_norm_(trained, 1.0))))
        optimizer.step()
        optimizer.zero_grad()
    return found


@cache
@torch.no_grad()
def reference_scores(kind: str) -> Tensor:
    """Before the first update; adapters change nothing then. (samples, longest response)"""
    return pad_sequence(list(scores_of(library_model(kind), batches(kind)[0])), batch_first=True)


@cache
def reference(kind: str) -> list[tuple[float, float]]:
    return plain_loop(library_model(kind), kind)


def reference_with_adapters(kind: str, adapters: dict[str, Tensor], scale: float) -> list[tuple[float, float]]:
    """The library's model plus scale · B·A·x, added by hooks, from the same first A and B."""
    model = library_model(kind).requires_grad_(False)
    for name, down in adapters.items():
        if name.endswith(DOWN):
            module = model.get_submodule(name.removesuffix(f".{DOWN}"))
            module.first = nn.Parameter(down.clone())
            module.second = nn.Parameter(adapters[name.removesuffix(DOWN) + UP].clone())
            module.register_forward_hook(lambda m, x, y: y + scale * (x[0] @ m.first.T @ m.second.T))
    return plain_loop(model, kind)


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
    differences = [
        (abs(ours.loss - loss) / abs(loss), abs(ours.gradient_norm - norm) / norm)
        for ours, (loss, norm) in zip(metrics, expected, strict=True)
    ]
    scores = max(float((result["scores"][0] - reference_scores(kind)).abs().max()) for result in results)
    report[layout, kind] = [scores, *differences[0], *differences[2]]
    assert all(result["metrics"] == metrics for result in results)
    assert scores <= SCORES
    assert max(differences[0]) <= FIRST
    assert max(differences[2]) <= THIRD
