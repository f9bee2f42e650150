"""Which stragglers move in the simulator: those that gain. benchmarks/scheduler.py measures it with several seeds."""

import pytest

from qwen35_trainer.simulate.simulation import simulate
from qwen35_trainer.simulate.simulation_result import SimulationResult
from qwen35_trainer.simulate.workload import LaneSpeed, PrefillCost, ReplicaGroup, Workload

SHORT = {"batches": 36, "warm_up": 6}


def with_lane(prefill: PrefillCost, *, breaks_even: bool = True, arrival_steps: float = 0.0) -> SimulationResult:
    """Six replicas and a lane in place of two more."""
    lane = LaneSpeed(arrival_steps=arrival_steps, breaks_even=breaks_even)
    return simulate(Workload(pools=(ReplicaGroup(6),), lane=lane, prefill=prefill, **SHORT))


@pytest.mark.parametrize("prompt", [2048, 32_768])
def test_where_moving_everything_is_worse_than_no_lane_those_that_gain_are_better_than_both(prompt: int) -> None:
    prefill = PrefillCost(150.0, prompt)
    no_lane = simulate(Workload(prefill=prefill, **SHORT)).throughput
    all_move, decided = with_lane(prefill, breaks_even=False), with_lane(prefill)
    assert all_move.throughput < 0.95 * no_lane
    assert decided.throughput >= 0.99 * no_lane
    assert 0 < decided.moves < all_move.moves


def test_with_free_prefill_nearly_all_move_and_it_pays() -> None:
    free = PrefillCost()
    all_move, decided = with_lane(free, breaks_even=False, arrival_steps=200), with_lane(free, arrival_steps=200)
    assert decided.throughput >= 0.99 * all_move.throughput
    assert decided.moves > 0.7 * all_move.moves
