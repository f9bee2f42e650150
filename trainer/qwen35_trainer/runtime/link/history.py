"""What the run has recorded so far, kept for whoever asks after its pods are gone."""

import logging
import threading
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from qwen35_trainer.progress import history
from qwen35_trainer.progress.records import Record, SpanRecord
from qwen35_trainer.progress.samples import Moment, newest, read_samples
from qwen35_trainer.progress.summary import summarise

logger = logging.getLogger(__name__)


class Kept:
    """Records of one run: added by one thread, packed by another."""

    def __init__(
        self, manifest: str, max_version_lag: int | None, samples: Path, earlier: Iterable[Record] = ()
    ) -> None:
        """manifest: the resolved one, as YAML. max_version_lag: its bound, None in SFT. samples: the file of sampled
        responses. earlier: records of attempts before.
        """
        self._manifest, self._bound, self._samples = manifest, max_version_lag, samples
        self._lock = threading.Lock()
        self._records: list[Record] = list(earlier)
        self._spans: deque[SpanRecord] = deque(maxlen=history.SPANS)

    def add(self, record: Record) -> None:
        with self._lock:
            if isinstance(record, SpanRecord):
                self._spans.append(record)
            else:
                self._records.append(record)

    def packed(self) -> bytes:
        """The history so far, see `progress.history`."""
        with self._lock:
            records = [*self._records, *self._spans]
        summary = summarise(records, max_version_lag=self._bound, peak_rss_mib=None)
        return history.pack(self._manifest, summary, records, samples=self._newest_samples())

    def _newest_samples(self) -> list[Moment]:
        try:
            return newest(read_samples(self._samples))
        except (OSError, ValueError) as error:
            logger.warning("the report in the cluster has no responses: %s", error)
            return []
