"""The reference load of the design, one seed: order and size of what benchmarks/scheduler.py measures with several."""

from functools import cache
from itertools import pairwise

import pytest

from qwen35_trainer.simulate.load import EnginePool, Lane, Load, OnMissedDeadline, Policy
from qwen35_trainer.simulate.result import Result
from qwen35_trainer.simulate.run import simulate

MASK = OnMissedDeadline.MASK_TOKENS
LOADS = {
    "synchronous": Load(policy=Policy.SYNCHRONOUS),
    "fifo": Load(policy=Policy.FIFO, staleness_threshold=4),
    "windowed": Load(policy=Policy.WINDOWED_FIFO, staleness_threshold=4),
    "completion": Load(policy=Policy.COMPLETION, staleness_threshold=4),
    "no freedom": Load(staleness_threshold=4),
    "wait": Load(),
    "lane": Load(pools=(EnginePool(6),), lane=Lane()),
    "mask": Load(staleness_threshold=3, on_missed_deadline=MASK),
    "lane and mask": Load(
        pools=(EnginePool(6),), lane=Lane(after_tokens=6000), staleness_threshold=3, on_missed_deadline=MASK
    ),
}


@cache
def of(name: str) -> Result:
    return simulate(LOADS[name])


@pytest.mark.parametrize(
    ("name", "throughput", "mean_lag", "max_lag"),
    [
        ("synchronous", 32, 0, 0),
        ("fifo", 137, 4, 4),
        ("windowed", 164, 4, 6),
        ("no freedom", 137, 4, 4),
        ("wait", 134, 2, 4),
        ("lane", 162, 2, 4),
    ],
)
def test_the_documented_figures_come_out(name: str, throughput: float, mean_lag: float, max_lag: int) -> None:
    result = of(name)
    assert result.throughput == pytest.approx(throughput, rel=0.05)
    assert result.mean_lag == pytest.approx(mean_lag, abs=0.05)
    assert result.max_lag == max_lag
    assert result.ideal_throughput == pytest.approx(213, rel=0.01)


def test_completion_order_is_fast_and_breaks_the_bound() -> None:
    assert of("completion").throughput == pytest.approx(213, rel=0.01)
    assert of("completion").max_lag > 2 * 4


def test_the_rules_rank_as_documented() -> None:
    order = ["synchronous", "wait", "lane", "mask", "lane and mask"]
    assert all(of(slower).effective_throughput < of(faster).effective_throughput for slower, faster in pairwise(order))


def test_deadlines_halve_the_lag_of_fifo_at_its_throughput() -> None:
    assert of("wait").throughput >= 0.97 * of("fifo").throughput
    assert of("wait").mean_lag <= 0.55 * of("fifo").mean_lag


def test_masking_gives_a_third_more_than_waiting_and_keeps_the_bound() -> None:
    assert of("mask").effective_throughput >= 1.3 * of("fifo").effective_throughput
    assert of("mask").max_token_lag <= 4


def test_only_discarding_is_biased_against_long_answers() -> None:
    discarding = simulate(Load(staleness_threshold=3, on_missed_deadline=OnMissedDeadline.DISCARD))
    assert discarding.discarded_share > 0.05
    assert discarding.bias < -0.04
    assert abs(of("wait").bias) < 0.02


def test_the_result_has_a_json_form() -> None:
    found = of("wait").as_dict()
    assert found["meanLag"] == of("wait").mean_lag
    assert {"throughput", "idealThroughput", "maskedShare", "bias", "timeToFirstBatch", "exits"} <= set(found)
