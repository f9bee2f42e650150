"""The planned memory of the head against the bytes of its tensors."""

import pytest
import torch
from torch import Tensor

from qwen35_trainer.models.qwen3_5 import head, products
from qwen35_trainer.planning import head_memory
from tests.live_bytes import LiveBytes
from tests.planned_memory import assert_within

VOCABULARY, ROWS = 4096, 32


class InPlace:
    """Passes that hold what `head_kernels.py` holds: the gradient overwrites the logits. Their values mean nothing."""

    def prepare(self, product: Tensor, temperature: float) -> Tensor:
        return product

    def reduce(self, prepared: Tensor, targets: Tensor, temperature: float, with_entropy: bool):
        return torch.zeros(len(targets)), torch.zeros(len(targets)), None

    def gradient(self, prepared: Tensor, *_: object) -> Tensor:
        return prepared.zero_()


@pytest.mark.torch
@pytest.mark.parametrize("hidden", [16, 512], ids=["small weight", "large weight"])
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("kernels", ["Torch", "Fused"])
@pytest.mark.parametrize(
    ("precision", "float32_logits"),
    [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False)],
    ids=["16 bits", "16 bits, float32 logits", "float32"],
)
def test_planned_memory_is_what_the_head_holds(precision, float32_logits, kernels, chunks, hidden, monkeypatch) -> None:
    monkeypatch.setattr(head_memory, "CHUNK_LOGITS", VOCABULARY * ROWS)
    monkeypatch.setattr(products, "BLOCK_ELEMENTS", 1024)  # negligible, as for real models
    if kernels == "Fused":
        # The products of an accelerator make no copies of their operands.
        monkeypatch.setattr(head, "_passes", lambda _: InPlace())
        monkeypatch.setattr(products, "add_outer", lambda total, left, right: total.zero_())
        monkeypatch.setattr(
            products, "rows_times", lambda rows, weight: torch.zeros(len(rows), len(weight), dtype=torch.float32)
        )
    rows = ROWS * chunks
    with LiveBytes() as live:
        states = torch.zeros(rows, hidden, dtype=precision).requires_grad_()
        weight = torch.zeros(VOCABULARY, hidden, dtype=precision).requires_grad_()
        targets = torch.zeros(rows, dtype=torch.int64)
        before = live.now
        scores = head.token_scores(states, weight, targets, chunk=ROWS, float32_logits=float32_logits)
        live.restart()
        scores.log_probs.sum().backward()
        counted = live.maximum - before
    planned = head_memory.fsdp(VOCABULARY, hidden, rows, precision.itemsize, kernels, float32_logits=float32_logits)
    assert_within(planned, counted)
