"""The encoding of changed values: exact for all bits, never larger than the values, and no damage is decoded as if it were valid."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.weights.changed_values import ChangesDamaged, apply_changes, encoded_changes

SIZES = (1, 2, 4, 8)


def values(count: int, item_bytes: int) -> np.ndarray:
    """The bytes of `count` random values."""
    return np.random.default_rng(count).integers(0, 256, count * item_bytes, np.uint8)


def changed_at(before: np.ndarray, positions: list[int], item_bytes: int) -> np.ndarray:
    """A copy in which one byte of each value at `positions` differs."""
    after = before.copy()
    after[[position * item_bytes for position in positions]] ^= 1
    return after


@given(item_bytes=st.sampled_from(SIZES), positions=st.sets(st.integers(0, 3999), max_size=900))
def test_the_encoding_of_changes_gives_the_same_bytes_and_is_smaller(item_bytes: int, positions: set[int]) -> None:
    before = values(4000, item_bytes)
    after = changed_at(before, sorted(positions), item_bytes)
    encoding, changes = encoded_changes(before, after, item_bytes)
    assert changes == len(positions)
    assert encoding.size < after.size
    assert encoding.size <= changes * (item_bytes + 1) + 4000 // 255
    decoded = before.copy()
    apply_changes(decoded, encoding, changes, item_bytes)
    assert np.array_equal(decoded, after)


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 3000])
@pytest.mark.parametrize("item_bytes", SIZES)
def test_gaps_of_any_length_are_exact(gap: int, item_bytes: int) -> None:
    before = values(4000, item_bytes)
    after = changed_at(before, [gap, gap + 1, 2 * gap + 2 if gap < 1900 else 3999], item_bytes)
    encoding, changes = encoded_changes(before, after, item_bytes)
    apply_changes(before, encoding, changes, item_bytes)
    assert np.array_equal(before, after)


def test_what_has_not_changed_takes_no_bytes() -> None:
    encoding, changes = encoded_changes(values(50, 2), values(50, 2), 2)
    assert (encoding.size, changes) == (0, 0)


@pytest.mark.parametrize("item_bytes", SIZES)
def test_changes_of_most_values_are_not_encoded(item_bytes: int) -> None:
    before = values(100, item_bytes)
    assert encoded_changes(before, ~before, item_bytes) is None


@given(position=st.integers(0, 299), flip=st.integers(1, 255), kept=st.integers(0, 299))
def test_a_damaged_encoding_is_refused_or_gives_other_values(position: int, flip: int, kept: int) -> None:
    before = values(4000, 2)
    after = changed_at(before, list(range(0, 4000, 41)), 2)
    encoding, changes = encoded_changes(before, after, 2)
    for damaged in (encoding.copy(), encoding[: kept % encoding.size]):
        damaged[position % max(1, damaged.size) : position % max(1, damaged.size) + 1] ^= np.uint8(flip)
        decoded = before.copy()
        try:
            apply_changes(decoded, damaged, changes, 2)
        except ChangesDamaged:
            continue
        assert not np.array_equal(decoded, after)
