"""Lengths: their means, their correlation, their drift, and files of them."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from qwen35_trainer.simulate.response_lengths import (
    BoundedPareto,
    GroupSampler,
    LengthDistribution,
    Lognormal,
    Replayed,
    mean_length,
)

SOME: list[LengthDistribution] = [
    Lognormal(),
    Lognormal(cv=1.5),
    Lognormal(1000, 0.5, 1100, 900),
    BoundedPareto(),
    BoundedPareto(2.5, 100, 500),
    Replayed(((10, 20, 30), (1000,))),
]


def drawn(lengths: LengthDistribution, prompts: int = 4000, **fields: float) -> np.ndarray:
    groups = GroupSampler(
        lengths,
        8,
        fields.get("correlation", 0.0),
        fields.get("drift", 1.0),
        fields.get("signal", 1.0),
        int(fields.get("seed", 0)),
    )
    return np.array([groups.draw(position, int(fields.get("batch", 0)))[0] for position in range(prompts)])


@pytest.mark.parametrize("lengths", SOME)
def test_what_is_drawn_has_the_mean_and_the_ends_of_the_distribution(lengths: LengthDistribution) -> None:
    drawn_lengths = drawn(lengths)
    assert drawn_lengths.mean() == pytest.approx(mean_length(lengths), rel=0.03)
    assert drawn_lengths.min() >= lengths.floor
    assert drawn_lengths.max() <= lengths.cap


def test_the_mean_of_a_bounded_pareto_is_the_textbooks() -> None:
    alpha, low, high = 1.5, 100, 10_000
    share = 1 - (low / high) ** alpha
    mean = low**alpha / share * alpha / (alpha - 1) * (low ** (1 - alpha) - high ** (1 - alpha))
    assert mean_length(BoundedPareto(alpha, low, high)) == pytest.approx(mean, rel=1e-3)


def test_a_lognormal_far_from_its_ends_has_its_mean_and_its_cv() -> None:
    lengths = Lognormal(4000, 0.3, 1_000_000, 1)
    assert mean_length(lengths) == pytest.approx(4000, rel=1e-3)
    drawn_lengths = drawn(lengths)
    assert drawn_lengths.std() / drawn_lengths.mean() == pytest.approx(0.3, rel=0.05)


def test_without_variation_all_are_equal() -> None:
    assert set(drawn(Lognormal(100, 0), 50).ravel().tolist()) == {100}


@pytest.mark.parametrize("correlation", [0.0, 0.4, 0.9])
def test_the_prompt_has_its_share_of_the_variance_of_the_logarithm(correlation: float) -> None:
    drawn_lengths = np.log(drawn(Lognormal(4000, 1.0, 10_000_000, 1), correlation=correlation))
    between = np.cov(drawn_lengths[:, 0], drawn_lengths[:, 1])[0, 1]
    assert between / drawn_lengths.var() == pytest.approx(correlation, abs=0.05)


def test_correlation_leaves_the_mean_as_it_is() -> None:
    assert drawn(Lognormal(), correlation=0.5).mean() == pytest.approx(mean_length(Lognormal()), rel=0.04)


def test_drift_is_a_factor_of_every_length_and_of_the_true_mean() -> None:
    lengths = Lognormal(100, 0.1)
    grown = drawn(lengths, drift=1.1, batch=10)
    assert grown.mean() / drawn(lengths).mean() == pytest.approx(1.1**10, rel=0.01)
    groups = GroupSampler(lengths, 8, 0.0, 1.1, 1.0, 0)
    assert groups.mean(range(2)) == pytest.approx(100 * (1 + 1.1) / 2, rel=0.01)


def test_signal_is_as_frequent_as_configured() -> None:
    groups = GroupSampler(Lognormal(), 2, 0.0, 1.0, 0.3, 0)
    first_lengths = [groups.draw(position, 0)[1] for position in range(4000)]
    assert sum(first_lengths) / len(first_lengths) == pytest.approx(0.3, abs=0.03)


def test_the_same_seed_draws_the_same_and_another_one_does_not() -> None:
    assert (drawn(Lognormal(), 600, seed=1) == drawn(Lognormal(), 600, seed=1)).all()
    assert (drawn(Lognormal(), 600, seed=1) != drawn(Lognormal(), 600, seed=2)).any()


def test_a_prompt_that_comes_back_draws_other_samples_with_the_same_signal() -> None:
    groups = GroupSampler(Lognormal(), 8, 0.0, 1.0, 0.5, 0)
    first = [groups.draw(position, 0) for position in range(1000)]
    again = [groups.draw(position, 0) for position in range(1000)]
    assert all(once[0] != twice[0] for once, twice in zip(first, again, strict=True))
    assert [once[1] for once in first] == [twice[1] for twice in again]


def test_samples_of_a_replayed_group_come_from_one_prompt() -> None:
    drawn_lengths = drawn(Replayed(((1, 2, 3), (101, 102), (203,))), 300)
    assert all(len({length // 100 for length in group}) == 1 for group in drawn_lengths.tolist())
    assert {int(length) // 100 for length in drawn_lengths.ravel()} == {0, 1, 2}


def test_a_file_may_hold_numbers(tmp_path: Path) -> None:
    file = tmp_path / "lengths.jsonl"
    file.write_text("100\n\n250.0\n7\n")
    assert Replayed.read(file) == Replayed(((100, 250, 7),))


def test_a_file_may_name_prompts(tmp_path: Path) -> None:
    file = tmp_path / "lengths.jsonl"
    lines = [{"prompt": "a", "tokens": 5}, {"prompt": 7, "tokens": 6}, {"prompt": "a", "tokens": 8}]
    file.write_text("\n".join(map(json.dumps, lines)))
    assert Replayed.read(file) == Replayed(((5, 8), (6,)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "lengths.jsonl: has no length"),
        ("\n \n", "lengths.jsonl: has no length"),
        ("5\n-3\n", "lengths.jsonl:2: -3 tokens < 1: negative"),
        ("5\n0\n", "lengths.jsonl:2: 0 tokens < 1"),
        ("5\nmany\n", "lengths.jsonl:2: 'many' is not numeric"),
        ('5\n"6"\n', "lengths.jsonl:2: '\"6\"' is not numeric"),
        ("true\n", "lengths.jsonl:1: 'true' is not numeric"),
        ("NaN\n", "lengths.jsonl:1: 'NaN' is not numeric"),
        ("[5]\n", "lengths.jsonl:1: '[5]' is not numeric"),
        ('{"prompt": "a"}\n', "lengths.jsonl:1:"),
        ('{"prompt": ["a"], "tokens": 5}\n', "lengths.jsonl:1: the prompt is"),
        ('{"prompt": "a", "tokens": 5}\n6\n', "some lines name a prompt and 1 do not"),
    ],
)
def test_a_bad_line_of_a_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "lengths.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=r".+") as refused:
        Replayed.read(file)
    assert message in str(refused.value)


def test_all_bad_lines_are_listed_together(tmp_path: Path) -> None:
    file = tmp_path / "lengths.jsonl"
    file.write_text("x\n5\n-1\n")
    with pytest.raises(ValueError, match=r":1: .*:3: "):
        Replayed.read(file)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_a_distribution_without_a_sensible_mean_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match=r"lengths\.mean"):
        Lognormal(mean=bad)
