"""A run that fits an object of the cluster, however long it was."""

import gzip
import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen35_trainer.progress import packed_history
from qwen35_trainer.progress.html_report import render_report
from qwen35_trainer.progress.packed_history import HistoryUnreadable, pack, unpack
from qwen35_trainer.progress.records import EvaluationRecord, RunRecord, SpanRecord, UpdateRecord
from qwen35_trainer.progress.run_fold import RunFold
from qwen35_trainer.progress.sample_file import Moment, Sample
from qwen35_trainer.progress.summary import Summary, summarise
from tests.profiles import examples

from .conftest import make_update

MANIFEST = "metadata: {name: demo}\n"


def summary(records: list[RunRecord]) -> Summary:
    return summarise(records, max_version_lag=2, peak_rss_mib=None)


def packed(records: list[RunRecord], **options: int) -> bytes:
    return pack(MANIFEST, summary(records), records, **options)


def long_run(updates: int) -> list[RunRecord]:
    """With an evaluation every tenth update, and numbers that do not compress."""
    records: list[RunRecord] = []
    for number in range(1, updates + 1):
        noise = {name: math.sin(number * place) for place, name in enumerate(("loss", "reward_mean", "entropy"), 1)}
        records.append(make_update(number, **noise))
        if number % 10 == 0:
            records.append(EvaluationRecord(update=number, version=number, time=1.0 * number, samples=8, accuracy=0.5))
    return records


def of[R: RunRecord](records: tuple[RunRecord, ...], kind: type[R]) -> list[R]:
    return [record for record in records if isinstance(record, kind)]


def test_a_short_run_comes_back_whole(run: list[RunRecord]) -> None:
    run = [
        replace(record, reward_mean=round(record.reward_mean or 0, 6)) if isinstance(record, UpdateRecord) else record
        for record in run
    ]
    history = unpack(packed(run))
    assert sorted(history.records, key=repr) == sorted(run, key=repr)
    assert (history.manifest, history.summary, history.left_out) == (MANIFEST, summary(run), 0)


def test_the_report_made_of_it_is_that_of_the_run(run: list[RunRecord]) -> None:
    history = unpack(packed(run))
    assert render_report("x", RunFold.of(history.records), history.manifest, history.summary) == render_report(
        "x", RunFold.of(run), MANIFEST, summary(run)
    )


def test_a_history_of_an_older_trainer_has_a_report(run: list[RunRecord]) -> None:
    """Its summary has fewer keys, and its records have fewer fields."""
    document = json.loads(gzip.decompress(packed(run)))
    for name in ("version", "startedAt", "heldOutScores", "errorsByReward", "firstRewardError"):
        del document["summary"][name]
    for record in document["records"]:
        for name in ("score_by_reward", "errors_by_reward", "first_reward_error", "wall_time", "traceback"):
            record.pop(name, None)
    history = unpack(gzip.compress(json.dumps(document).encode()))
    assert (history.summary["version"], history.summary["errorsByReward"], history.summary["updates"]) == ("", {}, 3)
    assert "3 of" in render_report("x", RunFold.of(history.records), history.manifest, history.summary).replace(
        "</small>", ""
    ).replace("<small>", "")


def test_responses_go_along(run: list[RunRecord]) -> None:
    sample = Sample(prompt_id="s/0", prompt="é", response=((2, "a"), (None, "…"), (0, "b")), tokens=2, reward=None)
    moments = [Moment(kind=kind, update=3, version=2, samples=(sample,)) for kind in ("held out", "trained")]
    assert list(unpack(pack(MANIFEST, summary(run), run, samples=moments)).samples) == moments


def test_the_history_of_an_older_release_lacks_what_it_did_not_know(run: list[RunRecord]) -> None:
    document = json.loads(gzip.decompress(packed(run)))
    del document["summary"]["export"]
    history = unpack(gzip.compress(json.dumps(document).encode()))
    assert history.summary == summary(run)


def test_a_long_run_keeps_its_ends_and_its_numbers_within_the_limit() -> None:
    records = long_run(2000)
    data = packed(records, limit=40_000)
    history = unpack(data)
    kept = [record.update for record in of(history.records, UpdateRecord)]
    assert len(data) <= 40_000
    assert (kept[0], kept[-1]) == (1, 2000)
    assert 100 < len(kept) == 2000 - history.left_out
    assert len(of(history.records, EvaluationRecord)) == 200, "evaluations are rare, and stay longer"
    assert history.summary == summary(records)


def test_no_more_updates_are_kept_than_a_chart_can_show() -> None:
    records: list[RunRecord] = [make_update(number) for number in range(1, 2 * packed_history.MAX_UPDATES + 2)]
    history = unpack(packed(records))
    kept = [record.update for record in of(history.records, UpdateRecord)]
    assert kept == [*range(1, 2 * packed_history.MAX_UPDATES + 2, 4)]
    assert history.summary["updates"] == len(records)


def test_what_is_kept_of_the_beginning_does_not_change_as_the_run_grows() -> None:
    earlier, later = (of(unpack(packed(long_run(n), limit=20_000)).records, UpdateRecord)[:-1] for n in (900, 1000))
    assert {record.update for record in later} <= {record.update for record in earlier} | set(range(901, 1001))


@settings(max_examples=examples(30))
@given(updates=st.integers(0, 300), limit=st.integers(4_000, 20_000))
def test_no_history_is_larger_than_allowed(updates: int, limit: int) -> None:
    assert len(packed(long_run(updates), limit=limit)) <= limit


def test_of_spans_the_latest_stay() -> None:
    spans: list[RunRecord] = [
        SpanRecord(lane="train-0", kind="train", start=float(number), end=number + 0.5) for number in range(3000)
    ]
    history = of(unpack(packed([*long_run(10), *spans])).records, SpanRecord)
    assert len(history) == packed_history.MAX_SPANS
    assert history[-1] == spans[-1]


def test_the_updates_that_a_resumed_attempt_repeated_count_once() -> None:
    history = unpack(packed([make_update(1), make_update(2, loss=7.0), make_update(2, loss=8.0)]))
    assert [record.loss for record in of(history.records, UpdateRecord)] == [-0.01, 8.0]


def test_a_loss_that_is_not_a_number_stays_so() -> None:
    (record,) = unpack(packed([make_update(1, loss=math.nan)])).records
    assert isinstance(record, UpdateRecord)
    assert math.isnan(record.loss)


def test_the_same_run_is_packed_alike() -> None:
    assert packed(long_run(50)) == packed(long_run(50))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "not a history"),
        (b"plain text", "not gzip"),
        (gzip.compress(b"{}" * 1000)[:-20], "not gzip"),
        (gzip.compress(b"{}"), "manifest: Field required"),
        (gzip.compress(b"no JSON"), "Invalid JSON"),
        (gzip.compress(b" " * (packed_history.MAX_UNPACKED_BYTES + 1)), "more than"),
    ],
)
def test_what_is_not_a_history_is_refused_with_the_reason(data: bytes, why: str) -> None:
    with pytest.raises(HistoryUnreadable, match=why):
        unpack(data)


def test_a_record_that_is_none_is_refused() -> None:
    good = gzip.decompress(packed([make_update(1)])).decode()
    with pytest.raises(HistoryUnreadable, match="loss"):
        unpack(gzip.compress(good.replace('"loss":-0.01', '"loss":"?"').encode()))


@given(st.binary(max_size=200))
def test_no_bytes_are_a_crash(data: bytes) -> None:
    with pytest.raises(HistoryUnreadable):
        unpack(data)
