"""One process of test_context_parallel.py: python -m tests.models.context_rank RANK FOLDER."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import fully_shard

from qwen35_trainer.models.qwen3_5.adapter import adapt
from qwen35_trainer.models.qwen3_5.inputs import ModelInput
from qwen35_trainer.models.qwen3_5.multimodal import multimodal_input
from qwen35_trainer.models.qwen3_5.packing import check_packing
from qwen35_trainer.models.qwen3_5.shared_prompts import SharedPrompts
from tests.conftest import SHAPE
from tests.models import qwen3_moe
from tests.models.scenes import show, vision_language
from tests.patience import PATIENCE

LENGTHS = [9, 1, 70, 2]
"""82 tokens packed, 70 side by side: 2 divides both, 4 neither."""


def text(*, experts: int = 0) -> Any:
    """Heads that four processes can share; two key/value heads of full attention, which four have to repeat."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, Qwen3_5TextConfig

    torch.manual_seed(0)
    shape = SHAPE | {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
    if experts:
        few = {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "num_experts_per_tok": 2}
        model = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(num_experts=experts, **few, **shape))
    else:
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(intermediate_size=48, **shape))
    for layer in model.model.layers[:3]:
        layer.linear_attn.A_log.data.fill_(-4.0)
    return model


def words(lengths: list[int], *, packed: bool) -> ModelInput:
    drawn = torch.randint(19, (sum(lengths),), generator=torch.Generator().manual_seed(1)).split(lengths)
    return ModelInput.of_text(list(drawn), packed=packed, device="cpu")


def with_shared_prompts() -> ModelInput:
    """Three responses to one prompt and one to another: 26 tokens, of which 2 processes get equal numbers, 4 do not."""
    lengths = [9, 12, 6, 11]
    shared = SharedPrompts.of([6, 6, 6, 2], lengths, [0, 0, 0, 3])
    assert shared is not None
    return words(lengths, packed=True).sharing(shared)


def pictures(model: Any, *, packed: bool) -> ModelInput:
    shown = [show(scene, seed) for seed, scene in enumerate([[3, (1, 4, 6), 5], [2, ("video", (2, 4, 4)), 1], [7]])]
    return multimodal_input([t for t, _ in shown], [p for _, p in shown], model.config, packed=packed, device="cpu")


RANKS = 4
type Results = dict[str, tuple[Tensor, Tensor, list[Tensor]]]
"""Log-probs, entropies and gradients by the name of the case."""
type Case = tuple[Callable[[], Any], Callable[[Any], ModelInput], Callable[[Tensor], Tensor]]


def every(rows: Tensor) -> Tensor:
    return rows


CASES: dict[str, Case] = {
    "dense, padded": (text, lambda _: words(LENGTHS, packed=False), every),
    "dense, packed": (text, lambda _: words(LENGTHS, packed=True), every),
    "experts, padded": (lambda: text(experts=4), lambda _: words(LENGTHS, packed=False), every),
    "experts, packed": (lambda: text(experts=4), lambda _: words(LENGTHS, packed=True), every),
    "dense, shared prompts": (text, lambda _: with_shared_prompts(), every),
    "experts, shared prompts": (lambda: text(experts=4), lambda _: with_shared_prompts(), every),
    "Qwen3, packed": (qwen3_moe.model, lambda _: words(LENGTHS, packed=True), every),
    "Qwen3, shared prompts": (qwen3_moe.model, lambda _: with_shared_prompts(), every),
    "fewer tokens than processes": (text, lambda _: words([1], packed=False), every),
    "a rank that scores nothing": (text, lambda _: words(LENGTHS, packed=True), lambda rows: rows[:3]),
    "rows in any order, some twice": (text, lambda _: words([40], packed=True), lambda rows: rows[[30, 2, 2, 17]]),
}
PICTURES: dict[str, Case] = {
    "pictures, padded": (vision_language, lambda model: pictures(model, packed=False), every),
    "pictures, packed": (vision_language, lambda model: pictures(model, packed=True), every),
    "a vision-language model without pictures": (vision_language, lambda _: words(LENGTHS, packed=True), every),
}
"""For two processes: the model's linear attention has two key heads."""


def run(case: Case, group: ProcessGroup | None) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Log-probs, entropies, and this process's share of the gradient of their weighted sum."""
    make, read, choose = case
    model = adapt(make(), group)
    inputs = read(model)
    rows = choose(torch.arange(inputs.tokens.numel()))
    scores = model(inputs, rows, (rows * 7) % 19, 0.8, with_entropy=True)
    assert scores.entropy is not None
    weights = torch.linspace(-1, 2, len(rows))
    ((scores.log_probs * weights).sum() + (scores.entropy * weights.flip(0)).sum()).backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return scores.log_probs.detach(), scores.entropy.detach(), gradients


def sharded(model: Any, group: ProcessGroup | None) -> Any:
    adapt(model, group)
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def main(rank: int, folder: Path) -> None:
    """Four processes: sequences shared by all four, then by two pairs, each on its own."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=PATIENCE))
    pair, _ = dist.new_subgroups(2)
    results = {
        size: shared(group, CASES | more) for size, group, more in ((4, dist.group.WORLD, {}), (2, pair, PICTURES))
    }
    check_packing(sharded(text(), pair), share_prompts=True)
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(results))
    dist.destroy_process_group()


def shared(group: ProcessGroup, cases: dict[str, Case]) -> Results:
    """What this process of a group gets, with gradients summed over the group."""
    results = {}
    for name, case in cases.items():
        log_probs, entropy, gradients = run(case, group)
        for gradient in gradients:
            dist.all_reduce(gradient, group=group)
        results[name] = log_probs, entropy, gradients
    return results


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
