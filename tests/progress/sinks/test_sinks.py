import builtins
import logging
import math
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from qwen35_trainer.manifest.tracking import MLflowSpec, TrackingSpec, WandBSpec
from qwen35_trainer.progress.records import EvaluationRecord, FinishRecord, RunRecord, UpdateRecord
from qwen35_trainer.progress.sinks import open_sinks
from qwen35_trainer.progress.sinks.scalars import scalars
from qwen35_trainer.progress.sinks.service import ServiceSink
from qwen35_trainer.progress.sinks.sink import Sink
from qwen35_trainer.progress.sinks.tensorboard import TensorBoardSink

from ..conftest import make_update


def update_of(run: list[RunRecord]) -> UpdateRecord:
    return next(record for record in run if isinstance(record, UpdateRecord))


def test_scalars_leave_out_what_the_run_does_not_have(supervised_run: list[RunRecord]) -> None:
    names = scalars(supervised_run[0])
    assert names["train/loss"] == 3.0
    assert "train/reward_mean" not in names
    assert "staleness/lag_mean" not in names


def test_every_reward_and_every_source_has_scalars_of_its_own() -> None:
    named = {
        "score_by_reward": {"digit": 0.5, "brevity": 0.25}, "reward_by_source": {"easy": 0.75},
        "errors_by_reward": {"digit": 2}, "timeouts_by_reward": {"brevity": 3},
    }  # fmt: skip
    evaluation = EvaluationRecord(update=1, version=1, time=1.0, samples=4, score_by_reward={"digit": 0.125})
    wanted = {"score_by_reward/digit": 0.5, "score_by_reward/brevity": 0.25, "reward_by_source/easy": 0.75}
    wanted |= {"errors_by_reward/digit": 2.0, "timeouts_by_reward/brevity": 3.0}
    values = scalars(make_update(1, **named))
    assert {name: values[f"train/{name}"] for name in wanted} == wanted
    assert scalars(evaluation) == {"evaluation/score_by_reward/digit": 0.125}


def test_tensorboard_reads_back_what_was_written(tmp_path: Path, run: list[RunRecord]) -> None:
    sink = TensorBoardSink(tmp_path)
    for record in run:
        sink.write(record)
    sink.close()
    events = EventAccumulator(str(tmp_path), {"histograms": 0, "scalars": 0}).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/reward_mean")] == [
        (n, pytest.approx(0.2 * n)) for n in (1, 2, 3)
    ]
    assert [(e.step, e.value) for e in events.Scalars("evaluation/accuracy")] == [(0, 0.125), (3, 0.75)]
    assert [e.value for e in events.Scalars("rollout/idle")] == pytest.approx([0.1, 0.1, 0.3])
    lag = events.Histograms("staleness/lag")[1].histogram_value
    assert (lag.min, lag.max, lag.num, lag.sum) == (1, 2, 400, 500)
    assert list(zip(lag.bucket_limit, lag.bucket, strict=True)) == [(0.5, 0), (1.5, 300), (2.5, 100)]


class Failing:
    """A service that refuses every record from the second on."""

    def __init__(self) -> None:
        self.taken: list[RunRecord] = []
        self.closed = threading.Event()

    def write(self, record: RunRecord) -> None:
        if self.taken:
            raise ConnectionError("service went away")
        self.taken.append(record)

    def close(self) -> None:
        self.closed.set()


def test_a_service_that_fails_is_warned_of_once_and_counted(
    caplog: pytest.LogCaptureFixture, run: list[RunRecord]
) -> None:
    service = Failing()
    sink = ServiceSink("Service", lambda: service, (OSError,))
    for record in run:
        sink.write(record)
    sink.close()
    assert service.closed.is_set()
    assert len(service.taken) == 1
    assert sink.lost == 6  # 3 spans are never sent, 1 record was taken
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert "ConnectionError: service went away. Training continues" in caplog.messages[0]
    assert "6 records were not delivered" in caplog.messages[1]


def test_a_service_that_cannot_be_opened_is_tried_again(run: list[RunRecord]) -> None:
    service = Failing()
    tries = []

    def open_sink() -> Sink:
        tries.append(None)
        if len(tries) == 1:
            raise ConnectionError("not yet")
        return service

    sink = ServiceSink("Service", open_sink, (OSError,))
    sink.write(run[0])
    sink.write(run[1])
    sink.close()
    assert service.taken == [run[1]]
    assert sink.lost == 1


def test_a_service_that_hangs_does_not_hold_up_the_run(caplog: pytest.LogCaptureFixture, run: list[RunRecord]) -> None:
    release = threading.Event()

    class Hanging(Failing):
        def write(self, record: RunRecord) -> None:
            release.wait()

    sink = ServiceSink("Service", Hanging, (OSError,), close_seconds=0.05)
    for _ in range(2000):
        sink.write(run[0])
    sink.close()
    assert sink.lost > 900
    assert "slower than the run" in caplog.messages[0]
    release.set()


def sinks_of(tracking: TrackingSpec, folder: Path) -> list[Sink]:
    return open_sinks(tracking, folder=folder, name="arithmetic", run_id="run-1", config={"train": {"nodes": 2}})


def write_all(sinks: list[Sink], records: list[RunRecord]) -> None:
    for sink in sinks:
        for record in records:
            sink.write(record)
        sink.close()


def test_tensorboard_is_the_default(tmp_path: Path, run: list[RunRecord]) -> None:
    write_all(sinks_of(TrackingSpec(), tmp_path), run)
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))
    assert sinks_of(TrackingSpec(tensorboard=False), tmp_path) == []


def test_wandb_works_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: list[RunRecord], eventually: Callable[..., None]
) -> None:
    pytest.importorskip("wandb", reason="the extra qwen35[wandb] is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    sinks = sinks_of(TrackingSpec(tensorboard=False, wandb=WandBSpec(project="tests")), tmp_path)
    write_all(sinks, run)
    assert [sink.lost for sink in sinks if isinstance(sink, ServiceSink)] == [0]
    [log] = tmp_path.glob("wandb/offline-run-*/run-run-1.wandb")
    # Its writer is another process.
    eventually(lambda: b"staleness/lag_mean" in log.read_bytes(), "the record is in the log")


def test_mlflow_attempts_continue_in_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: list[RunRecord]
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="the extra qwen35[mlflow] is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    tracking = TrackingSpec(tensorboard=False, mlflow=MLflowSpec(trackingUri=uri, experiment="tests"))
    diverged = run[1].__class__(**{name: getattr(run[1], name) for name in run[1].__slots__} | {"loss": math.nan})
    write_all(sinks_of(tracking, tmp_path), [diverged])
    write_all(sinks_of(tracking, tmp_path), run)
    client: Any = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("tests")
    [tracked_run] = client.search_runs([experiment.experiment_id])
    assert tracked_run.info.status == "FINISHED"
    assert tracked_run.data.params == {"train.nodes": "2"}
    assert tracked_run.data.metrics["evaluation/accuracy"] == 0.75
    history = client.get_metric_history(tracked_run.info.run_id, "train/reward_mean")
    assert sorted(point.step for point in history) == [1, 1, 2, 3]


@pytest.mark.parametrize(
    ("package", "tracking"),
    [
        ("wandb", TrackingSpec(wandb=WandBSpec(project="tests"))),
        ("mlflow", TrackingSpec(mlflow=MLflowSpec(trackingUri="file:.", experiment="tests"))),
    ],
)
def test_a_missing_package_is_an_error_naming_field_and_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, tracking: TrackingSpec
) -> None:
    monkeypatch.delitem(sys.modules, f"qwen35_trainer.progress.sinks.{package}", raising=False)
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModuleNotFoundError, match=rf"spec\.tracking\.{package}: .*pip install 'qwen35\[{package}\]'"):
        sinks_of(tracking, tmp_path)


def test_the_end_of_a_failed_run_has_no_scalars() -> None:
    assert scalars(FinishRecord(outcome="Failed", message="", time=1.0)) == {}
