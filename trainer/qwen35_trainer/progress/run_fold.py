"""Reduces the records of a run, one by one and in bounded memory, to the data of summary, report and packed history.

records ─► RunFold
             ├─► totals ─► summary.json
             ├─► updates, evaluations: at most MAX_POINTS of each ─► charts
             ├─► spans: the last ones, and the whole run coarsely ─► timelines
             └─► the newest checkpoint, export and end
"""

from collections import deque
from collections.abc import Iterable
from typing import Final, Self

from qwen35_trainer.progress.coarse_spans import CoarseSpans
from qwen35_trainer.progress.records import (
    CheckpointRecord,
    EvaluationRecord,
    ExportRecord,
    FinishRecord,
    RunRecord,
    SpanRecord,
    UpdateRecord,
)
from qwen35_trainer.progress.repeats import marked
from qwen35_trainer.progress.thinned import Thinned
from qwen35_trainer.progress.totals import RunTotals

MAX_POINTS: Final = 2000
"""Maximum number of updates, and of evaluations, that are kept. A chart cannot show more points."""
RECENT_SPANS: Final = 6000
"""Number of spans at the end of the run that are kept exactly.

A timeline shows 3,000 bars, and a bar may join spans.
"""
COARSE_SPANS: Final = 1500
"""Limit of `CoarseSpans` for the whole run, which keeps at most twice this number of joined spans.

If there are more combinations of lane and kind, one span of each combination is kept.
"""


class RunFold:
    """The data of a run so far, for summary, report and packed history.

    Its size is at most about 20 MB, and does not depend on the number of records.
    """

    def __init__(self) -> None:
        self.totals = RunTotals()
        self.updates = Thinned[UpdateRecord](MAX_POINTS)
        self.evaluations = Thinned[EvaluationRecord](MAX_POINTS)
        self.recent_spans: deque[SpanRecord] = deque(maxlen=RECENT_SPANS)
        self.coarse_spans = CoarseSpans(COARSE_SPANS)
        self.checkpoint: CheckpointRecord | None = None
        self.export: ExportRecord | None = None
        self.finish: FinishRecord | None = None

    @classmethod
    def of(cls, records: Iterable[RunRecord]) -> Self:
        """Create a fold from all records of a run, in order.

        records: iterated twice, so it must not be an iterator.
        """
        fold = cls()
        for record, repeated in marked(records):
            fold.add(record, repeated=repeated)
        return fold

    def add(self, record: RunRecord, *, repeated: bool = False) -> None:
        """Add the next record.

        repeated: whether a later attempt repeated the update or evaluation. Repeated records do not count.
        """
        self.totals.add(record, repeated=repeated)
        match record:
            case UpdateRecord() if not repeated:
                self.updates.add(record)
            case EvaluationRecord() if not repeated:
                self.evaluations.add(record)
            case SpanRecord():
                self.recent_spans.append(record)
                self.coarse_spans.add(record)
            case CheckpointRecord():
                self.checkpoint = record
            case ExportRecord():
                self.export = record
            case FinishRecord():
                self.finish = record

    @property
    def records(self) -> list[RunRecord]:
        """The kept records: updates, evaluations, the newest checkpoint, export and finish, and the last spans."""
        newest = [record for record in (self.checkpoint, self.export, self.finish) if record is not None]
        return [*self.updates.values, *self.evaluations.values, *newest, *self.recent_spans]
