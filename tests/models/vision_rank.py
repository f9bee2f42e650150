"""One process of a group, for test_vision_ranks.py: python -m tests.models.vision_rank RANK RANKS FOLDER.

Each rank shows something else, or nothing, and writes by how much its share of the gradients differs from those of one
process that reads all of it.
"""

import copy
import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from qwen35_trainer.models.qwen3_5.adapter import adapt
from qwen35_trainer.models.qwen3_5.multimodal import multimodal_input
from tests.models.scenes import show, vision_language
from tests.patience import PATIENCE

SCENES: list[list[Any]] = [
    [3, (1, 4, 6), 2, (1, 2, 2), 4],
    [14],
    [2, ("video", (2, 4, 2)), 5],
    [1, (1, 4, 4), 1, ("video", (1, 2, 2)), 6],
]
PAIRS = [(0, 1), (1, 2), (0, 3), (1, 1)]
"""What rank 0 and rank 1 show in each step: images or nothing, nothing or a video, images or both, nothing at all."""


def loss(model: Any, scene: int) -> Tensor:
    tokens, shown = show(SCENES[scene], seed=scene)
    inputs = multimodal_input([tokens], [shown], model.config, packed=True, device="cpu")
    rows = torch.arange(len(tokens) - 1)
    return -model(inputs, rows, tokens[1:]).log_probs.mean()


def shard(model: Any, offload: OffloadPolicy) -> Any:
    for block in (*model.model.visual.blocks, *model.model.language_model.layers):
        fully_shard(block, offload_policy=offload)
    return fully_shard(model, offload_policy=offload)


def difference(model: Any, reference: Any, rank: int, pair: tuple[int, int]) -> float:
    model.zero_grad()
    loss(model, pair[rank]).backward()
    reference.zero_grad()
    for scene in pair:
        (loss(reference, scene) / len(pair)).backward()
    worst = 0.0
    for (name, own), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (own.grad is None) == (expected.grad is None), name
        if own.grad is not None:
            # Rows of this rank, as FSDP2 deals them out; there may be none.
            rows = [*expected.grad.chunk(dist.get_world_size()), expected.grad[:0]][rank:][0]
            gap = (own.grad.to_local() - rows).abs()
            worst = max(worst, float(gap.max()) if gap.numel() else 0.0)
    return worst


def main(rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=PATIENCE))
    results = {}
    for experts, frozen, offload in (
        (0, False, OffloadPolicy()),
        (4, False, CPUOffloadPolicy(pin_memory=False)),
        (0, True, OffloadPolicy()),
    ):
        reference = adapt(vision_language(experts=experts))
        reference.model.visual.requires_grad_(not frozen)
        model = shard(adapt(copy.deepcopy(reference)), offload)
        for pair in PAIRS:
            results[f"{experts} experts, frozen {frozen}, scenes {pair}"] = difference(model, reference, rank, pair)
    (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
