from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.progress.thinned import Thinned


@given(number=st.integers(0, 500), limit=st.integers(1, 20))
def test_every_stride_th_value_and_the_last_one_are_kept_within_the_limit(number: int, limit: int) -> None:
    thinned = Thinned[int](limit)
    for value in range(number):
        thinned.add(value)
    expected = list(range(0, number, thinned.stride))
    assert thinned.values == (expected if not number or expected[-1] == number - 1 else [*expected, number - 1])
    assert len(thinned.values) <= limit + 1
    assert thinned.stride == 1 or number > thinned.stride // 2 * limit, "no more are left out than necessary"
    assert thinned.added == number


def test_what_is_kept_of_a_longer_run_was_kept_of_a_shorter_one() -> None:
    thinned, before = Thinned[int](8), set(range(9))
    for value in range(1000):
        thinned.add(value)
        assert set(thinned.values[:-1]) <= before | {value}
        before = set(thinned.values) | {value}
