import pytest

from qwen35_trainer.algorithms.adaptive_kl import adapted


@pytest.mark.parametrize(
    ("divergence", "samples", "coefficient"),
    [
        (0.1, 100, 2.0),  # on target
        (0.11, 100, 2.0 * (1 + 0.1 * 0.1)),  # 10 % above it, a tenth of the horizon
        (0.09, 100, 2.0 * (1 - 0.1 * 0.1)),
        (5.0, 100, 2.0 * (1 + 0.2 * 0.1)),  # the error is at most 20 %
        (-1.0, 100, 2.0 * (1 - 0.2 * 0.1)),  # an estimate may be negative
        (5.0, 5000, 2.0 * 1.2),  # a batch counts as one horizon at most
        (0.0, 10**9, 2.0 * 0.8),
    ],
)
def test_the_coefficient_follows_the_target(divergence, samples, coefficient):
    result = adapted(2.0, divergence=divergence, target=0.1, samples=samples, horizon=1000)
    assert result == pytest.approx(coefficient, rel=1e-12)


def test_one_horizon_away_from_the_target_is_about_a_fifth():
    coefficient = 1.0
    for _ in range(100):
        coefficient = adapted(coefficient, divergence=1.0, target=0.1, samples=10, horizon=1000)
    assert coefficient == pytest.approx(1.002**100)
