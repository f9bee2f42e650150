"""The reference workload of the design, one seed: order and size of what benchmarks/scheduler.py measures with several."""

from functools import cache
from itertools import pairwise

import pytest

from qwen35_trainer.simulate.simulation import simulate
from qwen35_trainer.simulate.simulation_result import SimulationResult
from qwen35_trainer.simulate.workload import BatchPolicy, LaneSpeed, MissedDeadlinePolicy, ReplicaGroup, Workload

MASK = MissedDeadlinePolicy.MASK_TOKENS
LOADS = {
    "synchronous": Workload(policy=BatchPolicy.SYNCHRONOUS),
    "fifo": Workload(policy=BatchPolicy.FIFO, staleness_threshold=4),
    "windowed": Workload(policy=BatchPolicy.WINDOWED_FIFO, staleness_threshold=4),
    "completion": Workload(policy=BatchPolicy.COMPLETION, staleness_threshold=4),
    "no freedom": Workload(staleness_threshold=4),
    "wait": Workload(),
    "lane": Workload(pools=(ReplicaGroup(6),), lane=LaneSpeed()),
    "mask": Workload(staleness_threshold=3, on_missed_deadline=MASK),
    "lane and mask": Workload(
        pools=(ReplicaGroup(6),), lane=LaneSpeed(after_tokens=6000), staleness_threshold=3, on_missed_deadline=MASK
    ),
}


@cache
def of(name: str) -> SimulationResult:
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
    discarding = simulate(Workload(staleness_threshold=3, on_missed_deadline=MissedDeadlinePolicy.DISCARD))
    assert discarding.discarded_share > 0.05
    assert discarding.bias < -0.04
    assert abs(of("wait").bias) < 0.02


def test_the_result_has_a_json_form() -> None:
    figures = of("wait").as_dict()
    assert figures["meanLag"] == of("wait").mean_lag
    assert {"throughput", "idealThroughput", "maskedShare", "bias", "timeToFirstBatch", "exits"} <= set(figures)
