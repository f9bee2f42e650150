"""What the commands are made of: changes by path, arithmetic, averages, climbing."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.pipeline.buffer import OnMissedDeadline
from qwen35_trainer.simulate.analytic import estimate
from qwen35_trainer.simulate.changes import Change, ChangeRefused, LoadRefused, changed
from qwen35_trainer.simulate.load import Engine, EnginePool, Load, Lognormal, Policy, Trainer
from qwen35_trainer.simulate.run import simulate
from qwen35_trainer.simulate.search import climb
from qwen35_trainer.simulate.sweep import average
from qwen35_trainer.simulate.words import digits, percent

DOCS = Path(__file__).parents[2] / "docs" / "simulate.md"
POOLS = (EnginePool(2, Engine(slots=8)), EnginePool(1, Engine(slots=4)))
REFERENCE = Load()


def after(*texts: str, load: Load = REFERENCE) -> Load:
    return changed(load, [Change.parse(text) for text in texts])


def test_a_path_changes_one_field():
    assert after("trainer.units=3") == Load(trainer=Trainer(units=3))
    assert after("cv=1.5") == Load(lengths=Lognormal(cv=1.5))
    assert after("elastic=[[100, 4], [200, 8]]").elastic == ((100.0, 4), (200.0, 8))


def test_a_path_into_a_list_changes_all_or_the_one_that_it_names():
    both, second = after("slots=16", load=Load(pools=POOLS)), after("pools[1].engine.slots=16", load=Load(pools=POOLS))
    assert [pool.engine.slots for pool in both.pools] == [16, 16]
    assert [pool.engine.slots for pool in second.pools] == [8, 16]


def test_a_lane_begins_with_its_first_field_and_ends_with_null():
    with_lane = after("lane.speed=2", "lane.after_tokens=500")
    assert (with_lane.lane.speed, with_lane.lane.after_tokens, with_lane.lane.engines) == (2.0, 500, 1)
    assert after("lane=null", load=with_lane).lane is None


def test_only_the_final_load_has_to_be_legal():
    changes = ("staleness_threshold=9", "max_version_lag=10")
    assert after(*changes) == after(*reversed(changes))


def test_problems_of_names_and_of_the_load_come_together():
    with pytest.raises(ChangeRefused) as refused:
        after("nonsense=1", "trainer.units=0", "engines=0")
    assert len(refused.value.problems) == 3
    with pytest.raises(LoadRefused) as refused:
        after("trainer.units=0", "engines=0")
    assert not isinstance(refused.value, ChangeRefused)


def test_a_policy_without_deadlines_drops_theirs_unless_asked():
    masking = Load(on_missed_deadline=OnMissedDeadline.MASK_TOKENS, adaptive=True)
    fifo = after("policy=fifo", load=masking)
    assert (fifo.policy, fifo.on_missed_deadline, fifo.adaptive) == (Policy.FIFO, OnMissedDeadline.WAIT, False)
    with pytest.raises(LoadRefused, match="only deadline-first has deadlines"):
        after("policy=fifo", "missed-deadline=MaskTokens")


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["cv", "mean", "engines", "lane", "lane.speed", "trainer", "seed", "policy", "faults.times", "x"]),
            st.sampled_from(["1", "-1", "0", "null", "[]", "{}", "{", "fifo", ".nan", ".inf", "1e400", "''", "[[1, 2]]"]),
        ),
        max_size=4,
    )
)  # fmt: skip
def test_any_change_is_made_or_refused_with_a_reason(pairs):
    problems: tuple[str, ...] = ("none was told",)
    try:
        found = changed(Load(), [Change(path, value) for path, value in pairs])
    except LoadRefused as error:
        found, problems = None, error.problems
    assert isinstance(found, Load) or all(problems)


def test_arithmetic_agrees_with_the_published_estimates():
    # 118, 178 and the cap 213, S* 3 for the reference load, of which the mean of the longest of 8 is drawn.
    found = estimate(Load())
    assert found.ideal == pytest.approx(8 / 0.0375)
    assert found.rollout == pytest.approx(8 * 64 / (1 + 0.004 * 64))
    assert [found.throughput(s) for s in (1, 2)] == pytest.approx([118, 178], rel=0.06)
    assert found.throughput(4) == pytest.approx(found.ideal)
    assert math.ceil(found.least_staleness) == 3


def test_arithmetic_of_equal_lengths_is_exact():
    load = Load(lengths=Lognormal(mean=1000, cv=0), trainer=Trainer(8, 0.01), prompts_per_batch=4, group_size=2)
    found = estimate(load)
    assert found.version_tokens == 4 * 2 * 1000
    assert found.group_time == pytest.approx(1000 * 1.256 + 8000 * 0.01 / 8)


def test_an_average_is_the_mean_and_greatest_lags_stay_the_greatest():
    load = Load(batches=10, warm_up=2)
    first, second = (simulate(replace(load, seed=seed)) for seed in (0, 1))
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


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "–"), (math.inf, "–"), (0, "0"), (0.0123, "0.0123"), (1.987, "1.99"), (13.37, "13.4"), (7514.2, "7,514")],
)
def test_numbers_have_three_digits(value, shown):
    assert digits(value) == shown


def test_shares_have_a_decimal_where_they_are_small():
    assert [percent(share) for share in (0, 1e-5, -1e-5, 0.034, 0.35, 1)] == ["0%", "0%", "0%", "3.4%", "35%", "100%"]
    assert percent(0.012, signed=True) == "+1.2%"


def test_every_path_of_the_docs_exists_with_its_default():
    rows = [
        line.split("|") for line in DOCS.read_text().splitlines() if line.startswith("| `") and line.count("|") == 4
    ]
    pairs = [pair for row in rows for pair in zip(*(re.findall(r"`([^`]+)`", cell) for cell in row[1:3]), strict=True)]
    assert len(pairs) > 20
    for path, default in pairs:
        assert after(f"{path}={default}") == Load(), path
