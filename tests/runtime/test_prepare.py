import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from qwen35_trainer.data.data_errors import DataError
from qwen35_trainer.data.encode import EncodedPrompt, EncodedPrompts
from qwen35_trainer.data.picture_processor import Patching, PictureProcessor
from qwen35_trainer.data.picture_set import PictureSet
from qwen35_trainer.data.prompt import Prompt
from qwen35_trainer.manifest import load_manifest
from qwen35_trainer.runtime.background import run_in_thread
from qwen35_trainer.runtime.folder import RunFolder
from qwen35_trainer.runtime.prepare import check_pictures, prepare
from qwen35_trainer.runtime.run_command import _Prepared
from tests.patience import PATIENCE

HELD_OUT = [{"name": "held-out", "files": {"paths": ["validation.jsonl"]}}]


@pytest.fixture
def prepared(write, tmp_path):
    """prepared({...}) is the job and the data of a small manifest."""

    def build(changes=None, **options):
        manifest = load_manifest(write(tmp_path, changes, **options))
        return prepare(manifest, base=tmp_path, folder=RunFolder(tmp_path / "out"), resume=None, started=0.0)

    return build


def test_updates_follow_from_the_epochs(prepared, removed):
    job, data = prepared({"train.updates": removed, "data.epochs": 3}, prompts=10)
    assert len(data.prompts) == 10
    assert job.updates_total == 7  # 30 prompts, 4 an update


def test_only_whole_batches_train(prepared):
    job, _ = prepared({"train.updates": 7, "async": {"updatesPerBatch": 3}})
    assert job.updates_total == 6


def test_data_that_fill_no_batch_are_refused_with_three_ways_out(prepared, removed):
    with pytest.raises(
        DataError, match=r"3 prompts × 1 epochs do not fill one batch of 4. Lower train.batch.promptsPerU"
    ):
        prepared({"train.updates": removed}, prompts=3)


def test_no_validation_source_is_not_an_error(prepared):
    assert len(prepared()[1].validation) == 0


def test_problems_of_reading_are_listed_for_both_parts(prepared, tmp_path):
    missing = [{"name": "train", "files": {"paths": ["nowhere.jsonl"]}}]
    empty = [{"name": "held-out", "files": {"paths": ["empty.jsonl"]}}]
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DataError) as raised:
        prepared({"data.train": missing, "data.validation": empty})
    assert len(raised.value.problems) == 2
    assert "nowhere.jsonl does not exist" in raised.value.problems[0]
    assert "empty.jsonl: no rows" in raised.value.problems[1]


def test_prompts_that_are_too_long_are_listed_for_both_parts(prepared):
    with pytest.raises(DataError) as raised:
        prepared({"data.maxPromptTokens": 2, "data.validation": HELD_OUT})
    assert [problem.partition(" longer than ")[0] for problem in raised.value.problems] == ["54", "64"]
    assert "data.maxPromptTokens 2: train/10 (3 tokens)" in raised.value.problems[0]
    assert "Raise data.maxPromptTokens to 7" in raised.value.problems[1]


def test_supervised_rows_become_examples_and_no_prompts(prepared, removed):
    changes = {"mode": "SFT", "rollout": removed, "rewards": removed, "async": removed, "data.validation": HELD_OUT}
    _, data = prepared(changes | {"train.batch.microBatchSequences": 4})
    assert (len(data.examples), len(data.held_out)) == (64, 64)
    assert (len(data.prompts), len(data.validation)) == (0, 0)


def test_what_was_prepared_is_held_only_by_its_last_user():
    """A tokenizer takes hundreds of megabytes for as long as a run lasts."""

    class Large:
        pass

    made = []

    def prepare() -> tuple[None, Large]:
        large = Large()
        made.append(weakref.ref(large))
        return None, large

    prepared = _Prepared(run_in_thread("data", prepare))
    _, large = prepared.take()
    prepared.done.result(PATIENCE)
    assert made[0]() is large
    del large
    assert made[0]() is None


def test_replicas_that_read_text_only_refuse_pictures_before_the_run_starts():
    spec = SimpleNamespace(rollout=SimpleNamespace(engine="VLLM"))
    text = EncodedPrompts([EncodedPrompt(Prompt("s/0", "s", "q"), np.ones(1, np.int32))])
    pictures = PictureSet(PictureProcessor(None, Patching(4, 2, 2)), (b"a picture",), ())
    shown = EncodedPrompts([EncodedPrompt(Prompt("s/0", "s", "q"), np.ones(1, np.int32), pictures)])
    check_pictures(spec, text, text)
    with pytest.raises(DataError, match="engine VLLM: replicas on vLLM generate from text only"):
        check_pictures(spec, text, shown)
    spec.rollout.engine = "Torch"
    check_pictures(spec, shown, shown)
