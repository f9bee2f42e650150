import json
import re
import weakref
from pathlib import Path

import pytest
from PIL import Image

from qwen35_trainer.data.data_errors import DataError
from qwen35_trainer.data.source_rows import dump_rows
from qwen35_trainer.epoch import FolderRefused
from qwen35_trainer.manifest import load_manifest
from qwen35_trainer.runtime.background import run_in_thread
from qwen35_trainer.runtime.checkpoint_store import CheckpointMeta, SavedCheckpoint
from qwen35_trainer.runtime.folder import RunFolder
from qwen35_trainer.runtime.prepare import prepare
from qwen35_trainer.runtime.run_command import _Prepared
from tests.patience import PATIENCE

from .conftest import SMALL

TEMPLATE = Path(__file__).parents[2] / "examples" / "tiny" / "chat.jinja"
EXAMPLE = TEMPLATE.parents[1] / "tiny-sft-vision.yaml"
HELD_OUT = [{"name": "held-out", "files": {"paths": ["validation.jsonl"]}}]


@pytest.fixture
def prepared(write, tmp_path):
    """prepared({...}) is the job and the data of a small manifest."""

    def build(changes=None, resume=None, **options):
        manifest = load_manifest(write(tmp_path, changes, **options))
        return prepare(manifest, base=tmp_path, folder=RunFolder(tmp_path / "out"), resume=resume, started=0.0)

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
    assert "data.maxPromptTokens 2: train/10 (3 tokens; " in raised.value.problems[0]
    assert "Raise data.maxPromptTokens to 7" in raised.value.problems[1]


def test_rows_that_cannot_be_encoded_are_named_with_file_and_line(prepared, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1>", "answer": "2"}\n\n{"prompt": "1×", "answer": "2"}\n')
    (tmp_path / "long.jsonl").write_text('{"prompt": "123456789>", "answer": "2"}\n')
    train = [{"name": "train", "files": {"paths": ["rows.jsonl"]}}]
    held_out = [{"name": "held-out", "files": {"paths": ["long.jsonl"]}}]
    with pytest.raises(DataError) as raised:
        prepared({"data.train": train, "data.validation": held_out})
    unknown, too_long = raised.value.problems
    assert unknown.startswith(f"prompt train/1 ({tmp_path}/rows.jsonl, line 3): no token for '×'.")
    assert f"held-out/0 (10 tokens; {tmp_path}/long.jsonl, line 1)" in too_long


@pytest.fixture
def checkpoint(tmp_path):
    """checkpoint(job) is the first checkpoint of a run, as far as it says on which rows the run trains."""

    def save(job) -> SavedCheckpoint:
        path = tmp_path / "update-000002"
        path.mkdir()
        (path / "rows.json").write_text(dump_rows(job.source_rows))
        return SavedCheckpoint(path, CheckpointMeta(2, 2, 8, (), 1.0))

    return save


def test_a_run_is_not_resumed_with_other_rows(prepared, checkpoint):
    saved = checkpoint(prepared(prompts=10)[0])
    with pytest.raises(FolderRefused) as refused:
        prepared(prompts=12, resume=saved)
    first, line, advice = str(refused.value).splitlines()
    assert first == f"checkpoint {saved.path} is of a run with other rows in data.train:"
    assert re.fullmatch(r"  source train: 10 rows \(digest \w{16}\) there, 12 rows \(digest \w{16}\) here", line)
    assert advice.startswith(
        "Restore the files to continue that run. For a new run, leave --resume out and name another --output"
    )


def test_a_run_is_resumed_with_the_same_rows_which_the_next_checkpoint_names_again(prepared, checkpoint):
    first, _ = prepared()
    again, _ = prepared(resume=checkpoint(first))
    assert again.source_rows == first.source_rows != ()


def test_a_checkpoint_of_a_release_that_saved_no_rows_is_resumed_with_any(prepared, checkpoint):
    saved = checkpoint(prepared(prompts=10)[0])
    (saved.path / "rows.json").unlink()
    assert prepared(prompts=12, resume=saved)[0].source_rows[0].rows == 12


def test_a_run_is_resumed_with_other_held_out_rows(prepared, checkpoint, tmp_path):
    file = tmp_path / "held-out.jsonl"
    changes = {"data.validation": [{"name": "held-out", "files": {"paths": [file.name]}}]}
    file.write_text('{"prompt": "1>", "answer": "2"}\n')
    saved = checkpoint(prepared(changes)[0])
    file.write_text('{"prompt": "2>", "answer": "3"}\n')
    assert prepared(changes, resume=saved)[1].validation[0].prompt.text == "2>"


def test_supervised_rows_become_examples_and_no_prompts(prepared, removed):
    changes = {"mode": "SFT", "rollout": removed, "rewards": removed, "async": removed, "data.validation": HELD_OUT}
    _, data = prepared(changes | {"train.batch.microBatchSequences": 4})
    assert (len(data.examples), len(data.held_out)) == (64, 64)
    assert (len(data.prompts), len(data.validation)) == (0, 0)


@pytest.fixture
def ending(prepared, removed, tmp_path):
    """ending(text, …) prepares a run whose chat template ends turns with a text, with rows of conversations."""

    def build(end, *, supervised, **options):
        template = "{% for message in messages %}{{ message.content }}" + end + "{% endfor %}"
        (tmp_path / "chat.jinja").write_text(template)
        changes = {"data.chatTemplate": {"file": str(tmp_path / "chat.jinja")}, "data.maxPromptTokens": 64}
        if supervised:
            changes |= {"mode": "SFT", "rollout": removed, "rewards": removed, "async": removed}
            changes |= {"train.batch.microBatchSequences": 4}
        return prepared(changes, **options)[0]

    return build


@pytest.mark.parametrize("supervised", [False, True])
def test_a_template_that_ends_turns_with_another_token_is_refused(ending, supervised):
    with pytest.raises(DataError) as raised:
        ending("<|endoftext|>", supervised=supervised)
    assert raised.value.problems == (
        "the chat template ends an assistant's turn with <|endoftext|>, and the tokenizer's end token is <|im_end|>: "
        "a response would continue after its turn. Let the template end an assistant's turn with <|im_end|> (data.chatTemplate.file).",
    )


def test_a_template_that_writes_no_token_after_a_turn_is_refused_in_sft_only(ending):
    assert ending("", supervised=False).end_token == 2
    with pytest.raises(
        DataError, match="ends an assistant's turn with no special token, and the tokenizer's end token"
    ):
        ending("", supervised=True)


def test_a_run_that_has_begun_continues_with_its_template(ending, checkpoint):
    first = ending("<|im_end|>", supervised=False)
    again = ending("<|endoftext|>", supervised=False, resume=checkpoint(first))
    assert again.source_rows == first.source_rows


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


def test_replicas_read_pictures_also_if_only_held_out_prompts_have_some(prepared, tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "black.png")
    row = {"prompt": "<image>1", "images": ["black.png"], "answer": "0"}
    (tmp_path / "seen.jsonl").write_text(json.dumps(row) + "\n")
    seeing = SMALL["model"]["source"]["random"] | {"characters": "0123456789>=\nuseraitn", "vision": {}}
    changes = {"model.source.random": seeing, "data.chatTemplate": {"file": str(TEMPLATE)}, "data.maxPromptTokens": 64}
    job, _ = prepared(changes | {"data.validation": []})
    assert (job.pictures, job.replicas_read_pictures) == (False, False)
    seen = [{"name": "seen", "files": {"paths": ["seen.jsonl"]}}]
    job, data = prepared(changes | {"data.validation": seen})
    assert (job.pictures, job.replicas_read_pictures) == (False, True)
    assert len(data.validation[0].pictures) == 1


@pytest.mark.parametrize("engine", ["FSDP", "Megatron"])
def test_pictures_of_held_out_examples_alone_are_for_fsdp(tmp_path, engine):
    """Megatron's tower computes only if it trains."""
    (tmp_path / "text.jsonl").write_text('{"prompt": "which?", "answer": "1"}\n' * 20)
    folder = EXAMPLE.parent
    train = {"name": "train", "files": {"paths": [str(tmp_path / "text.jsonl")]}}
    changes = [f"train.engine={engine}", "train.batch.removePadding=false", f"data.train={json.dumps([train])}"]
    manifest = load_manifest(EXAMPLE, changes)

    def read():
        return prepare(manifest, base=folder, folder=RunFolder(tmp_path / "out"), resume=None, started=0.0)

    if engine == "FSDP":
        assert not read()[0].pictures
        return
    with pytest.raises(
        DataError, match=r"spec\.data\.validation: examples have pictures, and none of spec\.data\.train"
    ):
        read()
