"""Packs a run into at most MAX_PACKED_BYTES, for reports that are made after the run's folder has become unreachable.

    pack:    records ─► thinned until they fit ─► JSON ─► gzip
    unpack:  gzip ─► JSON ─► records, summary, manifest, samples ─► report

The numbers in the report cover the whole run, because the summary is packed too. Only the charts have fewer points:
with a stride of n, the first update, every n-th update after it, and the last update are kept. Every update of a packed
history, except the last one, is therefore also in each later packed history of the run with the same stride.
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
    RunRecord,
    SpanRecord,
    UpdateRecord,
    from_line,
    latest,
    surviving_evaluations,
    surviving_updates,
    to_line,
)
from qwen35_trainer.progress.sample_file import Moment
from qwen35_trainer.progress.summary import Summary, summarise

MAX_PACKED_BYTES: Final = 300 * 1024
"""Maximum size of a packed history, which is stored in a ConfigMap.

A ConfigMap holds at most 1 MiB, and etcd keeps all of it in memory.
"""
MAX_UPDATES: Final = 2000
"""Maximum number of packed updates. A chart cannot show more, and packing more would take seconds."""
MAX_SPANS: Final = 1000
"""Maximum number of packed spans (bars of the timeline), of which the latest are kept. A chart cannot show more."""
MAX_UNPACKED_BYTES: Final = 64 * 1024 * 1024
"""Maximum size of an unpacked history, which limits the memory that a malicious or malformed file can take.

A history of at most MAX_PACKED_BYTES is far smaller when it is unpacked.
"""
_EVALUATION_STRIDE_DIVISOR: Final = 16
"""The stride of evaluations is the stride of updates divided by this number, because evaluations are rare."""
_FORMER_KEYS: Final = {"trainerIdle": "trainIdle"}
"""Keys of the summary in histories of earlier releases, each with its present name."""


class HistoryUnreadable(ValueError):
    """The bytes are not a valid packed history. The message contains the reason."""


@dataclass(frozen=True)
class PackedHistory:
    """The contents of a packed history: manifest, summary, a part of the records, and sampled responses."""

    manifest: str
    """The resolved manifest, as YAML."""
    summary: Summary
    records: tuple[RunRecord, ...]
    left_out: int
    """Number of updates that led to the final weights but are not among `records`."""
    samples: tuple[Moment, ...] = ()
    """Sampled responses of the latest update and evaluation."""


class _Document(BaseModel):
    model_config = ConfigDict(extra="ignore")

    manifest: str
    summary: Summary
    leftOut: int  # noqa: N815  # a key of the document
    records: list[dict[str, Any]]
    samples: tuple[Moment, ...] = ()

    @field_validator("summary", mode="before")
    @classmethod
    def _complete(cls, summary: object) -> object:
        """Complete the summary of an earlier release: add missing fields, and give fields their present names."""
        if not isinstance(summary, dict):
            return summary
        fields = {_FORMER_KEYS.get(key, key): value for key, value in summary.items()}
        defaults: dict[str, object] = {**summarise([], max_version_lag=None, peak_rss_mib=None), "version": ""}
        return defaults | fields


def pack(
    manifest: str,
    summary: Summary,
    records: Sequence[RunRecord],
    limit: int = MAX_PACKED_BYTES,
    samples: Sequence[Moment] = (),
) -> bytes:
    """Pack a run into at most `limit` bytes: each update, or every 2nd, 4th, 8th, …, always including the first and the last.

    The stride doubles until at most MAX_UPDATES updates remain and the result fits. A larger stride also leaves fewer
    evaluations, and fewer of the last spans (bars of the timeline). If even the first and last updates and evaluations
    do not fit, the result is larger than `limit`.

    records: all records of the run, or the records that a `RunFold` keeps. summary: covers all updates, including those
    that are left out. samples: sampled responses of the latest update and evaluation, all of which are packed.
    """
    updates, evaluations = surviving_updates(records), surviving_evaluations(records)
    spans = [record for record in records if isinstance(record, SpanRecord)]
    latest_records = (latest(records, kind) for kind in (CheckpointRecord, ExportRecord, FinishRecord))
    singles = [record for record in latest_records if record is not None]
    stride = 1
    while len(updates) > MAX_UPDATES * stride:
        stride *= 2
    while True:
        kept = _thinned(updates, stride)
        kept_evaluations = _thinned(evaluations, max(1, stride // _EVALUATION_STRIDE_DIVISOR))
        chosen: list[RunRecord] = [*kept, *kept_evaluations, *singles]
        chosen += spans[max(0, len(spans) - MAX_SPANS // stride) :]
        document = {
            "manifest": manifest,
            "summary": summary,
            "leftOut": summary["updates"] - len(kept),
            "samples": [asdict(moment) for moment in samples],
            "records": [_compact(record) for record in sorted(chosen, key=_time)],
        }
        packed = gzip.compress(json.dumps(document, separators=(",", ":")).encode(), mtime=0)
        if len(packed) <= limit or stride > _EVALUATION_STRIDE_DIVISOR * max(len(updates), len(evaluations), MAX_SPANS):
            return packed
        stride *= 2


def unpack(packed: bytes) -> PackedHistory:
    """Unpack bytes that `pack` returned. Raises HistoryUnreadable for any other bytes."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(packed)) as file:
            document_json = file.read(MAX_UNPACKED_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise HistoryUnreadable(f"not gzip: {error}") from error
    if len(document_json) > MAX_UNPACKED_BYTES:
        raise HistoryUnreadable(f"more than {MAX_UNPACKED_BYTES:,} bytes")
    try:
        document = _Document.model_validate_json(document_json)
        records = tuple(from_line(json.dumps(fields)) for fields in document.records)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, detail['loc'])) or 'text'}: {detail['msg']}" for detail in error.errors()[:3]
        )
        raise HistoryUnreadable(f"not a history: {problems}") from error
    except ValueError as error:
        raise HistoryUnreadable(str(error)) from error
    return PackedHistory(document.manifest, document.summary, records, document.leftOut, document.samples)


def _thinned[R: UpdateRecord | EvaluationRecord](records: Sequence[R], stride: int) -> list[R]:
    """Return every `stride`-th record, plus the last one."""
    last = len(records) - 1
    return [record for place, record in enumerate(records) if place % stride == 0 or place == last]


def _compact(record: RunRecord) -> dict[str, Any]:
    """Return the record as plain data, without nulls and empty mappings.

    Numbers are rounded to the six digits that a chart can show, and times to milliseconds.
    """
    times = {name: getattr(record, name, None) for name in ("time", "start", "end", "wall_time")}
    fields = json.loads(to_line(record), parse_float=lambda digits: float(f"{float(digits):.6g}"))
    exact = {name: round(time, 3) for name, time in times.items() if time is not None}
    return {name: value for name, value in (fields | exact).items() if value not in (None, {})}


def _time(record: RunRecord) -> float:
    return record.end if isinstance(record, SpanRecord) else record.time
