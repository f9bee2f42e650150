"""Which token is drawn, how often, and with what log-probability."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from qwen35_trainer.rollout.sampling import DrawnTokens, sample

PROBABILITIES = torch.tensor([0.5, 0.3, 0.15, 0.05])
DRAWS = 20_000


def draw(temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> DrawnTokens:
    rows = PROBABILITIES.log().expand(DRAWS, -1)
    temperatures, top_ps, min_ps = (torch.full((DRAWS,), value) for value in (temperature, top_p, min_p))
    generator = torch.Generator().manual_seed(0)
    return sample(rows, temperatures, top_ps, torch.full((DRAWS,), top_k), min_ps, generator)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        pytest.param({}, [0.5, 0.3, 0.15, 0.05], id="as the model says"),
        # squares 0.25, 0.09, 0.0225, 0.0025 over their sum 0.365
        pytest.param({"temperature": 0.5}, [0.6849, 0.2466, 0.0616, 0.0068], id="colder"),
        pytest.param({"top_k": 2}, [0.625, 0.375, 0, 0], id="top 2"),
        # 0.5 is not yet 0.6, with 0.3 it is
        pytest.param({"top_p": 0.6}, [0.625, 0.375, 0, 0], id="top 0.6"),
        pytest.param({"top_p": 0.5}, [1, 0, 0, 0], id="what stands before has reached 0.5"),
        pytest.param({"top_p": 0.0}, [1, 0, 0, 0], id="the likeliest always stays"),
        # of the top 3, renormalised to 0.526 0.316 0.158, the first two reach 0.8
        pytest.param({"top_k": 3, "top_p": 0.8}, [0.625, 0.375, 0, 0], id="top-k before top-p"),
        # 0.2 of 0.5 is 0.1
        pytest.param({"min_p": 0.2}, [0.5263, 0.3158, 0.1579, 0], id="min 0.2"),
        # of what min-p keeps, renormalised to 0.526 0.316 0.158, the first two reach 0.84; of all four they would not
        pytest.param({"min_p": 0.2, "top_p": 0.84}, [0.625, 0.375, 0, 0], id="min-p before top-p"),
        pytest.param({"min_p": 1.0}, [1, 0, 0, 0], id="only as likely as the likeliest"),
    ],
)
def test_tokens_come_as_often_as_the_distribution_says(settings: dict[str, float], expected: list[float]) -> None:
    tokens, log_probs, kept = draw(**settings)
    shares = torch.bincount(tokens, minlength=4) / DRAWS
    # Five standard errors of a share over 20,000 draws.
    for share, probability in zip(shares.tolist(), expected, strict=True):
        assert abs(share - probability) <= 5 * math.sqrt(max(probability, 1e-4) * (1 - probability) / DRAWS) + 1e-4
    torch.testing.assert_close(
        log_probs.exp(), torch.tensor(expected, dtype=torch.float32)[tokens], atol=1e-4, rtol=1e-3
    )
    if settings.keys() & {"top_p", "top_k", "min_p"}:
        assert kept is not None
        assert torch.equal(kept, (torch.tensor(expected) > 0).expand(DRAWS, -1))
    else:
        assert kept is None


def test_temperature_zero_takes_the_likeliest_with_the_models_own_log_probability() -> None:
    tokens, log_probs, _ = draw(temperature=0.0)
    assert (tokens == 0).all()
    torch.testing.assert_close(log_probs, torch.full((DRAWS,), math.log(0.5)))


def test_rows_have_their_own_settings() -> None:
    rows = PROBABILITIES.log().expand(3, -1)
    tokens, log_probs, kept = sample(
        rows,
        temperature=torch.tensor([0.0, 1.0, 1.0]),
        top_p=torch.tensor([0.5, 1.0, 0.1]),
        top_k=torch.tensor([0, 1, 0]),
        min_p=torch.tensor([0.9, 0.0, 0.0]),
        generator=torch.Generator().manual_seed(0),
    )
    assert tokens.tolist() == [0, 0, 0]
    assert kept is not None
    assert kept.sum(1).tolist() == [4, 1, 1]  # the greedy token is taken from the whole vocabulary
    torch.testing.assert_close(log_probs, torch.tensor([math.log(0.5), 0.0, 0.0]))


def test_the_same_generator_draws_the_same_tokens() -> None:
    assert torch.equal(draw()[0], draw()[0])


@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 0.95, 0.75, 0.3]),
    top_k=st.sampled_from([0, 1, 5, 20, 100]),
    min_p=st.sampled_from([0.0, 0.02, 0.3]),
)
def test_the_kept_tokens_are_those_of_transformers(seed, temperature, top_p, top_k, min_p) -> None:
    """Its processors in the order of vLLM. Their own default order has min-p last."""
    rows, vocabulary = 3, 60
    logits = 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))
    expected = logits / temperature
    for warper in (
        MinPLogitsWarper(min_p) if min_p else None,
        TopKLogitsWarper(top_k) if top_k else None,
        TopPLogitsWarper(top_p) if top_p < 1 else None,
    ):
        if warper is not None:
            expected = warper(None, expected)
    drawn = sample(
        logits,
        *(torch.full((rows,), value) for value in (temperature, top_p)),
        torch.full((rows,), top_k),
        torch.full((rows,), min_p),
        torch.Generator().manual_seed(seed),
    )
    kept = torch.ones_like(logits, dtype=torch.bool) if drawn.kept is None else drawn.kept
    assert torch.equal(kept, expected > -torch.inf)
    assert kept.gather(1, drawn.ids.unsqueeze(1)).all()
    own = expected.log_softmax(-1).gather(1, drawn.ids.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(drawn.log_probs, own, atol=1e-5, rtol=1e-5)
