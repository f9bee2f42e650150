"""The head's Triton kernels on a GPU, on a vocabulary of the published size."""

import pytest
import torch

from qwen35_trainer.models.qwen3_5 import head
from qwen35_trainer.models.qwen3_5.head import token_scores
from tests.models.test_head import gradients, plain

ROWS, D, V = 24, 64, 248_320


@pytest.mark.parametrize("device", ["cuda"], indirect=True)  # Triton compiles for no CPU; tests/models interprets them
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(
    ("dtype", "float32_logits", "bound", "gradient_bound"),
    [(torch.float32, False, 1e-4, 1e-4), (torch.bfloat16, False, 0.06, 0.05), (torch.bfloat16, True, 1e-4, 0.05)],
)
def test_scores_and_gradients_are_those_of_the_plain_head_in_float32(
    device: torch.device,
    dtype: torch.dtype,
    float32_logits: bool,
    bound: float,
    gradient_bound: float,
    temperature: float,
) -> None:
    from qwen35_trainer.models.qwen3_5 import head_kernels  # Triton is not made for every platform

    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(ROWS, D, generator=g) / 4, torch.randn(V, D, generator=g) / 4
    hidden, weight = (x.to(device, dtype).requires_grad_() for x in (hidden, weight))
    targets = torch.randint(V, (ROWS,), generator=g).to(device)
    assert head._passes(hidden) is head_kernels
    ours = token_scores(hidden, weight, targets, temperature, True, 7, float32_logits=float32_logits)
    whole = [x.detach().float().requires_grad_() for x in (hidden, weight)]
    theirs = plain(whole[0], whole[1], targets, temperature)
    assert ours.entropy is not None
    torch.testing.assert_close(ours.log_probs, theirs.log_probs, atol=bound, rtol=0)
    torch.testing.assert_close(ours.entropy, theirs.entropy, atol=bound, rtol=0)
    for own, expected in zip(gradients(ours, hidden, weight), gradients(theirs, whole[0], whole[1]), strict=True):
        assert (own.float() - expected).norm() <= gradient_bound * expected.norm()
