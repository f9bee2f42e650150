"""`qwen35 report RUN`."""

import resource
import shutil

import pytest
from typer.testing import CliRunner

from qwen35_trainer.commands import app
from qwen35_trainer.exits import REFUSED
from qwen35_trainer.manifest import dump_manifest, load_manifest
from qwen35_trainer.progress.records import FinishRecord, RunRecord, UpdateRecord, to_line

UPDATE = UpdateRecord(
    update=1, updates_total=9, version=0, time=2.0, prompts=4, samples=16, tokens=9, loss=0.5, gradient_norm=1.0,
    learning_rate=1e-3, seconds=1.0, reward_mean=0.25,
)  # fmt: skip


@pytest.fixture
def folder(write, tmp_path):
    """The folder of a run that still runs."""
    root = tmp_path / "run"
    root.mkdir()
    (root / "run.yaml").write_text(dump_manifest(load_manifest(write(tmp_path))))
    record(root, UPDATE)
    return root


def record(root, *records: RunRecord) -> None:
    with (root / "metrics.jsonl").open("a") as file:
        file.writelines(f"{to_line(each)}\n" for each in records)


def told(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["report", *map(str, arguments)])
    return done.exit_code, done.output


def test_a_run_has_a_report_while_it_runs_and_when_it_is_over(folder, tmp_path):
    assert told(folder) == (0, f"Report: {folder / 'report.html'} (so far, 1 update)\n")
    assert "Not finished" in (folder / "report.html").read_text()
    (folder / "summary.json").write_text('{"peakRssMiB": 512.5}')
    record(folder, FinishRecord(outcome="Succeeded", message="", time=3.0))
    elsewhere = tmp_path / "elsewhere.html"
    assert told(folder, "--output", elsewhere) == (0, f"Report: {elsewhere} (Succeeded, 1 update)\n")
    assert "<th>peakRssMiB</th><td>512.5</td>" in elsewhere.read_text()


def test_a_folder_without_a_slash_in_its_name_is_a_run_too(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    assert told("run") == (0, "Report: run/report.html (so far, 1 update)\n")


def test_with_the_name_of_a_namespace_a_training_of_the_cluster_is_meant(folder, monkeypatch, tmp_path):
    monkeypatch.chdir(folder.parent)
    code, output = told("run", "--kubeconfig", tmp_path / "nowhere")
    assert (code, output.startswith("no kubeconfig: ")) == (REFUSED, True)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (shutil.rmtree, "is not the folder of a run: it does not exist. Name one, or a training"),
        (lambda root: (root / "run.yaml").unlink(), "is not the folder of a run: it has no run.yaml"),
        (lambda root: (root / "run.yaml").write_text("kind: Pod"), "run.yaml: "),
        (lambda root: (root / "metrics.jsonl").unlink(), "no such metrics file"),
        (lambda root: (root / "metrics.jsonl").write_text("?\n"), "metrics.jsonl, line 1: not JSON"),
        (lambda root: (root / "report.html").mkdir(), "report.html"),
    ],
)
def test_what_cannot_be_drawn_says_why(folder, spoil, why):
    spoil(folder)
    code, output = told(folder)
    assert code == REFUSED
    assert why in output


def test_a_report_for_which_there_is_no_space_names_its_file(folder):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        code, output = told(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (code, output) == (REFUSED, f"[Errno 27] File too large: '{folder / 'report.html'}'\n")
    assert [path.name for path in folder.iterdir() if "report" in path.name] == []
