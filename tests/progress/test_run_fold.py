import tracemalloc
from collections.abc import Iterator

from qwen35_trainer.progress.records import RunRecord, SpanRecord, surviving_updates
from qwen35_trainer.progress.run_fold import MAX_POINTS, RunFold
from qwen35_trainer.progress.summary import summarise, summary_of

from .conftest import make_update


class Long:
    """The records of a long run: an update and three spans each."""

    def __init__(self, updates: int) -> None:
        self.updates = updates

    def __iter__(self) -> Iterator[RunRecord]:
        for number in range(1, self.updates + 1):
            for lane in ("rollout-0", "rollout-1", "train-0"):
                yield SpanRecord(lane=lane, kind="generate", start=2.0 * number, end=2.0 * number + 1.5)
            yield make_update(number, updates_total=self.updates)


def test_a_short_run_is_kept_whole(run: list[RunRecord]) -> None:
    fold = RunFold.of(run)
    assert sorted(map(repr, fold.records)) == sorted(map(repr, run))


def test_a_long_run_takes_no_more_memory_than_a_shorter_one() -> None:
    """Sizes after a number of records at which every part is full, and after twice as many."""
    sizes = []
    tracemalloc.start()
    try:
        for updates in (2500, 5000):
            before = tracemalloc.get_traced_memory()[0]
            fold = RunFold.of(Long(updates))
            sizes.append(tracemalloc.get_traced_memory()[0] - before)
            assert fold.totals.updates == updates
            assert len(fold.updates.values) <= MAX_POINTS + 1
            del fold
    finally:
        tracemalloc.stop()
    assert sizes[1] < 1.3 * sizes[0]
    assert sizes[1] < 20e6


def test_the_summary_of_a_fold_is_that_of_its_records(run: list[RunRecord]) -> None:
    again = [*run[:-1], make_update(3, loss=7.0, tokens=123), *run[-1:]]
    assert summary_of(RunFold.of(again).totals, max_version_lag=2, peak_rss_mib=None) == summarise(
        again, max_version_lag=2, peak_rss_mib=None
    )
    assert RunFold.of(again).updates.values == surviving_updates(again)


def test_an_attempt_that_continues_adds_to_the_fold_of_the_earlier_ones(run: list[RunRecord]) -> None:
    fold = RunFold.of(run[:6])
    for record in run[6:]:
        fold.add(record)
    whole = RunFold.of(run)
    assert fold.records == whole.records
    assert summary_of(fold.totals, max_version_lag=2, peak_rss_mib=None) == summary_of(
        whole.totals, max_version_lag=2, peak_rss_mib=None
    )
