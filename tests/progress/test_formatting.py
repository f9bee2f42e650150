import math

import pytest

from qwen35_trainer.formatting import bars, count, duration, excerpt, number, percent, sparkline


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0, "0"), (0.0123, "0.0123"), (0.612, "0.612"), (-1.234, "-1.23"), (1.987, "1.99"), (13.37, "13.4"),
     (23.44, "23.4"), (1234.4, "1,234"), (7514.2, "7,514"), (1e-6, "1.00e-06"), (math.nan, "nan"), (math.inf, "inf")],
)  # fmt: skip
def test_numbers_have_three_significant_digits(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(("value", "text"), [(None, "–"), (1234, "1,234"), (2_500_000, "2.50 M")])
def test_counts_are_exact_up_to_a_million(value: int | None, text: str) -> None:
    assert count(value) == text


def test_a_long_text_is_cut_to_one_line_of_300_characters() -> None:
    assert excerpt(" the judge\n\tis ill ") == "the judge is ill"
    assert excerpt("é" * 300) == "é" * 300
    assert excerpt("é" * 301) == "é" * 299 + "…"


@pytest.mark.parametrize(
    ("share", "text"),
    [(None, "–"), (math.inf, "–"), (0, "0%"), (1e-5, "0%"), (-1e-5, "0%"), (0.031, "3.1%"), (0.034, "3.4%"),
     (0.0996, "10%"), (0.35, "35%"), (1, "100%")],
)  # fmt: skip
def test_small_shares_have_a_decimal(share: float | None, text: str) -> None:
    assert percent(share) == text


def test_a_difference_of_shares_has_its_sign() -> None:
    assert [percent(share, signed=True) for share in (0.012, -0.3, 0.0)] == ["+1.2%", "-30%", "0%"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (1.23, "1.2 s"),
        (59.6, "1 min 00 s"),
        (185, "3 min 05 s"),
        (7620, "2 h 07 min"),
        (273600, "3 d 04 h"),
    ],
)
def test_durations_have_two_units(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_a_sparkline_goes_from_the_minimum_to_the_maximum_in_its_width() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 8, 8], 2) == "▁█"
    assert sparkline([3.0], 10) == "▁"
    assert sparkline([0, math.nan, 1], 8) == "▁█"
    assert sparkline([], 8) == ""


def test_bars_show_that_a_small_count_is_not_none() -> None:
    assert bars({0: 800, 1: 1, 3: 400}, 4) == "█▁·▄·"
