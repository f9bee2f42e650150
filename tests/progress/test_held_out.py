import pytest

from qwen35_trainer.progress.held_out import HeldOutResult, measures, summary_measures
from qwen35_trainer.progress.records import EvaluationRecord
from qwen35_trainer.progress.summary import summarise


@pytest.mark.parametrize(
    ("evaluations", "words"),
    [
        # One reward of 0 or 1: the mean reward is the accuracy.
        ([(0.016, 0.016), (1.0, 1.0)], ["accuracy 1.6% → 100%"]),
        ([(0.0, 0.0), (0.0, 0.0)], ["accuracy 0% → 0%"]),
        ([(0.5, 0.7 * 0.5 + 0.2 * 0.5 + 0.1 * 0.5)], ["accuracy 50%"]),
        # Graded: nothing is ever right.
        ([(0.0, 0.1), (0.0, 0.998)], ["reward 0.100 → 0.998"]),
        ([(0.0, 0.0), (0.0, 0.6)], ["reward 0.000 → 0.600"]),
        ([(0.0, -0.5), (0.25, 0.5)], ["accuracy 0% → 25%", "reward -0.500 → 0.500"]),
        # A record without a reward, and none at all.
        ([(0.25, None)], ["accuracy 25%"]),
        ([(None, None), (None, None)], []),
    ],
)
def test_only_measures_that_say_something_are_shown(evaluations: list[HeldOutResult], words: list[str]) -> None:
    assert [f"{measure.name} {measure.values}" for measure in measures(evaluations)] == words


def test_of_supervised_training_the_loss_is_shown() -> None:
    records = [EvaluationRecord(update=at, version=0, time=1.0, samples=4, loss=3.0 / (at + 1)) for at in (0, 1)]
    summary = summarise(records, max_version_lag=None, peak_rss_mib=None)
    assert summary_measures(summary) == [("loss", "3.000 → 1.500", "nats per token")]
