"""Models that leave a run while it trains or at its end: which, where, how many are kept, and what one that fails costs."""

import asyncio
import errno
import signal
import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qwen35_trainer.atomic_files import FolderWriter
from qwen35_trainer.data.tokenizer import character_tokenizer
from qwen35_trainer.engines.fsdp.saved_weights import SavedWeights
from qwen35_trainer.epoch import Owner, Superseded, read_owner, take
from qwen35_trainer.progress.records import CheckpointRecord, ExportRecord
from qwen35_trainer.runtime import exporting
from qwen35_trainer.runtime.export_command import ExportRefused, export
from qwen35_trainer.runtime.exporting import Exports
from tests.models import published
from tests.patience import PATIENCE

EVERY = {"train.updates": 12, "checkpoint": {"everyUpdates": 1, "keep": 2, "export": "EveryCheckpoint"}}


@pytest.fixture
def exporter(monkeypatch, tmp_path):
    """exporter("exit 1"): a shell script in the place of `qwen35 export`, with CHECKPOINT and OUTPUT set."""

    def write(script: str) -> None:
        file = tmp_path / "exporter.sh"
        file.write_text(f"CHECKPOINT=$1 OUTPUT=$3\n{script}\n")
        monkeypatch.setattr(exporting, "EXPORT_COMMAND", ("sh", str(file)))

    return write


def exports(seconds: float = 60.0) -> Exports:
    return Exports(asyncio.Event(), seconds)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.usefixtures("forked_export")
def test_at_its_end_a_run_writes_its_model_as_transformers_loads_it(local, write, tmp_path):
    changes = {"train.updates": 2, "checkpoint": {"everyUpdates": 1, "keep": 2, "export": "AtEnd"}}
    ended = local.run(write(tmp_path, changes))
    assert ended.code == 0, ended.err
    [exported] = ended.of(ExportRecord)
    folder = ended.folder / "checkpoints" / "exports" / "update-000002"
    assert (exported.update, exported.path, exported.problem) == (2, str(folder), "")
    assert names(folder.parent) == ["update-000002"]
    assert (ended.summary["export"], ended.summary["exportProblem"]) == (str(folder), "")
    assert f"Model:  {folder}" in ended.out
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.vocab_size == len(tokenizer)
    saved = SavedWeights(ended.folder / "checkpoints" / "update-000002")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, saved.read(name)), name
    with pytest.raises(ExportRefused, match=r"--source .*: the run started from random weights"):
        export(ended.folder, tmp_path / "again", source=folder)


@pytest.mark.usefixtures("forked_export")
def test_a_published_model_with_a_vision_tower_learns_from_text_and_leaves_with_the_tower_as_it_was(
    local, write, tmp_path
):
    published.write(tmp_path / "model", "0.8B, tied")
    tokenizer = character_tokenizer("0123456789>=")
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(tmp_path / "model")
    changes = {
        "mode": "FullyAsync",
        "model": {"name": "qwen", "precision": "BF16", "source": {"path": "model"}},
        "train.updates": 2,
        "train.optimizer": {"learningRate": 1e-2, "weightDecay": 0.5},
        "checkpoint": {"everyUpdates": 1, "keep": 2, "export": "AtEnd"},
    }
    ended = local.run(
        write(tmp_path, changes, reward="def score(prompt, response, answer, metadata): return len(set(response))")
    )
    assert ended.code == 0, ended.err
    [exported] = ended.of(ExportRecord)
    before, after = published.tensors_of(tmp_path / "model"), published.tensors_of(Path(exported.path))
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    still = {name for name in before if name.startswith(("model.visual.", "mtp."))}
    assert still <= same
    assert len(same - still) < 0.1 * len(before)


def test_every_checkpoint_is_written_and_as_many_are_kept_as_checkpoints(local, write, tmp_path, exporter):
    exporter('mkdir -p "$OUTPUT"')
    ended = local.run(write(tmp_path, EVERY))
    assert ended.code == 0, ended.err
    saved = [record.update for record in ended.of(CheckpointRecord)]
    assert [record.update for record in ended.of(ExportRecord)] == saved
    kept = [f"update-{update:06d}" for update in saved[-2:]]
    assert len(saved) > len(kept)
    assert names(ended.folder / "checkpoints" / "exports") == kept
    assert names(ended.folder / "checkpoints") == ["exports", "owner.json", *kept]


def test_an_export_that_fails_says_why_and_how_to_try_again_and_the_run_has_succeeded(local, write, tmp_path, exporter):
    exporter('echo "$(basename $OUTPUT) was not written: no space" >&2; exit 1')
    ended = local.run(write(tmp_path, EVERY))
    assert ended.code == 0
    last = ended.folder / "checkpoints" / "update-000012"
    problem = f"{last.name} was not written: no space"
    assert (ended.summary["outcome"], ended.summary["export"]) == ("Succeeded", None)
    assert ended.summary["exportProblem"] == problem
    assert f"Not exported: {problem}\nTry again with: qwen35 export {last} --output DIR" in ended.out


def test_a_run_that_is_ordered_to_stop_does_not_wait_for_an_export(local, write, tmp_path, exporter):
    partial_folders = '"$(dirname $OUTPUT)/.$(basename $OUTPUT).x.partial" $TMPDIR/qwen35-export-y'
    exporter(f"mkdir {partial_folders}; touch {tmp_path / 'begun'}; exec sleep 3600")
    running = local.start("run", write(tmp_path, EVERY), output=tmp_path / "out")
    running.wait_until((tmp_path / "begun").exists, "export")
    running.signal(signal.SIGTERM)
    ended = running.end()
    assert ended.code == 0, ended.err
    assert {record.problem for record in ended.of(ExportRecord)} == {"the run received a request to stop"}
    assert "Not exported: the run received a request to stop" in ended.out
    assert ended.of(CheckpointRecord)
    leftovers = [path.name for path in (ended.folder / "checkpoints").glob("**/*x.partial")]
    assert (leftovers, (ended.folder / "checkpoints" / "exports").exists()) == ([], False), "what the killed one left"


async def test_an_export_that_takes_too_long_is_ended(tmp_path, exporter):
    exporter("exec sleep 3600")
    folder, problem = await exports(0.1).export(tmp_path / "update-000001", 1, FolderWriter(tmp_path))
    assert problem == "it took more than spec.async.stallSeconds 0.1 s"
    assert not folder.exists()


DISK_FULL = OSError(errno.ENOSPC, "No space left on device", "/storage")


@pytest.mark.parametrize("step", ["place", "replace"])
async def test_an_export_that_the_disk_refuses_is_a_problem_and_no_error(tmp_path, monkeypatch, exporter, step):
    def refuse(*_: object) -> None:
        raise DISK_FULL

    exporter('mkdir "$OUTPUT"')
    monkeypatch.setattr(FolderWriter, step, refuse)
    folder, problem = await exports().export(tmp_path / "update-000001", 1, FolderWriter(tmp_path))
    assert problem == "No space left on device (/storage)"
    assert not folder.exists()


async def test_an_export_whose_process_cannot_start_is_a_problem_and_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "EXPORT_COMMAND", (str(tmp_path / "missing"),))
    _, problem = await exports().export(tmp_path / "update-000001", 1, FolderWriter(tmp_path))
    assert problem == f"No such file or directory ({tmp_path / 'missing'})"


async def test_an_export_whose_disk_does_not_answer_is_a_problem_and_no_error(tmp_path, monkeypatch):
    answers = threading.Event()
    monkeypatch.setattr(FolderWriter, "place", lambda *_: answers.wait(PATIENCE))
    _, problem = await exports(0.1).export(tmp_path / "update-000001", 1, FolderWriter(tmp_path))
    assert problem == f"{tmp_path / 'exports'} did not answer within spec.async.stallSeconds 0.1 s"
    answers.set()


async def test_an_export_that_is_published_too_late_is_published_whole(tmp_path, monkeypatch):
    answers, published = threading.Event(), threading.Event()
    replace = FolderWriter.replace

    def write(output: Path) -> str:
        output.mkdir()
        (output / "weights").touch()
        return ""

    async def run(_: Exports, checkpoint: Path, output: Path) -> str:
        return write(output)

    def late(writer: FolderWriter, made: Path, path: Path) -> None:
        answers.wait(PATIENCE)
        replace(writer, made, path)
        published.set()

    monkeypatch.setattr(Exports, "_run", run)
    monkeypatch.setattr(FolderWriter, "replace", late)
    folder, problem = await exports(1.0).export(tmp_path / "update-000001", 1, FolderWriter(tmp_path))
    assert problem.endswith("did not answer within spec.async.stallSeconds 1 s")
    answers.set()
    assert await asyncio.to_thread(published.wait, PATIENCE)
    assert [path.name for path in folder.iterdir()] == ["weights"]


async def test_an_export_into_a_folder_that_another_attempt_owns_ends_the_run(tmp_path):
    def owner(name: str) -> Owner:
        return Owner("run", name, "host", "/run")

    old = take(tmp_path, owner("old"), None)
    take(tmp_path, owner("new"), read_owner(tmp_path))
    with pytest.raises(Superseded):
        await exports().export(tmp_path / "update-000001", 1, old)


async def test_exports_of_an_attempt_that_was_resumed_from_earlier_go(tmp_path, exporter):
    exporter('mkdir "$OUTPUT"')
    for name in ("update-000020", "update-000030", "update-000060", "update-1000000", "update-none", "mine"):
        (tmp_path / "exports" / name).mkdir(parents=True)
    (tmp_path / "exports" / "update-000040").mkdir()
    (tmp_path / "exports" / "update-000040" / "old").touch()
    folder, problem = await exports().export(tmp_path / "update-000040", 2, FolderWriter(tmp_path))
    assert problem == ""
    assert names(tmp_path / "exports") == ["mine", "update-000030", "update-000040"]
    assert not any(folder.iterdir())
