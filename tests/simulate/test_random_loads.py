"""Any workload, with anything that can happen to it: the run ends, its bound holds, and nothing is lost on the way."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from qwen35_trainer.pipeline.notices import LeaveReason
from qwen35_trainer.simulate.simulation import simulate
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
from tests.profiles import examples
from tests.simulate.watched import Watched


@st.composite
def workloads(draw: st.DrawFn, **fixed: Any) -> Workload:
    """Small ones: some hundred sequences of some ten tokens."""
    policy = fixed.get("policy", BatchPolicy.DEADLINE_FIRST)
    bounded = policy is BatchPolicy.DEADLINE_FIRST
    lag = draw(st.integers(0, 3))
    count = draw(st.sampled_from([share * lag for share in (0.0, 0.3, 0.5, 1.0)]))
    pools = draw(
        st.lists(
            st.builds(
                ReplicaGroup,
                st.integers(1, 3),
                st.builds(ReplicaSpeed, st.integers(1, 6), speed=st.sampled_from([0.5, 1.0])),
            ),
            min_size=1,
            max_size=2,
        )
    )
    replicas = sum(pool.count for pool in pools)
    times = st.lists(st.tuples(st.floats(0, 300), st.integers(0, replicas + 1)), max_size=3)
    sizes = st.lists(st.tuples(st.floats(0, 300), st.integers(0, 4)), max_size=3).map(sorted)
    any_load: dict[str, Any] = {
        "pools": tuple(pools),
        "lane": draw(
            st.none()
            | st.builds(
                LaneSpeed,
                st.integers(1, 2),
                st.integers(1, 4),
                arrival_steps=st.sampled_from([0.0, 5.0]),
                after_tokens=st.integers(1, 30),
            )
        ),
        "trainer": TrainSpeed(1, draw(st.sampled_from([0.01, 0.1])), draw(st.sampled_from([0.0, 3.0]))),
        "publication": draw(
            st.builds(
                PublicationCost,
                st.sampled_from([0.0, 2.0]),
                st.sampled_from([0.0, 4.0]),
                st.sampled_from([0.0, 1.0, 20.0]),
                st.booleans(),
                st.booleans(),
            )
        ),
        "prefill": draw(st.sampled_from([PrefillCost(), PrefillCost(100.0, 50)])),
        "turns": draw(st.sampled_from([Turns(), Turns(3, 0.0), Turns(3, 5.0)])),
        "scoring_latency": draw(st.sampled_from([0.0, 0.0, 7.0])),
        "group_affinity": draw(st.booleans()),
        "lengths": Lognormal(20, draw(st.sampled_from([0.0, 1.0, 2.0])), 100, 1),
        "correlation": draw(st.sampled_from([0.0, 0.5])),
        "drift": draw(st.sampled_from([1.0, 1.05])),
        "faults": Faults(
            tuple(draw(times)),
            draw(st.sampled_from([None, 300.0])),
            draw(st.sampled_from([0.0, 10.0])),
            draw(st.booleans()),
        ),
        "elastic": (*draw(sizes), (300.0, draw(st.integers(1, 3)))) if draw(st.booleans()) else (),
        "policy": policy,
        "prompts_per_batch": draw(st.integers(1, 4)),
        "group_size": draw(st.integers(2, 3)),
        "batches_per_version": draw(st.integers(1, 3)),
        "staleness_threshold": count,
        "max_version_lag": lag,
        "on_missed_deadline": draw(st.sampled_from(MissedDeadlinePolicy)) if bounded else MissedDeadlinePolicy.WAIT,
        "partial_rollout": draw(st.booleans()),
        "adaptive": bounded and draw(st.booleans()),
        "signal": draw(st.sampled_from([1.0, 0.6])),
        "dynamic_sampling": draw(st.booleans()),
        "batches": draw(st.integers(1, 12)),
        "warm_up": 0,
        "cool_down": draw(st.sampled_from([None, 0])),
        "seed": draw(st.integers(0, 9)),
    }
    return Workload(**(any_load | fixed))


def check_every_group_left_once(world: Watched) -> None:
    """And as many prompts trained as the batches hold, none of them twice."""
    workload = world.workload
    assert all(world.exits[group] == 1 for group in world.exits)
    assert set(world.exits) <= set(world.dispatched)
    assert all(len(batches) == 1 for batches in world.trained.values())
    batches = workload.settings.batches
    assert len(world.trained) == batches * workload.prompts_per_batch
    left_by_reason = world.coordinator.left_by_reason
    assert left_by_reason[LeaveReason.TRAINED] == len(world.trained)
    assert sum(left_by_reason.values()) == len(world.exits)
    # What is dispatched and has not left would have been one more than the batches need.
    assert world.coordinator.buffer.held == len(world.dispatched) - len(world.exits)


@settings(max_examples=examples(150))
@given(workloads())
def test_a_run_ends_and_no_token_in_the_loss_is_older_than_the_bound(workload: Workload) -> None:
    world = Watched(workload)
    result = world.run()
    check_every_group_left_once(world)
    assert result.max_token_lag <= workload.max_version_lag
    if workload.on_missed_deadline is not MissedDeadlinePolicy.MASK_TOKENS:
        assert max(world.oldest) <= workload.max_version_lag
        assert result.masked_share == 0
        assert result.effective_throughput == result.throughput
    if not workload.dynamic_sampling:
        assert result.filtered_share == 0


@settings(max_examples=examples(150))
@given(
    workloads(
        pools=(ReplicaGroup(2, ReplicaSpeed(2)),),
        lane=LaneSpeed(2, 4, arrival_steps=0.0, after_tokens=5),
        publication=PublicationCost(pause=30.0, rolling=True),
        trainer=TrainSpeed(1, 0.001),
        lengths=Lognormal(20, 2.0, 200, 1),
        on_missed_deadline=MissedDeadlinePolicy.WAIT,
        batches=20,
    )
)
def test_a_straggler_may_move_to_a_replica_whose_weights_are_older(workload: Workload) -> None:
    """While a version travels from replica to replica. Its tokens there are older than its first one."""
    world = Watched(workload)
    world.run()
    assert max(world.oldest) <= workload.max_version_lag


@settings(max_examples=examples(60))
@given(st.data())
def test_the_peers_rules_end_too_and_keep_what_they_promise(data: st.DataObject) -> None:
    policy = data.draw(st.sampled_from([each for each in BatchPolicy if each is not BatchPolicy.DEADLINE_FIRST]))
    workload = data.draw(workloads(policy=policy))
    world = Watched(workload)
    result = world.run()
    check_every_group_left_once(world)
    assert result.masked_share == result.discarded_share == 0
    if policy in {BatchPolicy.SYNCHRONOUS, BatchPolicy.COLOCATED}:
        assert max(world.oldest) == 0


@settings(max_examples=examples(30))
@given(workloads())
def test_equal_loads_give_equal_results(workload: Workload) -> None:
    assert simulate(workload) == simulate(workload)
