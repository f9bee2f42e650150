import pytest

from qwen35_trainer.manifest.algorithm import OverlongPenaltySpec
from qwen35_trainer.rewards.overlong import overlong_penalty, with_overlong_penalty
from qwen35_trainer.rewards.reward import CombinedScore

# DAPO's own numbers: at most 20,480 tokens, of which the last 4,096 are the buffer.
LIMIT, BUFFER = 20_480, 4_096


@pytest.mark.parametrize(
    ("tokens", "penalty"),
    [
        (1, 0.0),
        (16_384, 0.0),
        (16_385, -1 / 4_096),
        (17_408, -0.25),
        (18_432, -0.5),
        (20_479, -4_095 / 4_096),
        (20_480, -1.0),
    ],
)
def test_the_penalty_grows_linearly_in_the_buffer(tokens, penalty):
    assert overlong_penalty(tokens, limit=LIMIT, buffer=BUFFER, weight=1.0) == penalty
    assert overlong_penalty(tokens, limit=LIMIT, buffer=BUFFER, weight=3.0) == pytest.approx(3 * penalty)


def test_it_is_added_to_the_reward_and_a_response_without_one_stays_without():
    scores = [
        CombinedScore(1.0, {"a": 1.0}, {}),
        CombinedScore(None, {}, {"a": "ill"}),
        CombinedScore(0.5, {"a": 0.5}, {}),
    ]
    settings = OverlongPenaltySpec(bufferTokens=4, weight=2.0)
    penalised = with_overlong_penalty(scores, [8, 10, 6], 10, settings)
    assert [score.value for score in penalised] == [0.0, None, 0.5]
    assert [score.parts for score in penalised] == [score.parts for score in scores]
    assert with_overlong_penalty(scores, [8, 10, 6], 10, None) == tuple(scores)
