"""What the commands are made of: changes by path, arithmetic, averages, climbing."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.pipeline.buffer import MissedDeadlinePolicy
from qwen35_trainer.simulate.field_changes import ChangeRefused, FieldChange, WorkloadRefused, apply_changes
from qwen35_trainer.simulate.plan_search import climb, estimate
from qwen35_trainer.simulate.simulation import simulate
from qwen35_trainer.simulate.sweep import average
from qwen35_trainer.simulate.workload import BatchPolicy, Lognormal, ReplicaGroup, ReplicaSpeed, TrainSpeed, Workload

DOCS = Path(__file__).parents[2] / "docs" / "simulate.md"
POOLS = (ReplicaGroup(2, ReplicaSpeed(slots=8)), ReplicaGroup(1, ReplicaSpeed(slots=4)))
REFERENCE = Workload()


def after(*texts: str, workload: Workload = REFERENCE) -> Workload:
    return apply_changes(workload, [FieldChange.parse(text) for text in texts])


def test_a_path_changes_one_field():
    assert after("trainer.units=3") == Workload(trainer=TrainSpeed(units=3))
    assert after("cv=1.5") == Workload(lengths=Lognormal(cv=1.5))
    assert after("elastic=[[100, 4], [200, 8]]").elastic == ((100.0, 4), (200.0, 8))


def test_a_path_into_a_list_changes_all_or_the_one_that_it_names():
    both, second = (
        after("slots=16", workload=Workload(pools=POOLS)),
        after("pools[1].replica.slots=16", workload=Workload(pools=POOLS)),
    )
    assert [pool.replica.slots for pool in both.pools] == [16, 16]
    assert [pool.replica.slots for pool in second.pools] == [8, 16]


def test_a_lane_begins_with_its_first_field_and_ends_with_null():
    with_lane = after("lane.speed=2", "lane.after_tokens=500")
    assert (with_lane.lane.speed, with_lane.lane.after_tokens, with_lane.lane.replicas) == (2.0, 500, 1)
    assert after("lane=null", workload=with_lane).lane is None


def test_only_the_final_workload_has_to_be_legal():
    changes = ("staleness_threshold=9", "max_version_lag=10")
    assert after(*changes) == after(*reversed(changes))


def test_problems_of_names_and_of_the_workload_are_listed_together():
    with pytest.raises(ChangeRefused) as refused:
        after("nonsense=1", "trainer.units=0", "replicas=0")
    assert len(refused.value.problems) == 3
    with pytest.raises(WorkloadRefused) as refused:
        after("trainer.units=0", "replicas=0")
    assert not isinstance(refused.value, ChangeRefused)


def test_a_policy_without_deadlines_resets_their_fields_unless_they_are_set():
    masking = Workload(on_missed_deadline=MissedDeadlinePolicy.MASK_TOKENS, adaptive=True)
    fifo = after("policy=fifo", workload=masking)
    assert (fifo.policy, fifo.on_missed_deadline, fifo.adaptive) == (BatchPolicy.FIFO, MissedDeadlinePolicy.WAIT, False)
    with pytest.raises(WorkloadRefused, match="only deadline-first has deadlines"):
        after("policy=fifo", "missed-deadline=MaskTokens")


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["cv", "mean", "replicas", "lane", "lane.speed", "trainer", "seed", "policy", "faults.times", "x"]),
            st.sampled_from(["1", "-1", "0", "null", "[]", "{}", "{", "fifo", ".nan", ".inf", "1e400", "''", "[[1, 2]]"]),
        ),
        max_size=4,
    )
)  # fmt: skip
def test_any_change_is_made_or_refused_with_a_reason(pairs):
    problems: tuple[str, ...] = ("no problem",)
    try:
        changed = apply_changes(Workload(), [FieldChange(path, value) for path, value in pairs])
    except WorkloadRefused as error:
        changed, problems = None, error.problems
    assert isinstance(changed, Workload) or all(problems)


def test_arithmetic_agrees_with_the_published_estimates():
    # 118, 178 and the cap 213, S* 3 for the reference workload, of which the mean of the longest of 8 is drawn.
    estimated = estimate(Workload())
    assert estimated.ideal == pytest.approx(8 / 0.0375)
    assert estimated.rollout == pytest.approx(8 * 64 / (1 + 0.004 * 64))
    assert [estimated.throughput(s) for s in (1, 2)] == pytest.approx([118, 178], rel=0.06)
    assert estimated.throughput(4) == pytest.approx(estimated.ideal)
    assert math.ceil(estimated.min_staleness) == 3


def test_arithmetic_of_equal_lengths_is_exact():
    workload = Workload(
        lengths=Lognormal(mean=1000, cv=0), trainer=TrainSpeed(8, 0.01), prompts_per_batch=4, group_size=2
    )
    estimated = estimate(workload)
    assert estimated.version_tokens == 4 * 2 * 1000
    assert estimated.group_time == pytest.approx(1000 * 1.256 + 8000 * 0.01 / 8)


def test_an_average_is_the_mean_and_takes_the_maximum_of_maximum_lags():
    workload = Workload(batches=10, warm_up=2)
    first, second = (simulate(replace(workload, seed=seed)) for seed in (0, 1))
    both = average([first, second])
    assert average([first]) == first
    assert both.throughput == pytest.approx((first.throughput + second.throughput) / 2)
    assert both.max_lag == max(first.max_lag, second.max_lag)
    assert both.events == first.events + second.events
    assert sum(both.lag_histogram) == sum(first.lag_histogram) + sum(second.lag_histogram)


@given(st.tuples(st.integers(0, 11), st.integers(0, 6)), st.tuples(st.integers(0, 11), st.integers(0, 6)))
def test_climbing_reaches_the_top_of_a_single_hill(start, top):
    def height(point: tuple[int, ...]) -> float:
        return 100.0 - sum((a - b) ** 2 for a, b in zip(point, top, strict=True))

    assert climb(start, (12, 7), height) == top


def test_climbing_walks_round_what_is_refused():
    wall = {(3, y) for y in range(5)}
    assert climb((0, 0), (8, 7), lambda point: -1.0 if point in wall else 10.0 + 5 * sum(point)) == (7, 6)


def test_every_path_of_the_docs_exists_with_its_default():
    rows = [
        line.split("|") for line in DOCS.read_text().splitlines() if line.startswith("| `") and line.count("|") == 4
    ]
    pairs = [pair for row in rows for pair in zip(*(re.findall(r"`([^`]+)`", cell) for cell in row[1:3]), strict=True)]
    assert len(pairs) > 20
    for path, default in pairs:
        assert after(f"{path}={default}") == Workload(), path
