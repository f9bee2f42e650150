"""Any load, with anything that can happen to it: the run ends, its bound holds, and nothing is lost on the way."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from qwen35_trainer.pipeline.actions import Reason
from qwen35_trainer.simulate.load import (
    Engine,
    EnginePool,
    Faults,
    Lane,
    Load,
    Lognormal,
    OnMissedDeadline,
    Policy,
    Prefill,
    Publication,
    Trainer,
    Turns,
)
from qwen35_trainer.simulate.run import simulate
from tests.profiles import examples
from tests.simulate.watched import Watched


@st.composite
def loads(draw: st.DrawFn, **fixed: Any) -> Load:
    """Small ones: some hundred sequences of some ten tokens."""
    policy = fixed.get("policy", Policy.DEADLINE_FIRST)
    bounded = policy is Policy.DEADLINE_FIRST
    lag = draw(st.integers(0, 3))
    count = draw(st.sampled_from([share * lag for share in (0.0, 0.3, 0.5, 1.0)]))
    pools = draw(
        st.lists(
            st.builds(
                EnginePool, st.integers(1, 3), st.builds(Engine, st.integers(1, 6), speed=st.sampled_from([0.5, 1.0]))
            ),
            min_size=1,
            max_size=2,
        )
    )
    engines = sum(pool.count for pool in pools)
    times = st.lists(st.tuples(st.floats(0, 300), st.integers(0, engines + 1)), max_size=3)
    sizes = st.lists(st.tuples(st.floats(0, 300), st.integers(0, 4)), max_size=3).map(sorted)
    any_load: dict[str, Any] = {
        "pools": tuple(pools),
        "lane": draw(
            st.none()
            | st.builds(
                Lane,
                st.integers(1, 2),
                st.integers(1, 4),
                arrival_steps=st.sampled_from([0.0, 5.0]),
                after_tokens=st.integers(1, 30),
            )
        ),
        "trainer": Trainer(1, draw(st.sampled_from([0.01, 0.1])), draw(st.sampled_from([0.0, 3.0]))),
        "publication": draw(
            st.builds(
                Publication,
                st.sampled_from([0.0, 4.0]),
                st.sampled_from([0.0, 1.0, 20.0]),
                st.booleans(),
                st.booleans(),
            )
        ),
        "prefill": draw(st.sampled_from([Prefill(), Prefill(100.0, 50)])),
        "turns": draw(st.sampled_from([Turns(), Turns(3, 0.0), Turns(3, 5.0)])),
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
        "on_missed_deadline": draw(st.sampled_from(OnMissedDeadline)) if bounded else OnMissedDeadline.WAIT,
        "partial_rollout": draw(st.booleans()),
        "adaptive": bounded and draw(st.booleans()),
        "signal": draw(st.sampled_from([1.0, 0.6])),
        "dynamic_sampling": draw(st.booleans()),
        "batches": draw(st.integers(1, 12)),
        "warm_up": 0,
        "cool_down": draw(st.sampled_from([None, 0])),
        "seed": draw(st.integers(0, 9)),
    }
    return Load(**(any_load | fixed))


def check_every_group_left_once(world: Watched) -> None:
    """And as many prompts trained as the batches hold, none of them twice."""
    load = world.load
    assert all(world.exits[group] == 1 for group in world.exits)
    assert set(world.exits) <= set(world.dispatched)
    assert all(len(batches) == 1 for batches in world.trained.values())
    batches = load.settings.batches
    assert len(world.trained) == batches * load.prompts_per_batch
    left = world.coordinator.left
    assert left[Reason.TRAINED] == len(world.trained)
    assert sum(left.values()) == len(world.exits)
    # What is dispatched and has not left would have been one more than the batches need.
    assert world.coordinator.buffer.held == len(world.dispatched) - len(world.exits)


@settings(max_examples=examples(150))
@given(loads())
def test_a_run_ends_and_no_token_in_the_loss_is_older_than_the_bound(load: Load) -> None:
    world = Watched(load)
    result = world.run()
    check_every_group_left_once(world)
    assert result.max_token_lag <= load.max_version_lag
    if load.on_missed_deadline is not OnMissedDeadline.MASK_TOKENS:
        assert max(world.oldest) <= load.max_version_lag
        assert result.masked_share == 0
        assert result.effective_throughput == result.throughput
    if not load.dynamic_sampling:
        assert result.filtered_share == 0


@settings(max_examples=examples(150))
@given(
    loads(
        pools=(EnginePool(2, Engine(2)),),
        lane=Lane(2, 4, arrival_steps=0.0, after_tokens=5),
        publication=Publication(pause=30.0, rolling=True),
        trainer=Trainer(1, 0.001),
        lengths=Lognormal(20, 2.0, 200, 1),
        on_missed_deadline=OnMissedDeadline.WAIT,
        batches=20,
    )
)
def test_a_straggler_may_move_to_an_engine_whose_weights_are_older(load: Load) -> None:
    """While a version travels from engine to engine. Its tokens there are older than its first one."""
    world = Watched(load)
    world.run()
    assert max(world.oldest) <= load.max_version_lag


@settings(max_examples=examples(60))
@given(st.data())
def test_the_peers_rules_end_too_and_keep_what_they_promise(data: st.DataObject) -> None:
    policy = data.draw(st.sampled_from([each for each in Policy if each is not Policy.DEADLINE_FIRST]))
    load = data.draw(loads(policy=policy))
    world = Watched(load)
    result = world.run()
    check_every_group_left_once(world)
    assert result.masked_share == result.discarded_share == 0
    if policy in {Policy.SYNCHRONOUS, Policy.COLOCATED}:
        assert max(world.oldest) == 0


@settings(max_examples=examples(30))
@given(loads())
def test_equal_loads_give_equal_results(load: Load) -> None:
    assert simulate(load) == simulate(load)
