"""Folds the records of a run one by one, in bounded memory, to what summary, report and packed history need.

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
"""Updates and evaluations that are kept. A chart cannot show more points."""
RECENT_SPANS: Final = 6000
"""The last spans of a run, which are kept as they are. A timeline shows 3,000 bars; some of these are joined to one."""
COARSE_SPANS: Final = 1500
"""Half of the maximum number of spans that are kept of the whole run; with more lanes, one per lane and kind."""


class RunFold:
    """A run so far. Its size does not depend on the number of records: about 20 MB at most."""

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
        """Fold all records of a run, in order. records: iterated twice, so not an iterator."""
        fold = cls()
        for record, repeated in marked(records):
            fold.add(record, repeated=repeated)
        return fold

    def add(self, record: RunRecord, *, repeated: bool = False) -> None:
        """Add the next record. repeated: a later attempt repeated this update or evaluation, so it does not count."""
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
        """The records that are kept, by kind: updates, evaluations, the newest checkpoint, export and end, and the last spans."""
        newest = [record for record in (self.checkpoint, self.export, self.finish) if record is not None]
        return [*self.updates.values, *self.evaluations.values, *newest, *self.recent_spans]
