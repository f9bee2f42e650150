import datetime
from collections.abc import Mapping
from decimal import Decimal

import numpy as np
import pytest

from qwen35_trainer.data.source_rows import RowsDigest, SourceRows, changed, dump_rows, parse_rows


def rows(*rows: Mapping[str, object], source: str = "sums") -> SourceRows:
    digest = RowsDigest()
    for row in rows:
        digest.add(row)
    return digest.of(source)


A, B = {"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "answer": "3"}


def test_other_values_another_order_and_another_number_of_rows_are_noticed() -> None:
    assert len({rows(A, B), rows(B, A), rows(A), rows(A, {**B, "answer": 3}), rows(A, B, B)}) == 5


def test_two_readings_of_a_value_that_only_parquet_has_give_the_same_digest() -> None:
    """A decoded picture, for example, is another object each time."""
    for value in (object, lambda: b"12", lambda: datetime.timedelta(1), lambda: Decimal("1.50"), lambda: np.arange(3)):
        assert rows({"prompt": "1", "more": value()}) == rows({"prompt": "1", "more": value()})
    assert rows({"more": Decimal("1.50")}) != rows({"more": Decimal("1.51")})
    assert rows({"more": np.arange(3)}) != rows({"more": np.arange(4)})


def test_the_order_of_the_fields_in_a_row_does_not_count() -> None:
    assert rows(A) == rows(dict(reversed(A.items())))


def test_the_digest_is_the_same_in_every_release() -> None:
    assert rows(A, B) == SourceRows("sums", 2, "c7b7ff52cc066b39")


def test_values_that_only_parquet_has_are_part_of_the_digest() -> None:
    images = [{"image": b"\x89PNG"}, {"image": b"\x89GIF"}, {"image": datetime.date(2024, 1, 1)}]
    assert len({rows(image) for image in images}) == 3


def test_each_source_with_other_rows_is_named_with_both_values() -> None:
    earlier = [SourceRows("sums", 2, "aa"), SourceRows("words", 5, "bb")]
    now = [SourceRows("sums", 3, "cc"), SourceRows("words", 5, "bb"), SourceRows("new", 1, "dd")]
    assert changed(earlier, now) == ["source sums: 2 rows (digest aa) there, 3 rows (digest cc) here"]


def test_rows_are_read_back_also_with_fields_of_a_later_release() -> None:
    assert parse_rows(dump_rows([rows(A)])) == [rows(A)]
    assert parse_rows('{"train": [{"name": "sums", "rows": 1, "digest": "aa", "size": 3}]}') == [
        SourceRows("sums", 1, "aa")
    ]


@pytest.mark.parametrize("text", ["", "[]", '{"train": [3]}', '{"train": [{"name": "sums"}]}'])
def test_a_text_without_rows_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"Expecting value|rows of data.train are expected"):
        parse_rows(text)
