"""Which token is drawn, how often, and with what log-probability."""

import math

import pytest
import torch

from qwen35_trainer.rollout.sampling import sample

PROBABILITIES = torch.tensor([0.5, 0.3, 0.15, 0.05])
DRAWS = 20_000


def draw(temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rows = PROBABILITIES.log().expand(DRAWS, -1)
    settings = (torch.full((DRAWS,), value) for value in (temperature, top_p))
    return sample(rows, *settings, torch.full((DRAWS,), top_k), torch.Generator().manual_seed(0))


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
    ],
)
def test_tokens_come_as_often_as_the_distribution_says(settings: dict[str, float], expected: list[float]) -> None:
    tokens, log_probs = draw(**settings)
    shares = torch.bincount(tokens, minlength=4) / DRAWS
    # Five standard errors of a share over 20,000 draws.
    for share, probability in zip(shares.tolist(), expected, strict=True):
        assert abs(share - probability) <= 5 * math.sqrt(max(probability, 1e-4) * (1 - probability) / DRAWS) + 1e-4
    torch.testing.assert_close(
        log_probs.exp(), torch.tensor(expected, dtype=torch.float32)[tokens], atol=1e-4, rtol=1e-3
    )


def test_temperature_zero_takes_the_likeliest_with_the_models_own_log_probability() -> None:
    tokens, log_probs = draw(temperature=0.0)
    assert (tokens == 0).all()
    torch.testing.assert_close(log_probs, torch.full((DRAWS,), math.log(0.5)))


def test_rows_have_their_own_settings() -> None:
    rows = PROBABILITIES.log().expand(3, -1)
    tokens, log_probs = sample(
        rows,
        temperature=torch.tensor([0.0, 1.0, 1.0]),
        top_p=torch.tensor([1.0, 1.0, 0.1]),
        top_k=torch.tensor([0, 1, 0]),
        generator=torch.Generator().manual_seed(0),
    )
    assert tokens.tolist() == [0, 0, 0]
    torch.testing.assert_close(log_probs, torch.tensor([math.log(0.5), 0.0, 0.0]))


def test_the_same_generator_draws_the_same_tokens() -> None:
    assert torch.equal(draw()[0], draw()[0])
