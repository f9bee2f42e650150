"""Compares the rows on which a run trains with those on which it trained before it was resumed.

Rows are compared as they were read, and not as tokens: a release that encodes them differently continues the same run.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Final

import numpy as np

_DIGEST_BYTES: Final = 8


@dataclass(frozen=True)
class SourceRows:
    """The rows of a source of files: their number, and a digest of their contents in their order.

    name: name of the source.
    """

    name: str
    rows: int
    digest: str

    def __str__(self) -> str:
        return f"{self.rows} rows (digest {self.digest})"


class RowsDigest:
    """Computes the digest of a source, row by row.

    It depends on the fields and values of the rows and on their order, not on the order of the fields in a row, spaces
    or the ends of lines. The contents of images count only if they are in the row itself.
    """

    def __init__(self) -> None:
        self._hash, self._rows = hashlib.blake2b(digest_size=_DIGEST_BYTES), 0

    def add(self, row: Mapping[str, object]) -> None:
        self._hash.update(json.dumps(row, sort_keys=True, default=_text).encode() + b"\n")
        self._rows += 1

    def of(self, source: str) -> SourceRows:
        """Return the rows added so far, as those of the source with this name."""
        return SourceRows(source, self._rows, self._hash.hexdigest())


def _text(value: object) -> object:
    """Return a value of JSON for one that only Parquet files have. Two readings of a file give the same one."""
    match value:
        case bytes():
            return hashlib.blake2b(value, digest_size=_DIGEST_BYTES).hexdigest()
        case date() | time() | timedelta() | Decimal():
            return str(value)
        case np.ndarray() | np.generic():
            return value.tolist()
    return type(value).__name__  # the text of another object may contain its address in memory


def dump_rows(sources: Iterable[SourceRows]) -> str:
    """Return the sources as JSON, which every later release can read with `parse_rows`."""
    return json.dumps({"train": [asdict(source) for source in sources]})


def parse_rows(text: str) -> list[SourceRows]:
    """Return the sources in a text of `dump_rows`. Raises ValueError if the text is not one."""
    try:
        return [SourceRows(each["name"], each["rows"], each["digest"]) for each in json.loads(text)["train"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"the rows of data.train are expected, found {text[:100]}") from error


def changed(earlier: Sequence[SourceRows], now: Sequence[SourceRows]) -> list[str]:
    """Return one line for each source that had other rows earlier. A source that only one of the two has does not count."""
    before = {source.name: source for source in earlier}
    return [
        f"source {source.name}: {before[source.name]} there, {source} here"
        for source in now
        if source.name in before and before[source.name] != source
    ]
