"""A run in at most LIMIT bytes: what a report is made of where the run's own folder cannot be reached any more.

    records ─► thinned until they fit ─► JSON ─► gzip       pack
    gzip ─► JSON ─► records, summary, manifest, samples ─► report    unpack

Numbers are those of the whole run, because the summary goes along; only the charts have fewer points. Which updates are left
out depends on their place alone: what one pack keeps at a stride, every later one keeps at that stride too.
"""

import gzip
import io
import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from qwen35_trainer.progress.records import (
    CheckpointRecord,
    EvaluationRecord,
    ExportRecord,
    FinishRecord,
    Record,
    SpanRecord,
    UpdateRecord,
    from_line,
    latest,
    surviving_evaluations,
    surviving_updates,
    to_line,
)
from qwen35_trainer.progress.samples import Moment
from qwen35_trainer.progress.summary import Summary, summarise

LIMIT: Final = 300 * 1024
"""Bytes, packed: an object of a cluster has room for 1 MiB, and every byte of it is in etcd's memory."""
POINTS: Final = 2000
"""Updates, at most: no chart can show more, and packing them would take seconds."""
SPANS: Final = 1000
"""Of the timeline, the latest: more cannot be told apart."""
LONGEST: Final = 64 * 1024 * 1024
"""Bytes, unpacked: far above what fits into LIMIT."""
_RARE: Final = 16
"""Evaluations are left out at a stride so much smaller."""


class HistoryUnreadable(ValueError):
    """Not a packed history; says why."""


@dataclass(frozen=True)
class History:
    """The run as far as it was packed."""

    manifest: str
    """The resolved one, as YAML."""
    summary: Summary
    records: tuple[Record, ...]
    left_out: int
    """Updates of the final weights that are not among the records."""
    samples: tuple[Moment, ...] = ()
    """Responses of the latest update and evaluation."""


class _Document(BaseModel):
    model_config = ConfigDict(extra="ignore")

    manifest: str
    summary: Summary
    leftOut: int  # noqa: N815  # a key of the document
    records: list[dict[str, Any]]
    samples: tuple[Moment, ...] = ()

    @field_validator("summary", mode="before")
    @classmethod
    def _of_an_older_release(cls, given: object) -> object:
        """A run that ended before a release added a number has none of that kind."""
        nothing = summarise([], max_version_lag=None, peak_rss_mib=None) | {"version": ""}
        return {**nothing, **given} if isinstance(given, dict) else given


def pack(
    manifest: str,
    summary: Summary,
    records: Sequence[Record],
    limit: int = LIMIT,
    samples: Sequence[Moment] = (),
) -> bytes:
    """The history, with as many updates as `limit` bytes can hold; the first and the last are always among them.

    samples: those of the latest update and evaluation, whose texts are bounded (`progress.samples`); all of them are packed.
    """
    updates, evaluations = surviving_updates(records), surviving_evaluations(records)
    spans = [record for record in records if isinstance(record, SpanRecord)]
    lasts = (latest(records, kind) for kind in (CheckpointRecord, ExportRecord, FinishRecord))
    ends = [last for last in lasts if last is not None]
    stride = 1
    while len(updates) > POINTS * stride:
        stride *= 2
    while True:
        kept = _thinned(updates, stride)
        chosen: list[Record] = [*kept, *_thinned(evaluations, max(1, stride // _RARE)), *ends]
        chosen += spans[max(0, len(spans) - SPANS // stride) :]
        document = {
            "manifest": manifest,
            "summary": summary,
            "leftOut": len(updates) - len(kept),
            "samples": [asdict(moment) for moment in samples],
            "records": [_compact(record) for record in sorted(chosen, key=_time)],
        }
        packed = gzip.compress(json.dumps(document, separators=(",", ":")).encode(), mtime=0)
        if len(packed) <= limit or stride > _RARE * max(len(updates), len(evaluations), SPANS):
            return packed
        stride *= 2


def unpack(packed: bytes) -> History:
    """What was packed. Raises HistoryUnreadable."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(packed)) as file:
            text = file.read(LONGEST + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise HistoryUnreadable(f"not gzip: {error}") from error
    if len(text) > LONGEST:
        raise HistoryUnreadable(f"more than {LONGEST:,} bytes")
    try:
        document = _Document.model_validate_json(text)
        records = tuple(from_line(json.dumps(fields)) for fields in document.records)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc'])) or 'text'}: {one['msg']}" for one in error.errors()[:3])
        raise HistoryUnreadable(f"no history: {wrong}") from error
    except ValueError as error:
        raise HistoryUnreadable(str(error)) from error
    return History(document.manifest, document.summary, records, document.leftOut, document.samples)


def _thinned[R: UpdateRecord | EvaluationRecord](records: Sequence[R], stride: int) -> list[R]:
    """Every so manieth, and the last."""
    last = len(records) - 1
    return [record for place, record in enumerate(records) if place % stride == 0 or place == last]


def _compact(record: Record) -> dict[str, Any]:
    """Six digits of each number, which is what a chart can show, and of a time milliseconds; without what does not exist."""
    times = {name: getattr(record, name, None) for name in ("time", "start", "end", "wall_time")}
    fields = json.loads(to_line(record), parse_float=lambda digits: float(f"{float(digits):.6g}"))
    exact = {name: round(time, 3) for name, time in times.items() if time is not None}
    return {name: value for name, value in (fields | exact).items() if value not in (None, {})}


def _time(record: Record) -> float:
    return record.end if isinstance(record, SpanRecord) else record.time
