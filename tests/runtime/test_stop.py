"""Stopping, and continuing: the story of one run in three attempts, and of two that are cut short."""

import asyncio
import contextlib
import re
import shutil
import signal
import threading
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from qwen35_trainer.data.prompt_set import PromptOrder
from qwen35_trainer.epoch import FolderRefused
from qwen35_trainer.pipeline.journal import recover
from qwen35_trainer.progress.records import (
    CheckpointRecord,
    EvaluationRecord,
    FinishRecord,
    UpdateRecord,
    surviving_updates,
)
from qwen35_trainer.runtime.checkpoint_store import CheckpointStore
from qwen35_trainer.runtime.folder import RunFolder
from qwen35_trainer.runtime.results import NOTHING_SAVED
from qwen35_trainer.weights.publication_folder import latest
from qwen35_trainer.weights.transports import receiver
from tests.patience import PATIENCE

from .threads import Fault

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPTS, PER_UPDATE, GROUP = 64, 4, 4
LOGGED = """
import time
from pathlib import Path

def score(prompt, response, answer, metadata):
    time.sleep(0.01)  # long enough to be interrupted
    while Path(__file__).with_name("hold").exists():
        time.sleep(0.05)
    with Path(__file__).with_name("scores.txt").open("a") as scores:
        scores.write(prompt + "\\n")
    return float(response[:1] == answer)
"""
HANGING = """
import asyncio

async def score(prompt, response, answer, metadata):
    if len(prompt) == 7:  # a validation prompt
        await asyncio.sleep(3600)
    return 1.0
"""

HOLDING = """
import threading
import time
from pathlib import Path

from qwen35_trainer.engines.fsdp.engine import FSDPEngine

save, saved, saves = FSDPEngine.save, FSDPEngine.saved, []

def counted(engine, folder):
    save(engine, folder)
    saves.append(folder)

def held(engine, *, wait=False):
    if len(saves) == 2:
        threading.Event().wait()  # the second save never ends
    return saved(engine, wait=wait)

def loss(inputs):
    until = time.monotonic() + 60
    while len(saves) == 1 and saves[0].exists():  # a save that is due during another one begins later
        assert time.monotonic() < until, f"{saves[0]} was not completed"
        time.sleep(0.01)
    if len(saves) == 2:
        Path(__file__).with_name("trained-meanwhile").touch()
    return -inputs.advantages * inputs.log_probs

if Path(__file__).with_name("hold-save").exists():
    FSDPEngine.save, FSDPEngine.saved = counted, held
"""


def _trained(progress) -> set[int]:
    return set(range(progress["position"])) - set(progress["pending"])


@pytest.fixture(scope="module")
def story(command, local, write, tmp_path_factory) -> SimpleNamespace:
    """All prompts of one epoch, in three attempts: Ctrl-C, SIGTERM while the model loads, and to the end."""
    folder = tmp_path_factory.mktemp("story")
    changes = {"train.updates": PROMPTS // PER_UPDATE, "checkpoint": {"everyUpdates": 4, "keep": 2}}
    file = write(folder, changes, prompts=PROMPTS, reward=LOGGED)
    first = command.start("run", file, output=folder / "out")
    first.wait_for("update=6/")
    first.signal(signal.SIGINT, group=True)
    stopped = first.end()
    saved = stopped.of(CheckpointRecord)[-1]
    scored = (folder / "scores.txt").read_text().split()
    kept = shutil.copytree(saved.path, folder / "kept")
    (folder / "hold").touch()  # nothing trains before the signal has come
    signalled = threading.Event()

    def load_until_signalled(kind: str, method: str, value: object) -> None:
        if method == "join":
            assert signalled.wait(PATIENCE)

    second = local.start("run", file, "--resume", saved.path, output=folder / "branch", look=load_until_signalled)
    second.wait_for("phase=loading the model")
    second.signal(signal.SIGTERM)
    signalled.set()
    branched = second.end()
    (folder / "hold").unlink()
    (folder / "scores.txt").unlink()
    return SimpleNamespace(
        folder=folder,
        stopped=stopped,
        saved=saved,
        kept=kept,
        progress=stopped.progress(saved.update),
        scored_first=scored,
        branched=branched,
        finished=command.run(file, "--resume", "auto"),
        scored_last=(folder / "scores.txt").read_text().split(),
    )


def test_ctrl_c_finishes_the_update_saves_and_says_where(story):
    assert story.stopped.code == 0, story.stopped.err
    assert story.stopped.of(FinishRecord)[-1].outcome == "Stopped"
    assert story.stopped.of(UpdateRecord)[-1].update == story.saved.update
    assert f"Saved to {story.saved.path}; continue with:" in story.stopped.out
    assert "--resume auto" in story.stopped.out


def test_a_stopped_run_keeps_its_newest_checkpoints_and_no_half_one(story):
    *kept, last = sorted((path.name for path in (story.folder / "out" / "checkpoints").iterdir()), reverse=True)
    assert len(kept) == 2
    assert all(re.fullmatch(r"update-\d{6}", name) for name in kept)
    assert last == "owner.json"


def test_update_numbers_continue_where_they_stopped(story):
    updates = [record.update for record in story.finished.of(UpdateRecord)]
    assert story.finished.code == 0, story.finished.err
    assert updates == list(range(1, PROMPTS // PER_UPDATE + 1))


def test_every_prompt_trains_exactly_once_over_both_attempts(story):
    assert len(_trained(story.progress)) == story.saved.update * PER_UPDATE
    end = story.finished.progress(PROMPTS // PER_UPDATE)
    assert (end["position"], end["pending"]) == (PROMPTS, [])


def test_prompts_are_generated_again_only_if_they_were_on_their_way_at_the_stop(story):
    order = PromptOrder(PROMPTS)
    text = [f"{order.prompt_index(position)}=" for position in range(PROMPTS)]
    trained = _trained(story.progress)
    before, after = Counter(story.scored_first), Counter(story.scored_last)
    assert all(before[text[position]] == GROUP for position in trained)
    assert after == {text[position]: GROUP for position in set(range(PROMPTS)) - trained}


def test_the_bound_holds_after_a_resume_and_versions_continue(story):
    updates = story.finished.of(UpdateRecord)
    assert [record.version for record in updates] == [record.update - 1 for record in updates]
    assert max(record.lag_max for record in updates) <= 2


def test_time_continues_where_the_checkpoint_was_saved(story):
    times = [record.time for record in story.finished.of(UpdateRecord)]
    assert all(earlier < later for earlier, later in pairwise(times))
    assert story.finished.summary["outcome"] == "Succeeded"


def test_sigterm_while_the_model_loads_saves_what_was_restored(story):
    torch = pytest.importorskip("torch")
    assert story.branched.code == 0, story.branched.err
    again = story.branched.of(CheckpointRecord)[-1]
    assert again.update == story.saved.update
    assert story.branched.progress(again.update) == story.branched.progress(again.update) | {
        name: story.progress[name] for name in ("update", "batch")
    }
    ours, theirs = (_state(Path(path)) for path in (again.path, story.kept))
    assert ours.keys() == theirs.keys()
    assert any("optimizer" in name for name in ours)
    different = [
        name for name, value in ours.items() if not torch.equal(torch.as_tensor(value), torch.as_tensor(theirs[name]))
    ]
    assert different == []


def test_a_restored_run_holds_back_no_prompt(story):
    """Saved before a single update, the prompts on their way are those of the checkpoint, and a few more."""
    again = story.branched.progress(story.saved.update)
    assert _trained(again) == _trained(story.progress)


def _state(checkpoint: Path) -> dict[str, object]:
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    whole = checkpoint.parent / f"{checkpoint.name}.pt"
    dcp_to_torch_save(checkpoint / "state", whole)
    try:
        flat: dict[str, object] = {}
        _flatten("", torch.load(whole, weights_only=False), flat)
        return flat
    finally:
        whole.unlink()


def _flatten(path: str, value: object, into: dict[str, object]) -> None:
    if isinstance(value, dict):
        for name, inside in value.items():
            _flatten(f"{path}/{name}", inside, into)
    elif isinstance(value, (int, float)) or hasattr(value, "shape"):
        into[path] = value


def test_a_signal_does_not_wait_for_an_evaluation_that_takes_long(local, write, tmp_path):
    changes = {"data.validation": [{"name": "held-out", "files": {"paths": ["validation.jsonl"]}}]}
    file = write(tmp_path, changes | {"train.updates": 500, "evaluation": {"maxPrompts": 4}}, reward=HANGING)
    running = local.start("run", file, "--set", "rewards[0].timeoutSeconds=3600", output=tmp_path / "out")
    running.wait_for("update=1/")
    running.signal(signal.SIGINT)
    ended = running.end()
    assert ended.code == 0, ended.err
    assert ended.of(FinishRecord)[-1].outcome == "Stopped"
    assert ended.of(CheckpointRecord)[-1].update == ended.of(UpdateRecord)[-1].update


@pytest.mark.quiet
def test_a_second_signal_ends_immediately_and_leaves_no_process(command, write, tmp_path):
    """The train worker answers nothing, as on a node that hangs: the checkpoint of the first signal never comes."""
    running = command.start("run", write(tmp_path, {"train.updates": 500}, prompts=2100), output=tmp_path / "out")
    running.wait_for("update=1/")
    (worker,) = running.processes("ray::TrainWorker")
    worker.suspend()
    running.signal(signal.SIGINT)
    running.wait_for("phase=stopping after this update")
    running.signal(signal.SIGTERM)
    running.process.wait(15)
    with contextlib.suppress(psutil.NoSuchProcess):
        worker.resume()  # where Ray itself was too slow to kill it: who is suspended does not see that nobody is left
    ended = running.end()
    assert ended.code == 130
    assert ended.err.strip().endswith("ended by a second signal; nothing since the last checkpoint was kept")
    # The attempt's workspace stays, and nothing half-written is in it.
    assert not list((tmp_path / "out").glob("checkpoints/.*/*"))


@pytest.fixture(scope="module")
def crashed(command, write, tmp_path_factory) -> SimpleNamespace:
    """All prompts of one epoch, in two attempts: two ranks and all else are killed in the middle of a save during which the
    next batch trains; and to the end on one rank. Weights are published into a folder.
    """
    folder = tmp_path_factory.mktemp("crashed")
    changes = {
        "train.updates": PROMPTS // PER_UPDATE,
        "train.nodes": 2,
        "train.batch.microBatchSequences": 8,
        "checkpoint": {"everyUpdates": 2, "keep": 2},
        "algorithm.loss": {"type": "Function", "function": "holding:loss"},
        "publication": {"transport": "Folder", "folder": "publications", "wholeEvery": 3},
    }
    file = write(folder, changes, prompts=PROMPTS, reward=LOGGED)
    (folder / "holding.py").write_text(HOLDING)
    (folder / "hold-save").touch()
    first = command.start("run", file, output=folder / "out")
    first.wait_until((folder / "trained-meanwhile").exists, "batch that trains during the second save")
    first.signal(signal.SIGKILL, group=True)
    first.kill()  # what is in groups of its own
    _until_unlocked(RunFolder(folder / "out"))
    saved = CheckpointStore(folder / "out" / "checkpoints", 2).latest()
    half = [path.name for path in (folder / "out" / "checkpoints").glob(".epoch-*/update-*")]
    journal = (folder / "out" / "journal").read_bytes()
    [publications] = (folder / "publications").iterdir()
    published = latest(publications)
    weights = asyncio.run(receiver().fetch(published))
    (folder / "hold-save").unlink()
    (folder / "scores.txt").unlink()
    second_rank = (folder / "out" / "logs" / "train-1.log").read_text()
    finished = command.run(file, "--resume", "auto", "--set", "train.nodes=1")
    assert finished.code == 0, finished.err
    return SimpleNamespace(
        second_rank=second_rank,
        half=half,
        saved=saved,
        journal=journal,
        publications=publications,
        published=published,
        weights=weights,
        finished=finished,
        scored=(folder / "scores.txt").read_text().split(),
    )


def _until_unlocked(folder: RunFolder) -> None:
    """Wait until the kernel has released the lock of the folder, which takes a moment after its processes were killed."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            with folder.held():
                return
        except FolderRefused:
            assert time.monotonic() < deadline, "a process of the killed run still exists"
            time.sleep(0.02)


def test_killed_in_the_middle_of_a_save_the_run_continues_from_the_checkpoint_before_it_and_its_journal(crashed):
    [half] = crashed.half
    assert (crashed.saved.progress.update, half) == (2, "update-000004")
    assert b'{"t":4,' in crashed.journal  # the batch that trains during the save
    updates = surviving_updates(crashed.finished.records)
    assert [record.update for record in updates] == list(range(1, PROMPTS // PER_UPDATE + 1))
    assert max(record.lag_max for record in updates) <= 2


def test_the_last_version_of_a_killed_run_remains_in_its_folder_and_the_next_attempt_continues_there(crashed):
    """It was killed after update 4, during whose save the next batch trained, and continues from update 2, whose version is published again."""
    assert crashed.published.manifest.version in (4, 5)
    assert crashed.weights.version == crashed.published.manifest.version
    assert all(bool(tensor.isfinite().all()) for tensor in crashed.weights.values())
    last = latest(crashed.publications)
    assert last.manifest.version == PROMPTS // PER_UPDATE
    assert last.source.number == crashed.published.source.number + 1 + PROMPTS // PER_UPDATE - 2
    assert not list(crashed.publications.glob(".*"))


def test_a_run_can_continue_with_another_number_of_ranks(crashed):
    logs = {path.name for path in (crashed.finished.folder / "logs").glob("train-*")}
    assert logs == {"train-0.log", "train-1.log"}
    second = (crashed.finished.folder / "logs" / "train-1.log").read_text()
    assert second == crashed.second_rank, "it was started again"
    assert crashed.finished.of(FinishRecord)[-1].outcome == "Succeeded"


def test_after_a_crash_every_prompt_trains_exactly_once(crashed):
    start = recover(crashed.journal, crashed.saved.progress.batch)
    trained = set(range(start.position)) - set(start.pending)
    assert len(trained) == crashed.saved.progress.update * PER_UPDATE
    order = PromptOrder(PROMPTS)
    text = [f"{order.prompt_index(position)}=" for position in range(PROMPTS)]
    assert Counter(crashed.scored) == {text[position]: GROUP for position in set(range(PROMPTS)) - trained}
    end = crashed.finished.progress(PROMPTS // PER_UPDATE)
    assert (end["position"], end["pending"]) == (PROMPTS, [])


def test_after_six_preemptions_every_prompt_has_trained_exactly_once(local, write, tmp_path):
    """As by a queue: SIGTERM in the middle of training, and the same run starts again from what it saved."""
    preemptions, prompts = 6, 24 * PER_UPDATE
    file = write(tmp_path, {"train.updates": prompts // PER_UPDATE}, prompts=prompts, reward=LOGGED)
    scores, order = tmp_path / "scores.txt", PromptOrder(prompts)
    text = [f"{order.prompt_index(position)}=" for position in range(prompts)]
    trained: set[int] = set()
    for number in range(preemptions + 1):
        resume = () if number == 0 else ("--resume", "auto")
        running = local.start("run", file, *resume, output=tmp_path / "out")
        if number < preemptions:
            running.wait_for(f"update={len(trained) // PER_UPDATE + 1}/")
            running.signal(signal.SIGTERM)
        ended = running.end()
        assert ended.code == 0, ended.err
        scored = Counter(scores.read_text().split())
        scores.unlink()
        assert scored.keys().isdisjoint({text[position] for position in trained}), "trained before"
        update = ended.of(CheckpointRecord)[-1].update
        progress = ended.progress(update)
        assert trained < _trained(progress)
        assert len(_trained(progress)) == update * PER_UPDATE
        assert all(scored[text[position]] == GROUP for position in _trained(progress) - trained)
        trained = _trained(progress)
    assert [record.outcome for record in ended.of(FinishRecord)] == ["Stopped"] * preemptions + ["Succeeded"]
    assert trained == set(range(prompts))
    assert [record.update for record in ended.of(UpdateRecord)] == list(range(1, prompts // PER_UPDATE + 1))
    assert max(record.lag_max for record in ended.of(UpdateRecord)) <= 2


def test_a_signal_does_not_wait_for_a_checkpoint_that_takes_long_to_restore(local, write, tmp_path):
    file = write(tmp_path, {"train.updates": 4})
    first = local.run(file, "--set", "train.updates=2")
    assert first.code == 0, first.err
    fault = Fault.hang("TrainWorker", "restore")
    running = local.start("run", file, "--resume", "auto", output=first.folder, faults=(fault,))
    running.wait_until(fault.fired.is_set, "restoring")
    running.signal(signal.SIGTERM)
    ended = running.end()
    assert (ended.code, ended.err) == (0, "")
    assert ended.of(FinishRecord)[-1].outcome == "Stopped"
    assert ended.of(CheckpointRecord)[-1].update == 2


def test_a_signal_does_not_wait_for_the_evaluation_of_examples_at_the_start(local, write, tmp_path):
    fault = Fault.hang("TrainWorker", "negative_log_likelihood")
    running = local.start("run", EXAMPLES / "tiny-sft.yaml", output=tmp_path / "out", faults=(fault,))
    running.wait_until(fault.fired.is_set, "evaluation")
    running.signal(signal.SIGTERM)
    ended = running.end()
    assert (ended.code, ended.err) == (130, f"{NOTHING_SAVED}\n")
    assert ended.of(FinishRecord)[-1].outcome == "Stopped"
    assert ended.of(UpdateRecord) == []


def test_a_run_whose_last_evaluation_was_lost_makes_it_when_it_is_resumed_and_only_then(local, write, tmp_path):
    changes = {"data.validation": [{"name": "held-out", "files": {"paths": ["validation.jsonl"]}}]}
    file = write(tmp_path, changes | {"train.updates": 1, "evaluation": {"maxPrompts": 4, "atStart": False}})
    first = local.run(file)
    assert [record.update for record in first.of(EvaluationRecord)] == [1], first.err
    metrics = first.folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(line for line in lines if not line.startswith('{"record":"evaluation"')))
    for _ in range(2):
        again = local.run(file, "--resume", "auto", output=first.folder)
        assert again.code == 0, again.err
        assert [record.update for record in again.of(EvaluationRecord)] == [1]
        assert len(again.of(UpdateRecord)) == 1
