import pytest

from qwen35_trainer.manifest import OptimizerSpec
from qwen35_trainer.runtime.train_session import learning_rate


def rates(total: int, **settings: object) -> list[float]:
    optimizer = OptimizerSpec.model_validate({"learningRate": 1.0, **settings})
    return [learning_rate(optimizer, update, total) for update in range(total)]


def test_a_constant_rate_is_the_peak():
    assert rates(3) == [1.0, 1.0, 1.0]


def test_the_warm_up_rises_by_equal_steps_to_the_peak():
    assert rates(6, warmupUpdates=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_a_linear_rate_falls_by_equal_steps_towards_its_floor():
    assert rates(4, schedule="Linear") == [1.0, 0.75, 0.5, 0.25]
    assert rates(4, schedule="Linear", minLearningRateRatio=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4])


def test_a_cosine_rate_is_at_half_of_its_way_in_the_middle():
    assert rates(4, schedule="Cosine") == pytest.approx([1.0, 0.5 + 0.5 * 0.5**0.5, 0.5, 0.5 - 0.5 * 0.5**0.5])


def test_the_schedule_starts_after_the_warm_up():
    assert rates(6, warmupUpdates=2, schedule="Linear") == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])


def test_a_warm_up_longer_than_the_run_never_reaches_the_peak():
    assert rates(3, warmupUpdates=10, schedule="Linear") == pytest.approx([0.1, 0.2, 0.3])
