"""A run of 300,000 updates with losses, other sizes of the pool, a lane, evaluations and checkpoints, in virtual time.

`make test` plays 1,500 updates of it, `make soak` all. An update takes 3.5 ms of one core on a machine with nothing else to do, of
which the driver's real parts take two thirds. The whole month took 1,119 s of one core while other programs ran.
"""

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from qwen35_trainer.pipeline.journal import recover
from qwen35_trainer.progress import span_budget
from qwen35_trainer.progress.records import SpanRecord, line_start
from qwen35_trainer.runtime import journal_file, measurements, train_session
from tests.pipeline.driver_month import DriverMonth, VirtualTime
from tests.pipeline.month import LANES, PROMPTS, REPLICAS, UPDATES_PER_EVALUATION, UPDATES_PER_LOSS, Month
from tests.profiles import SOAK

MONTH = 300_000
UPDATES = MONTH if SOAK else 1_500
MAX_JOURNAL_BYTES = 100_000
"""About twice what is recorded between two checkpoints."""
MAX_SPAN_LINES, MAX_SPAN_BYTES = 360_000 * UPDATES // MONTH, 60_000_000 * UPDATES // MONTH
MAX_RECORD_BYTES = 1_500
MAX_GROWTH = 1.2


async def done_at_once[T](seconds: float | None, work: Callable[[], T]) -> T:
    """In place of a thread for each write, which would take a fifth of the time."""
    return work()


@pytest.fixture
def month(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DriverMonth]:
    """Writes of the journal do not wait for the disk: what is durable is tested in `runtime/test_journal_file.py`."""
    clock = VirtualTime()
    monkeypatch.setattr(train_session, "time", clock)
    monkeypatch.setattr(measurements, "time", clock)
    monkeypatch.setattr(journal_file, "done_within", done_at_once)
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(span_budget, "LINES_PER_RESOLUTION", span_budget.LINES_PER_RESOLUTION * UPDATES // MONTH)
    month = DriverMonth(UPDATES, 1, tmp_path, clock)
    yield month
    month.close()


def memory(month: DriverMonth) -> int:
    """Peak of what the driver holds over some updates with the whole pool: it differs from tick to tick."""
    month.resizes = False
    month.resize(REPLICAS)
    month.run(until=month.trained + 50)
    sizes = []
    for _ in range(20):
        month.run(until=month.trained + 5)
        sizes.append(month.driver_bytes)
    month.resizes = True
    return max(sizes)


def resident() -> int:
    """Bytes of memory of this process. Its maximum would be that of an earlier test."""
    gc.collect()
    return psutil.Process().memory_info().rss


def check_files(month: DriverMonth) -> None:
    span, spans, span_bytes, others, other_bytes = line_start(SpanRecord), 0, 0, 0, 0
    with month.metrics.open("rb") as lines:
        for line in lines:
            if line.startswith(span):
                spans, span_bytes = spans + 1, span_bytes + len(line)
            else:
                others, other_bytes = others + 1, other_bytes + len(line)
    assert month.trained <= others <= month.trained + month.evaluations["asked"]
    assert other_bytes <= MAX_RECORD_BYTES * others
    assert 0 < spans <= MAX_SPAN_LINES
    assert span_bytes <= MAX_SPAN_BYTES
    assert month.peak_journal <= MAX_JOURNAL_BYTES


@pytest.mark.timeout(7200)  # a machine with other work to do takes several times as long
def test_a_month_needs_no_more_memory_at_its_end_its_files_are_small_and_every_prompt_has_one_turn(month):
    month.run(until=max(UPDATES // 100, 300))
    early, resident_early = memory(month), resident()
    check_files(month)
    month.run(until=UPDATES - 300)
    late, resident_late = memory(month), resident()
    month.run()
    month.close()
    assert len(month.replicas) <= REPLICAS + LANES
    assert late <= MAX_GROWTH * early
    assert resident_late <= MAX_GROWTH * resident_early
    check_files(month)
    assert month.lost >= UPDATES // UPDATES_PER_LOSS
    check_turns(month)
    expected = UPDATES // UPDATES_PER_EVALUATION
    assert month.evaluations["asked"] == expected
    assert month.evaluations["VersionEvaluated"] + month.evaluations["EvaluationSkipped"] == expected
    assert month.evaluations["VersionEvaluated"] > 0
    assert month.coordinator.running == month.coordinator.waiting == 0
    generation = month.generation
    tables = (generation._groups, generation._sequences, generation._progress, generation._taking)
    assert not any((*tables, generation._losses._losses)), "nothing is kept of groups that have left"


def check_turns(month: Month) -> None:
    """Every prompt up to the last position has trained, failed or left without a signal once, or comes after a resume."""
    end = month.coordinator.snapshot
    assert end.batch == UPDATES
    pending = set(end.pending)
    assert all(turns == (position not in pending) for position, turns in enumerate(month.turns)), "one turn each"
    assert len(month.turns) >= UPDATES * PROMPTS
    assert recover(month.journal, UPDATES) == end
