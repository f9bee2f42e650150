"""Engines of vLLM fail in a whole run under a real Ray, one after the other: no sequence is lost or trains twice, and no process stays.

            nan            memory          killed     stopped                        hangs
step        a weight       the kernel      SIGKILL    SIGSTOP: the process exists,   the engine's thread returns from nothing,
receive                    refuses it                 and answers nothing            and the process answers
commit
found by    its log-probs  its next report Ray        the deadline of a call         missing steps, or a version that it does not load

The same with the Torch engine, on a virtual clock: test_faults.py.
"""

from __future__ import annotations

import itertools
import re
import signal
from pathlib import Path

import psutil
import pytest

from qwen35_trainer.exits import FAILED
from qwen35_trainer.progress.records import surviving_updates
from tests.patience import PATIENCE

from .conftest import LOST, Running
from .watched_engines import Watched, watch

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-grpo-vllm.yaml"
GROUP, PROMPTS_PER_UPDATE, MAX_LAG = 4, 8, 3
CHANGES = [
    "rollout.nodes=2",
    "rollout.minNodes=1",
    "rollout.maxSequencesPerReplica=32",
    "data.maxResponseTokens=24",  # sequences are under way when versions come
    f"algorithm.groupSize={GROUP}",
    f"train.batch.promptsPerUpdate={PROMPTS_PER_UPDATE}",
    "train.batch.microBatchSequences=32",
    "train.updates=1000000",
    "checkpoint.everyUpdates=1000000",
    "evaluation.atStart=false",
    "evaluation.everyUpdates=1000000",
    "publication.timeoutSeconds=60",
    "tracking.tensorboard=false",
]
ACTS = ("memory", "killed", "stopped", "hangs")
FAILURES = [("step", "nan"), *itertools.product(("step", "receive", "commit"), ACTS)]
"""A method of the engine, and how it fails."""
COUNT = 20
CAUSES = {
    "nan": "NotFiniteLogProbs: token",
    "memory": "can't allocate memory",
    "killed": "was lost during .*its worker process has died",
    "stopped": r"did not finish (generating|receiving commands) within|did not load version \d+ within",
    "hangs": r"its engine has sequences and made no step|did not load version \d+ within",
}
"""How an engine fails → the cause in the driver's warning, a regular expression."""


@pytest.mark.soak
@pytest.mark.timeout(COUNT * PATIENCE)
def test_twenty_engines_of_vllm_that_fail_one_after_the_other_lose_no_prompt(command, tmp_path, monkeypatch):
    """In each act and in each way, and some twice."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    watched = watch(tmp_path / "watched", monkeypatch)
    settings = [word for change in CHANGES for word in ("--set", change)]
    running = command.start("run", EXAMPLE, *settings, output=tmp_path / "out")
    running.wait_until(lambda: running.updates > 1 and len(watched.first_steps) == 2, "the first updates")
    failures = list(itertools.islice(itertools.cycle(FAILURES), COUNT))
    for number, (method, act) in enumerate(failures, 1):
        _fail(running, watched, method, act)
        assert running.losses == number
    _end(running, watched)
    losses = [line for line in (running.folder / "logs" / "driver.log").read_text().splitlines() if LOST in line]
    for loss, (_, act) in zip(losses, failures, strict=True):
        assert re.search(CAUSES[act], loss), loss


def _fail(running: Running, watched: Watched, method: str, act: str) -> None:
    """Let an engine fail, and wait until another has its place, with the current version, and updates continue."""
    losses, engines = running.losses, len(watched.first_steps)
    watched.order(method, act)
    running.wait_until(lambda: watched.victim is not None, f"{method} that fails")
    running.wait_until(lambda: running.losses > losses, f"loss of an engine of which a {method} fails ({act})")
    running.wait_until(lambda: len(watched.first_steps) > engines, "first step of the replacement")
    victim, first = watched.victim, watched.first_steps[-1]
    print(f"{method}, {act}: {victim} is lost, and replaced by {first}", flush=True)
    assert first.version >= first.newest - 1, "only one version may have been published since it joined"
    assert not psutil.pid_exists(victim), "the process of the lost engine runs"
    workers = {worker.pid for worker in running.processes("ray::RolloutWorker")}
    assert (first.process in workers, len(workers)) == (True, 2)
    updates = running.updates
    running.wait_until(lambda: running.updates > updates + 1, "further updates")


def _end(running: Running, watched: Watched) -> None:
    """Stop the run, and check that each prompt had exactly one turn, and each of its sequences trained once."""
    running.signal(signal.SIGTERM)
    ended = running.end()  # no process is left
    assert ended.code != FAILED, ended.err
    assert "Traceback" not in ended.err, ended.err
    updates = surviving_updates(ended.records)
    assert [record.update for record in updates] == list(range(1, len(updates) + 1))
    assert max(record.lag_max for record in updates) <= MAX_LAG
    assert {(record.prompts, record.samples) for record in updates} == {
        (PROMPTS_PER_UPDATE, GROUP * PROMPTS_PER_UPDATE)
    }
    progress = ended.progress(len(updates))
    assert progress["position"] - len(progress["pending"]) == PROMPTS_PER_UPDATE * len(updates)
    watched.check_trained()
    assert len(watched.trained) == GROUP * PROMPTS_PER_UPDATE * len(updates)
