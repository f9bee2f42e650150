"""A metrics sink that writes TensorBoard event files, without importing torch."""

import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from qwen35_trainer.progress.records import CheckpointRecord, EvaluationRecord, RunRecord, UpdateRecord
from qwen35_trainer.progress.sinks.scalars import scalars


class TensorBoardSink:
    """Writes scalars by update, and a histogram of the trained tokens by lag, to `folder`.

    A resumed attempt adds a file; TensorBoard reads all files of the folder as one run.
    """

    def __init__(self, folder: Path) -> None:
        self._writer = EventFileWriter(str(folder))

    def write(self, record: RunRecord) -> None:
        if not isinstance(record, UpdateRecord | EvaluationRecord | CheckpointRecord):
            return
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars(record).items()]
        if isinstance(record, UpdateRecord) and record.lag_histogram:
            values.append(Summary.Value(tag="staleness/lag", histo=_histogram(record.lag_histogram)))
        self._writer.add_event(Event(wall_time=time.time(), step=record.update, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _histogram(counts: Mapping[int, int]) -> HistogramProto:
    """Return a histogram with one bucket per lag, from half a version below the lag to half a version above it."""
    lags = range(min(counts), max(counts) + 1)
    return HistogramProto(
        min=min(counts),
        max=max(counts),
        num=sum(counts.values()),
        sum=sum(lag * count for lag, count in counts.items()),
        sum_squares=sum(lag * lag * count for lag, count in counts.items()),
        # A bucket is defined by its right edge. The first bucket is empty and only marks the start of the second.
        bucket_limit=[lags.start - 0.5, *(lag + 0.5 for lag in lags)],
        bucket=[0, *(counts.get(lag, 0) for lag in lags)],
    )
