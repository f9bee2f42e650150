"""What a checkpoint must not change, and what it must bring back."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import psutil
import pytest
import torch
from torch.distributed.checkpoint import CheckpointException

from qwen35_trainer.engines.fsdp import sharded_checkpoint
from qwen35_trainer.engines.fsdp.engine import FSDPEngine
from qwen35_trainer.engines.origin import Origin, origin
from qwen35_trainer.manifest import ModelSourceSpec, ModelSpec, RandomModelSpec
from qwen35_trainer.models.qwen3_5.build_model import ModelSettings, build
from qwen35_trainer.rollout.torch import TorchEngine
from tests.patience import PATIENCE
from tests.publications import published_by
from tests.rollout.loading import load

pytestmark = pytest.mark.usefixtures("alone")
CPU = torch.device("cpu")


def same(left: FSDPEngine, right: FSDPEngine) -> bool:
    first, second = published_by(left), published_by(right)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_a_checkpoint_before_the_first_update_changes_no_update(make_model, make_spec, make_batch, tmp_path) -> None:
    plain, saved, restored = (FSDPEngine(Origin(make_model), make_spec(), CPU) for _ in range(3))
    saved.save(tmp_path)
    assert saved.saved(wait=True)
    restored.restore(tmp_path)
    for seed in (0, 1):
        expected = plain.train(make_batch(seed=seed), [1e-3])
        assert saved.train(make_batch(seed=seed), [1e-3]) == expected
        assert restored.train(make_batch(seed=seed), [1e-3]) == expected
    assert same(saved, plain)
    assert same(restored, plain)


@pytest.mark.parametrize("all_decayed", [False, True])
def test_the_settings_of_a_restored_optimizer_are_the_manifests(
    make_model, make_spec, make_batch, tmp_path, all_decayed
) -> None:
    """They may change while a training is suspended. Where all parameters decayed, they were in one group."""
    before = {"train.optimizer.weightDecay": 0.5, "train.optimizer.decayAll": all_decayed}
    after = {
        "train.optimizer.weightDecay": 0.2,
        "train.optimizer.beta2": 0.5,
        "train.optimizer.decayAll": not all_decayed,
    }
    saved, restored = (FSDPEngine(Origin(make_model), make_spec(settings), CPU) for settings in (before, after))
    saved.train(make_batch(), [1e-3])
    saved.save(tmp_path)
    assert saved.saved(wait=True)
    restored.restore(tmp_path)
    assert same(restored, saved)
    groups = restored._optimizers.parts[0].param_groups
    assert [group["weight_decay"] for group in groups] == ([0.2, 0.0] if all_decayed else [0.2])
    assert {group["betas"] for group in groups} == {(0.9, 0.5)}
    [state] = {float(each["step"]) for each in restored._optimizers.parts[0].state.values()}
    assert state == 1


def test_a_restore_after_an_evaluation_leaves_nothing_of_the_evaluated_weights(
    make_model, make_spec, make_batch, tmp_path
) -> None:
    """A forward pass alone may leave gathered parameters behind, which a restore must replace too."""
    engine, batch = FSDPEngine(Origin(make_model), make_spec(), CPU), make_batch()
    engine.save(tmp_path)
    assert engine.saved(wait=True)
    before = engine.negative_log_likelihood(batch)
    engine.train(batch, [1e-2])
    assert engine.negative_log_likelihood(batch) != before
    engine.restore(tmp_path)
    assert engine.negative_log_likelihood(batch) == before


def test_tied_embeddings_stay_tied_through_training_saving_and_publication(make_spec, make_batch, tmp_path) -> None:
    shape = RandomModelSpec(hiddenSize=32, intermediateSize=48, tieEmbeddings=True)
    model = ModelSpec(name="tied", source=ModelSourceSpec(random=shape))
    saved, restored = (
        FSDPEngine(origin(model, seed=seed, vocabulary=23, max_length=64, base=Path()), make_spec(), CPU)
        for seed in (0, 1)
    )
    saved.train(make_batch(), [1e-2])
    saved.save(tmp_path)
    assert saved.saved(wait=True)
    restored.restore(tmp_path)
    assert restored.train(make_batch(seed=1), [1e-3]) == saved.train(make_batch(seed=1), [1e-3])
    published = published_by(saved)
    assert "lm_head.weight" not in published, "the same values twice"
    rollout = build(ModelSettings(model, seed=2, vocabulary=23, max_length=64, base=Path()))
    load(TorchEngine(rollout, end_token=2, slots=1, max_length=64, seed=0), published, 1)
    assert torch.equal(rollout.lm_head.weight, published["model.embed_tokens.weight"])


@pytest.fixture(params=["room for a copy", "no room for a copy"])
def room(request, monkeypatch) -> None:
    if request.param == "no room for a copy":
        monkeypatch.setattr(sharded_checkpoint, "free_memory", lambda: 1000)


@pytest.mark.parametrize(("spare", "copied"), [(-1, False), (4096, True)])
def test_a_checkpoint_is_copied_where_half_of_the_free_memory_holds_it(
    make_model, make_spec, monkeypatch, tmp_path, spare: int, copied: bool
) -> None:
    engine, copies = FSDPEngine(Origin(make_model), make_spec(), CPU), []

    def copy_and_write(*_: object, **__: object) -> Future[None]:
        copies.append(Future())
        return copies[0]

    size = 3 * sum(parameter.nbytes for parameter in make_model().parameters())  # with both moments
    monkeypatch.setattr(sharded_checkpoint, "free_memory", lambda: 2 * size + spare)
    monkeypatch.setattr(sharded_checkpoint.dcp, "async_save", copy_and_write)
    engine.save(tmp_path)
    assert bool(copies) == copied
    assert (tmp_path / "state" / ".metadata").exists() != copied


@pytest.mark.parametrize(
    ("folder", "names"),
    [
        (".", ("memory.max", "memory.current", "inactive_file")),
        ("memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
    ],
    ids=["version 2", "version 1"],
)
def test_in_a_container_the_memory_that_is_free_is_what_its_limit_leaves(tmp_path, folder, names) -> None:
    def say(limit: str, used: int, files: int) -> int:
        place = tmp_path / folder
        place.mkdir(exist_ok=True)
        (place / names[0]).write_text(f"{limit}\n")
        (place / names[1]).write_text(f"{used}\n")
        (place / "memory.stat").write_text(f"anon 5\n{names[2]} {files}\nslab 7\n")
        return sharded_checkpoint.free_memory(tmp_path)

    assert say("3000000", 1_200_000, 200_000) == 2_000_000
    machine = psutil.virtual_memory().total
    assert folder != "." or 0 < say("max", 1, 1) <= machine
    assert 0 < say(str(10 * machine), 1, 1) <= machine
    assert 0 < sharded_checkpoint.free_memory(tmp_path / "none") <= machine


@pytest.mark.usefixtures("room")
def test_a_save_writes_the_state_at_its_call_though_training_continues(
    make_model, make_spec, make_batch, tmp_path
) -> None:
    saved, restored = (FSDPEngine(Origin(make_model), make_spec(), CPU) for _ in range(2))
    saved.train(make_batch(), [1e-2])
    before = published_by(saved)
    saved.save(tmp_path)
    for seed in range(3):
        saved.train(make_batch(seed=seed), [1e-2])
    assert saved.saved(wait=True)
    restored.restore(tmp_path)
    read = published_by(restored)
    assert all(torch.equal(read[name], before[name]) for name in before)


@pytest.mark.usefixtures("room")
def test_a_save_that_failed_says_so_once_and_the_next_one_is_written(make_model, make_spec, tmp_path) -> None:
    engine = FSDPEngine(Origin(make_model), make_spec(), CPU)
    blocked, free = tmp_path / "blocked", tmp_path / "free"
    blocked.mkdir()
    free.mkdir()
    (blocked / "state").write_text("a file where the folder should be")
    engine.save(blocked)
    with pytest.raises(CheckpointException, match="state"):
        engine.saved(wait=True)
    engine.save(free)
    assert engine.saved(wait=True)
    assert (free / "state" / ".metadata").exists()


def test_a_save_waits_for_the_previous_one_while_another_thread_waits_for_it(
    make_model, make_spec, monkeypatch, tmp_path
) -> None:
    """The thread of group `SAVING` waits in `saved` when the next save begins."""
    awaited, begun = threading.Event(), list[Path]()

    class Writing(Future[None]):
        def result(self, timeout: float | None = None) -> None:
            awaited.set()
            return super().result(timeout)

    first, second = Writing(), Writing()

    def begin(folder: Path, *_: object) -> Future[None]:
        begun.append(folder)
        return (first, second)[len(begun) - 1]

    monkeypatch.setattr(sharded_checkpoint, "begin", begin)
    engine = FSDPEngine(Origin(make_model), make_spec(), CPU)
    engine.save(tmp_path / "1")
    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(engine.saved, wait=True)
        assert awaited.wait(PATIENCE)
        saving = threads.submit(engine.save, tmp_path / "2")
        wait([saving], timeout=0.05)
        assert begun == [tmp_path / "1"], "the first one is still being written"
        first.set_result(None)
        assert waiting.result(PATIENCE)
        saving.result(PATIENCE)
        assert begun == [tmp_path / "1", tmp_path / "2"]
        assert not engine.saved(), "the thread that waited for the first one has not forgotten the second"
        second.set_result(None)
        assert engine.saved()
