"""Texts that are cut have at most the given number of bytes, and no character is cut in two."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_operator.status.text_limits import ELLIPSIS, cut


@given(text=st.text(max_size=40), limit=st.integers(8, 60))
def test_a_cut_text_fits_and_is_the_beginning_of_the_text(text, limit):
    short = cut(text, limit)
    assert len(short.encode(errors="replace")) <= limit
    assert short == text or text.startswith(short.removesuffix(ELLIPSIS))
    assert cut(short, limit) == short


@pytest.mark.parametrize(
    ("text", "kept"), [("训练失败" * 9, "训练失败训练失"), ("🙂" * 9, "🙂🙂🙂🙂🙂"), ("x" * 25, "x" * 21)]
)
def test_the_limit_counts_bytes(text, kept):
    assert cut(text, 24) == kept + ELLIPSIS


def test_a_surrogate_without_its_other_half_does_not_stop_a_write():
    assert cut("\ud83d" * 30, 24) == "?" * 21 + ELLIPSIS
