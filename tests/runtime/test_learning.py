"""A run learns its task, on the CPU of any machine."""

import itertools
import json
import random
import signal
from pathlib import Path
from statistics import mean

import psutil
import pytest

from qwen35_trainer.progress.records import EvaluationRecord, UpdateRecord, surviving_updates
from tests.patience import PATIENCE
from tests.rollout import older_processor

from .conftest import Ended, Running
from .watched_engines import watch

EXAMPLES = Path(__file__).parents[2] / "examples"
PARTS = ("train", "validation")
MAX_DIFFERENCE, MAX_PROBE_DIFFERENCE = 0.02, 0.05
"""Highest mean difference, in nats, of the log-probs of vLLM in bfloat16 from those of the trainer in float32: over all probes, and in
a probe. Differences grow while a model learns: 0.012 and 0.022 were measured in 300 updates."""


def test_a_task_that_is_easier_than_the_examples_is_learned_within_forty_updates(local, tmp_path):
    """The answer is the last digit, not one that is looked for."""
    draw = random.Random(0)
    numbers = draw.sample(["".join(digits) for digits in itertools.product("123", repeat=6)], 576)
    for part, chosen in zip(PARTS, (numbers[:512], numbers[512:]), strict=True):
        rows = ({"prompt": f"{number}=", "answer": number[-1]} for number in chosen)
        (tmp_path / f"{part}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    changes = [f"data.{part}[0].files.paths[0]={tmp_path}/{part}.jsonl" for part in PARTS]
    _learns(
        local, tmp_path, updates=40, changes=[*changes, "data.maxResponseTokens=1", "train.optimizer.learningRate=4e-3"]
    )


@pytest.mark.soak
def test_the_first_example_learns_to_answer_nine_in_ten_held_out_prompts(local, tmp_path):
    """As it does in pods, in soak too: tests/cluster/test_training.py."""
    _learns(local, tmp_path, updates=300)


def test_rollouts_by_vllm_train_although_its_process_is_killed(command, tmp_path):
    """In processes of their own. The trainer computes nearly the same log-probabilities as vLLM, whose tokens span versions."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    never = ("train.updates", "evaluation.everyUpdates", "checkpoint.everyUpdates")
    changes = ["evaluation.atStart=false", "data.maxResponseTokens=24", *(f"{field}=1000000" for field in never)]
    running = _start(command, EXAMPLES / "tiny-grpo-vllm.yaml", tmp_path, changes)
    running.wait_until(lambda: running.updates > 1, "the first updates")
    [worker] = running.processes("ray::RolloutWorker")
    vllm = [worker, *worker.children(recursive=True)]
    worker.kill()
    running.wait_until(lambda: running.losses == 1, "the loss of the replica")
    assert psutil.wait_procs(vllm, timeout=PATIENCE)[1] == []
    before = running.updates + 2  # the trainer may have sequences for two
    running.wait_until(lambda: running.updates > before + 2, "updates with another replica")
    running.signal(signal.SIGTERM)
    ended = running.end()
    assert ended.code == 0, ended.err
    assert running.losses == 1
    updates = surviving_updates(ended.records)
    assert [record.update for record in updates] == list(range(1, len(updates) + 1))
    assert {(record.prompts, record.samples) for record in updates} == {(16, 256)}
    progress = ended.progress(len(updates))
    assert progress["position"] - len(progress["pending"]) == 16 * len(updates), "each prompt has one turn"
    assert max(record.lag_max for record in updates) in range(1, 4)
    assert all(abs(record.behaviour_kl) < 1e-3 for record in updates if record.lag_max == 0)
    assert any(record.probe_difference_mean is not None for record in updates[before:]), "the other replica was probed"
    _generated_as_the_trainer_computes(ended, MAX_DIFFERENCE)


@pytest.mark.soak
def test_the_example_with_vllm_learns(command, tmp_path, monkeypatch):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    watched = watch(tmp_path / "watched", monkeypatch)
    ended = _learns(command, tmp_path, updates=300, example="tiny-grpo-vllm.yaml")
    _generated_as_the_trainer_computes(ended)
    watched.check_trained()
    assert len(watched.trained) == sum(record.samples for record in ended.of(UpdateRecord))


@pytest.mark.soak
@pytest.mark.timeout(4 * PATIENCE)
def test_the_example_with_vllm_learns_on_a_processor_with_avx2_alone(command, tmp_path, monkeypatch):
    """In all its processes, torch, oneDNN and vLLM use no other instructions. A run takes twelve minutes on two cores."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    watch(tmp_path / "watched", monkeypatch)
    for name, value in older_processor.environment_of("AVX2").items():
        monkeypatch.setenv(name, value)
    changes = ["train.updates=300", "evaluation.everyUpdates=300"]
    running = _start(command, EXAMPLES / "tiny-grpo-vllm.yaml", tmp_path, changes)
    running.wait_until(lambda: running.updates > 1, "the first updates")
    [worker] = running.processes("ray::RolloutWorker")
    assert older_processor.kernels(worker.pid) == {"_C_AVX2"}
    _generated_as_the_trainer_computes(_learned(running.end(3 * PATIENCE), 300))


@pytest.mark.soak
def test_the_example_learns_with_vllm_that_takes_turns_with_the_trainer(command, tmp_path):
    """Two processes for one device, which never work at the same time: vLLM and a train rank."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    turns = ["mode=Colocated", 'async={"batchesPerPublication": 1}']
    ended = _learns(command, tmp_path, updates=200, example="tiny-grpo-vllm.yaml", changes=turns)
    assert ended.overlaps == []


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["FullyAsync", "Colocated"])
def test_the_trainer_uses_the_experts_that_vllm_chose(command, tmp_path, mode):
    """In processes of their own, with the choices in the object store of a real Ray."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    experts = ["model.source.random.experts=4", "model.source.random.expertsPerToken=2", "train.router.replay=true"]
    changes = [f"mode={mode}", 'async={"batchesPerPublication": 1}', "train.updates=6", "evaluation.atStart=false"]
    ended = _run(command, EXAMPLES / "tiny-grpo-vllm.yaml", tmp_path, [*changes, *experts])
    updates = ended.of(UpdateRecord)
    assert [record.replayed_token_share for record in updates] == [1.0] * 6
    assert all(abs(record.behaviour_kl) < 1e-3 for record in updates if record.lag_max == 0)


def _learns(
    local, folder: Path, *, updates: int, changes: list[str] | None = None, example: str = "tiny-grpo.yaml"
) -> Ended:
    changes = [f"train.updates={updates}", f"evaluation.everyUpdates={updates}", *(changes or [])]
    return _learned(_run(local, EXAMPLES / example, folder, changes), updates)


def _learned(ended: Ended, updates: int) -> Ended:
    assert ended.code == 0, ended.err
    before, after = ended.of(EvaluationRecord)
    assert (before.update, after.update) == (0, updates)
    assert before.accuracy < 0.2
    assert after.accuracy >= 0.9
    return ended


def _generated_as_the_trainer_computes(ended: Ended, limit: float = MAX_PROBE_DIFFERENCE) -> None:
    """Check the log-probs of all probes. limit: of the mean difference in a probe."""
    updates = ended.of(UpdateRecord)
    probed = [record.probe_difference_mean for record in updates if record.probe_difference_mean is not None]
    print(f"{len(probed)} probes: mean difference {mean(probed):.4f}, at most {max(probed):.4f}")
    assert mean(probed) <= MAX_DIFFERENCE
    assert max(probed) <= limit


def _run(starts, file: Path, folder: Path, changes: list[str]) -> Ended:
    ended = _start(starts, file, folder, changes).end()
    assert ended.code == 0, ended.err
    return ended


def _start(starts, file: Path, folder: Path, changes: list[str]) -> Running:
    settings = [word for change in changes for word in ("--set", change)]
    return starts.start("run", file, *settings, output=folder / "out")
