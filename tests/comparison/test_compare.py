"""`qwen35 compare`, on runs that an earlier release recorded and on runs with given records."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from qwen35_trainer.commands import app
from qwen35_trainer.progress.records import EvaluationRecord, FinishRecord, RunRecord, SpanRecord
from tests.progress.conftest import make_update

from .conftest import MakeRun


def compared(*arguments: object) -> Any:
    result = CliRunner().invoke(app, ["compare", *map(str, arguments)], env={"COLUMNS": "80"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def figures(*runs: Path) -> dict[str, Any]:
    result = compared(*runs, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    return json.loads(result.stdout)


def updates(count: int, first: int = 1, **changes: object) -> list[RunRecord]:
    return [make_update(number, reward_mean=float(number), **changes) for number in range(first, first + count)]


def held_out(update: int, accuracy: float, time: float) -> EvaluationRecord:
    return EvaluationRecord(
        update=update, version=update, time=time, samples=8, accuracy=accuracy, reward_mean=accuracy
    )


def test_recorded_runs_of_an_earlier_release_are_compared(recorded: list[Path]) -> None:
    comparison = figures(*recorded)
    assert comparison["runs"] == ["finished", "running"]
    assert comparison["settings"] == {"checkpoint.export": ["AtEnd", "None"]}
    progress, failures = comparison["figures"]["progress"], comparison["figures"]["failures"]
    assert progress["outcome"] == ["Succeeded", "not finished"]
    assert progress["updates"] == ["6 of 6", "6 of 1,000"]
    assert (failures["restarts"], failures["updates trained again"]) == ([0, 2], [0, 2])
    assert "replicas lost" not in failures, "that release did not record them"
    time = comparison["figures"]["updateTime"]
    assert time["not divided"][0] > 0, "nor every part of the time"
    for place in range(2):
        assert sum(row[place] for name, row in time.items() if name != "together") == pytest.approx(
            time["together"][place]
        )
    assert len(comparison["figures"]["byUpdate"]) == 4
    assert comparison["notes"] == []


def test_the_table_shows_values_with_their_ratio_to_the_first_run(recorded: list[Path]) -> None:
    lines = [" ".join(line.split()) for line in compared(*recorded).stdout.splitlines()]
    assert lines[1] == "settings that differ finished running"
    assert "checkpoint.export AtEnd None" in lines
    assert "training 175 ms 272 ms ×1.55" in lines
    assert "trained tokens 564 565" in lines, "no ratio of values that hardly differ"


def test_only_settings_that_differ_are_listed_each_with_its_path(make_run: MakeRun) -> None:
    rewards = [{"type": "Gym"}, {"type": "Gym", "name": "again", "weight": 0.5}]
    changes = {"train.nodes": 2, "rewards": rewards, "train.freeze": ["Router"], "rollout.minP": 0.1}
    comparison = figures(make_run("a", updates(2)), make_run("b", updates(2), changes), make_run("c", updates(2)))
    assert comparison["settings"].pop("train.nodes") == ["1", "2", "1"]
    assert comparison["settings"].pop("train.freeze") == ["not set", '["Router"]', "not set"]
    assert comparison["settings"].pop("rollout.minP")[1] == "0.1"
    assert comparison["settings"].pop("rewards[1].weight") == ["not set", "0.5", "not set"]
    assert all(path.startswith("rewards[1].") for path in comparison["settings"])


def test_equal_settings_are_stated(make_run: MakeRun) -> None:
    assert "The runs have equal settings." in compared(make_run("a", updates(2)), make_run("b", updates(2))).stdout


def test_runs_of_different_length_are_compared_as_far_as_all_have_trained(make_run: MakeRun) -> None:
    slow = [
        make_update(number, reward_mean=float(number), time=10.0 + 8.0 * number, seconds=8.0) for number in (1, 2, 3)
    ]
    comparison = figures(make_run("long", updates(12)), make_run("slow", slow))["figures"]
    assert comparison["byUpdate"] == {f"reward, update {number}": [number, number] for number in (1, 2, 3)}
    # From 10 s to 34 s, of which each part is 6 s: updates of 2 s and of 8 s.
    assert comparison["byTime"] == {
        "reward, 10 s to 16 s": [2.0, None],
        "reward, 16 s to 22 s": [5.0, 1.0],
        "reward, 22 s to 28 s": [8.0, 2.0],
        "reward, 28 s to 34 s": [11.0, 3.0],
    }


def test_the_beginning_of_a_much_longer_run_is_compared_exactly(make_run: MakeRun) -> None:
    """Of 4,100 updates, the charts keep every fourth."""
    folder = make_run(
        "long", [*updates(50), SpanRecord(lane="train-0", kind="load", start=0.0, end=1.0), *updates(4090, 11)]
    )
    comparison = figures(make_run("short", updates(3)), folder)
    assert comparison["figures"]["byUpdate"]["reward, update 2"] == [2.0, 2.0]
    assert comparison["figures"]["failures"]["updates trained again"] == [0, 40]
    assert [note for note in comparison["notes"] if "of the 4,100 updates of long" in note]


def test_held_out_accuracy_is_compared_by_update_by_time_and_until_a_common_target(make_run: MakeRun) -> None:
    fast = [held_out(0, 0.1, 9.0), *updates(4), held_out(2, 0.4, 15.0), held_out(4, 0.9, 18.5), *updates(4, 5)]
    slow = [held_out(0, 0.1, 9.0), *updates(4), held_out(1, 0.2, 13.0), held_out(4, 0.3, 18.5), *updates(4, 5)]
    comparison = figures(make_run("fast", fast), make_run("slow", slow))["figures"]
    assert comparison["byUpdate"]["held-out accuracy after 0"] == [0.1, 0.1]
    assert comparison["byUpdate"]["held-out accuracy after 4"] == [0.9, 0.3]
    assert comparison["byTime"]["held-out accuracy at 18 s"] == [0.4, 0.2]
    assert comparison["target"] == {
        "until held-out accuracy 30%: updates": [2, 4],
        "until held-out accuracy 30%: time": [15.0, 18.5],
    }


def test_publications_pauses_losses_and_restarts_are_counted(make_run: MakeRun) -> None:
    def loads(count: int) -> list[RunRecord]:
        return [SpanRecord(lane="train-0", kind="load", start=0.0, end=1.0)] * count

    calm = [*loads(1), *updates(2, seconds_publishing=0.5, seconds_copying=0.25, replicas_lost=0)]
    failed = FinishRecord(outcome="Failed", message="", time=20.0)
    stormy = [
        *loads(3),
        make_update(1, seconds_publishing=1.0, replicas_lost=2),
        failed,
        make_update(1),
        make_update(2),
    ]
    comparison = figures(make_run("calm", calm), make_run("stormy", stormy))["figures"]
    assert comparison["publication"]["until all replicas have a version"] == [0.5, pytest.approx((1.0 + 0.2 + 0.2) / 3)]
    assert comparison["publication"]["the longest"] == [0.5, 1.0]
    assert comparison["publication"]["pause of training"] == [0.25, None]
    failures = comparison["failures"]
    assert {
        name: failures[name] for name in ("restarts", "failed attempts", "updates trained again", "replicas lost")
    } == {
        "restarts": [0, 2],
        "failed attempts": [0, 1],
        "updates trained again": [0, 1],
        "replicas lost": [0, 2],
    }


def test_peak_memory_comes_from_the_summary(make_run: MakeRun) -> None:
    folders = [make_run(name, updates(2)) for name in ("a", "b")]
    (folders[1] / "summary.json").write_text('{"peakRssMiB": 512.5}')
    failures = figures(*folders)["figures"]["failures"]
    assert failures["peak memory of its processes, MiB"] == [None, 512.5]


def test_runs_without_common_updates_are_compared_by_time(make_run: MakeRun) -> None:
    comparison = figures(make_run("a", updates(3)), make_run("b", updates(3, 11)))
    assert comparison["notes"] == [
        "The runs have no common updates (a 1–3, b 11–13), so they are compared by time only."
    ]
    assert "byUpdate" not in comparison["figures"]
    assert comparison["figures"]["progress"]["updates"] == ["3 of 3", "3 of 3"]


def test_a_run_that_has_not_trained_is_compared_without_its_learning(make_run: MakeRun) -> None:
    comparison = figures(make_run("a", updates(3)), make_run("b", []))
    assert comparison["notes"] == ["b has trained no update, so learning is not compared. Compare again when it has."]
    assert "byTime" not in comparison["figures"]
    assert comparison["figures"]["speed"]["trained tokens/s"] == [200.0, None]


def test_a_diverged_loss_has_no_value(make_run: MakeRun) -> None:
    supervised = {
        "mode": "SFT",
        "rollout": None,
        "rewards": [],
        "data.train": [{"name": "t", "files": {"paths": ["t"]}}],
    }
    records: list[RunRecord] = [
        make_update(number, reward_mean=None, loss=float("nan") if number > 1 else 1.5) for number in (1, 2)
    ]
    comparison = figures(make_run("a", records, supervised), make_run("b", records, supervised))
    assert comparison["figures"]["byUpdate"] == {"loss, update 1": [1.5, 1.5]}


def test_runs_in_folders_of_one_name_have_their_paths_as_names(make_run: MakeRun) -> None:
    folders = [make_run(f"{parent}/tiny", updates(1)) for parent in ("a", "b")]
    assert figures(*folders)["runs"] == [str(folder) for folder in folders]


def test_every_problem_of_every_folder_is_reported(make_run: MakeRun, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    unread = make_run("unread", updates(1))
    (unread / "metrics.jsonl").write_text("?\n")
    waiting = make_run("waiting", [])
    (waiting / "metrics.jsonl").unlink()
    wrong = make_run("wrong", updates(1), {"train.nodes": 0})
    result = compared(tmp_path / "absent", tmp_path / "empty", unread, waiting, wrong)
    assert (result.exit_code, result.stdout) == (2, "")
    assert [line for line in result.stderr.splitlines() if not line.startswith(" ")] == [
        f"{tmp_path}/absent is not the folder of a run: it does not exist. Name the folder of a run",
        f"{tmp_path}/empty is not the folder of a run: it has no run.yaml. Name the folder of a run",
        f"{unread}/metrics.jsonl, line 1: not JSON: Expecting value: line 1 column 1 (char 0)",
        f"{waiting}/metrics.jsonl: no such metrics file. Give the folder of a run that has started, or run it first.",
        f"{wrong}/run.yaml: 1 problem",
    ]


def test_one_run_the_same_run_twice_and_too_many_runs_are_refused(make_run: MakeRun) -> None:
    folder = make_run("a", updates(1))
    assert compared(folder).stderr == "RUN: there is one run; name at least one more to compare it with\n"
    assert compared(folder, folder / ".." / "a").stderr == f"RUN {folder}: is named 2 times; name each run once\n"
    assert "compare at most 8 at a time" in compared(*[folder] * 9).stderr


def test_a_page_that_cannot_be_written_is_refused(make_run: MakeRun, tmp_path: Path) -> None:
    folders = [make_run(name, updates(1)) for name in ("a", "b")]
    assert "is a folder; name a file in it" in compared(*folders, "--output", tmp_path).stderr
    missing = compared(*folders, "--output", tmp_path / "none" / "page.html")
    assert missing.exit_code == 2
    assert "page.html: cannot be written: No such file or directory" in missing.stderr
