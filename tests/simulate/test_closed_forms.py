"""Whole runs so small that their time can be computed by hand. Every sequence has 100 tokens unless stated otherwise."""

from dataclasses import replace
from typing import Any

import pytest

from qwen35_trainer.simulate.simulation import simulate
from qwen35_trainer.simulate.simulation_result import SimulationResult
from qwen35_trainer.simulate.workload import (
    BatchPolicy,
    Faults,
    LaneSpeed,
    Lognormal,
    MissedDeadlinePolicy,
    PrefillCost,
    PublicationCost,
    ReplicaGroup,
    ReplicaSpeed,
    TrainSpeed,
    Turns,
    Workload,
)

STEP = 1.004
TRAIN = 0.5


def run(**fields: Any) -> SimulationResult:
    """One replica, one prompt, one sample; a token costs the trainer 0.005."""
    workload = Workload(
        pools=(ReplicaGroup(1),),
        trainer=TrainSpeed(1, TRAIN / 100),
        lengths=Lognormal(100, 0),
        policy=BatchPolicy.SYNCHRONOUS,
        prompts_per_batch=1,
        group_size=1,
        batches=6,
        warm_up=2,
    )
    return simulate(replace(workload, **fields))


def test_a_synchronous_step_is_generation_and_training() -> None:
    result = run()
    assert result.mean_step == pytest.approx(100 * STEP + TRAIN)
    assert result.throughput == pytest.approx(100 / result.mean_step)
    assert result.time_to_first_batch == pytest.approx(100 * STEP)
    assert result.train_idle == pytest.approx(1 - TRAIN / result.mean_step)
    assert result.idle_replicas == pytest.approx(TRAIN / result.mean_step)
    assert result.idle_slots == pytest.approx(1 - 100 * STEP / 64 / result.mean_step)
    assert (result.mean_lag, result.max_token_lag, result.mean_trained_length) == (0, 0, 100)
    assert result.bias == pytest.approx(0)


def test_samples_on_one_replica_share_it() -> None:
    assert run(group_size=2).mean_step == pytest.approx(100 * 1.008 + 2 * TRAIN)


def test_samples_that_find_no_slot_wait() -> None:
    assert run(pools=(ReplicaGroup(1, ReplicaSpeed(1)),), group_size=2).mean_step == pytest.approx(
        200 * STEP + 2 * TRAIN
    )


def test_a_publication_takes_its_transfer_and_pauses_the_replica() -> None:
    assert run(publication=PublicationCost(transfer=7, pause=5)).mean_step == pytest.approx(100 * STEP + TRAIN + 12)


def test_a_copy_of_the_weights_stops_the_trainer_and_comes_before_the_publication() -> None:
    result = run(publication=PublicationCost(copy=3, transfer=7, pause=5))
    assert result.mean_step == pytest.approx(100 * STEP + TRAIN + 15)
    assert result.train_copying == pytest.approx(3 / result.mean_step)
    assert result.train_idle == pytest.approx(1 - (TRAIN + 3) / result.mean_step)


def test_the_next_batch_waits_for_the_copy_and_not_for_the_transfer() -> None:
    ahead: dict[str, Any] = {"policy": BatchPolicy.DEADLINE_FIRST, "staleness_threshold": 3.0, "max_version_lag": 3}
    costs = PublicationCost(copy=3, transfer=7)
    result = run(**ahead, trainer=TrainSpeed(1, 1.0, overhead=10), publication=costs, batches=10, warm_up=4)
    assert result.mean_step == pytest.approx(113)
    assert result.train_idle == pytest.approx(0)


def test_a_group_trains_when_it_is_scored() -> None:
    assert run(scoring_latency=4).mean_step == pytest.approx(100 * STEP + TRAIN + 4)


def test_replicas_that_load_one_after_the_other_need_the_sum() -> None:
    both = run(pools=(ReplicaGroup(2),), publication=PublicationCost(pause=5))
    rolling = run(pools=(ReplicaGroup(2),), publication=PublicationCost(pause=5, rolling=True))
    assert both.mean_step == pytest.approx(100 * STEP + TRAIN + 5)
    assert rolling.mean_step == pytest.approx(100 * STEP + TRAIN + 10)


def test_a_prompt_is_computed_first() -> None:
    assert run(prefill=PrefillCost(100, 250)).mean_step == pytest.approx(100 * STEP + TRAIN + 2.5)


@pytest.mark.parametrize(("shared", "prompts"), [(True, 1), (False, 2)])
def test_samples_on_one_replica_share_the_computation_of_their_prompt(shared: bool, prompts: int) -> None:
    result = run(group_size=2, prefill=PrefillCost(100, 250, shared))
    assert result.mean_step == pytest.approx(100 * 1.008 + 2 * TRAIN + prompts * 2.5)
    assert result.prefill_tokens == pytest.approx(4 * prompts * 250)
    assert result.replicas_per_group == 1


@pytest.mark.parametrize(("affinity", "replicas"), [(True, 1), (False, 4)])
def test_samples_that_go_to_one_replica_compute_their_prompt_once(affinity: bool, replicas: int) -> None:
    """Eight groups in the window of four replicas."""
    result = run(
        pools=(ReplicaGroup(4),),
        prompts_per_batch=8,
        group_size=4,
        prefill=PrefillCost(100, 250),
        group_affinity=affinity,
    )
    assert result.replicas_per_group == replicas
    assert result.prefill_tokens == pytest.approx(4 * 8 * replicas * 250)


@pytest.mark.parametrize(("recompute", "seconds"), [(False, 0.0), (True, 40 / STEP / 10)])
def test_a_cache_that_is_computed_again_stops_the_replica(recompute: bool, seconds: float) -> None:
    """Two begin together, the third when the first has trained; new weights find it when the second has, 40 units later."""
    result = run(
        policy=BatchPolicy.DEADLINE_FIRST,
        staleness_threshold=1.0,
        max_version_lag=1,
        trainer=TrainSpeed(1, 0.4),
        publication=PublicationCost(recompute=recompute),
        prefill=PrefillCost(10, 0),
        batches=3,
        warm_up=0,
        cool_down=0,
    )
    assert result.seconds == pytest.approx(100 * 1.008 + 40 + 100 * STEP + seconds + 40)


def test_turns_that_are_answered_immediately_take_no_time() -> None:
    assert run(turns=Turns(4)).mean_step == pytest.approx(100 * STEP + TRAIN)


def test_answers_of_the_environment_add_their_mean() -> None:
    result = run(turns=Turns(3, 50), batches=302)
    assert result.mean_step == pytest.approx(100 * STEP + TRAIN + 2 * 50, rel=0.1)
    assert result.mean_trained_length == 100


def test_a_replica_decodes_others_while_an_environment_thinks() -> None:
    """Two sequences of two turns: each alone on the replica while the other waits would take 100 steps more."""
    result = run(group_size=2, turns=Turns(2, 1000), batches=52)
    assert result.mean_step < 1000 + 2 * 500 + 2 * 100 * STEP


def test_what_a_lost_replica_had_reported_is_kept_with_partial_rollout() -> None:
    """Of 50.5 tokens it had not reported an eighth, so 44 whole ones are kept."""
    lost = Faults(times=((50.5 * STEP, 0),), mttr=10)
    result = run(faults=lost)
    assert result.time_to_first_batch == pytest.approx(50.5 * STEP + 10 + 56 * STEP)
    assert result.lost_replicas == 1


@pytest.mark.parametrize(
    "fields", [{"faults": Faults(((50.5 * STEP, 0),), mttr=10, keep=False)}, {"partial_rollout": False}]
)
def test_it_is_generated_again_without(fields: dict[str, Any]) -> None:
    lost = {"faults": Faults(times=((50.5 * STEP, 0),), mttr=10)}
    assert run(**(lost | fields)).time_to_first_batch == pytest.approx(150.5 * STEP + 10)


def test_another_replica_takes_over_immediately() -> None:
    result = run(pools=(ReplicaGroup(2),), faults=Faults(times=((50.5 * STEP, 0),), mttr=10_000))
    assert result.time_to_first_batch == pytest.approx((50.5 + 56) * STEP)


def test_the_mean_time_between_losses_is_as_configured() -> None:
    result = run(pools=(ReplicaGroup(4),), faults=Faults(mtbf=1000, mttr=0), batches=1000)
    seconds = 1000 * (100 * STEP + TRAIN)
    assert result.lost_replicas == pytest.approx(4 * seconds / 1000, rel=0.15)


def test_a_straggler_pays_its_arrival_and_continues_faster() -> None:
    lane = LaneSpeed(1, speed=1.5, arrival_steps=200, after_tokens=40)
    result = run(lane=lane)
    assert result.time_to_first_batch == pytest.approx(40 * STEP + 260 * (1 / 1.5 + 0.003))
    assert result.moves == 7, "six measured batches and one of the cool-down"


def test_a_straggler_without_a_slot_in_the_lane_continues_where_it_is() -> None:
    lane = LaneSpeed(1, slots=1, speed=2.0, arrival_steps=0, after_tokens=40)
    result = run(lane=lane, group_size=2, pools=(ReplicaGroup(1, ReplicaSpeed(2)),))
    # Both cross at the same time, and one moves. The other has the replica for itself until the first is done, and then moves too.
    moved = 60 * 0.503
    remaining = 60 - moved / STEP
    assert result.time_to_first_batch == pytest.approx(40 * 1.008 + moved + remaining * 0.503)


def test_two_kinds_of_replicas_work_side_by_side() -> None:
    pools = (ReplicaGroup(1, ReplicaSpeed(1)), ReplicaGroup(1, ReplicaSpeed(1, speed=2.0)))
    assert run(pools=pools, group_size=2).time_to_first_batch == pytest.approx(100 * 1.004)
    assert run(pools=pools).ideal_throughput == pytest.approx(1 / 1.004 + 1 / 0.504)


def test_a_pool_that_grows_is_faster_and_one_that_shrinks_finishes_first() -> None:
    slow, two = (ReplicaGroup(1, ReplicaSpeed(1)),), (ReplicaGroup(2, ReplicaSpeed(1)),)
    alone, together = 200 * STEP + 2 * TRAIN, 100 * STEP + 2 * TRAIN
    assert run(pools=slow, group_size=2).mean_step == pytest.approx(alone)
    grown = run(pools=slow, group_size=2, elastic=((150.0, 2),))
    assert grown.mean_step == pytest.approx(together)
    assert grown.time_to_first_batch == pytest.approx(200 * STEP), "both slots were given away before it came"
    shrunk = run(pools=two, group_size=2, elastic=((50.0, 1),))
    assert shrunk.mean_step == pytest.approx(alone)
    assert shrunk.time_to_first_batch == pytest.approx(100 * STEP), "what ran was not interrupted"
    assert shrunk.lost_replicas == 0


def test_pools_that_take_turns_have_the_hardware_of_both() -> None:
    """One replica and one trainer unit: two of each, one after the other."""
    pools = (ReplicaGroup(1, ReplicaSpeed(1)),)
    apart = run(pools=pools, group_size=2)
    shared = run(pools=pools, group_size=2, policy=BatchPolicy.COLOCATED)
    assert apart.mean_step == pytest.approx(200 * STEP + 2 * TRAIN)
    assert shared.mean_step == pytest.approx(100 * STEP + TRAIN)
    assert shared.ideal_throughput == pytest.approx(1 / (STEP / 2 + 0.005 / 2))


def test_the_trainer_of_a_saturated_pipeline_is_never_idle() -> None:
    ahead: dict[str, Any] = {"policy": BatchPolicy.DEADLINE_FIRST, "staleness_threshold": 3.0, "max_version_lag": 3}
    result = run(**ahead, trainer=TrainSpeed(1, 1.0, overhead=10), batches=10, warm_up=4)
    assert result.mean_step == pytest.approx(110)
    assert result.train_idle == pytest.approx(0)
    assert result.mean_lag == 3, "the window is always full"


def test_groups_without_signal_are_replaced_and_counted() -> None:
    result = run(signal=0.5, dynamic_sampling=True, group_size=2, batches=402)
    assert result.exits["filtered"] / sum(result.exits.values()) == pytest.approx(0.5, abs=0.05)
    assert result.filtered_share == pytest.approx(0.5, abs=0.05)
    # A synchronous step is as many rounds of generation as it takes to find a group with signal: two.
    assert result.mean_step == pytest.approx(2 * 100 * 1.008 + 2 * TRAIN, rel=0.1)


def test_masked_tokens_are_those_beyond_the_bound() -> None:
    workload = Workload(staleness_threshold=3, on_missed_deadline=MissedDeadlinePolicy.MASK_TOKENS, batches=30)
    result = simulate(workload)
    assert 0 < result.masked_share < 0.2
    assert result.effective_throughput == pytest.approx(result.throughput * (1 - result.masked_share))
    assert result.max_token_lag == workload.max_version_lag < result.max_lag
