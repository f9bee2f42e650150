import logging
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.data.encode import EncodedPrompt
from qwen35_trainer.data.prompt import Prompt, Video
from qwen35_trainer.progress.sample_file import read_samples
from qwen35_trainer.rewards.response_decoder import ResponseDecoder
from qwen35_trainer.rewards.reward import CombinedScore
from qwen35_trainer.rollout.rollout_engine import Completed, EndReason, GeneratedTokens
from qwen35_trainer.rollout.version_runs import VersionRuns
from qwen35_trainer.runtime.assembly import ScoredGroup
from qwen35_trainer.runtime.response_samples import Sampler, held_out, pieces, prompt_text, sample, trained
from tests.patience import PATIENCE


def utf8(tokens: Sequence[int]) -> str:
    """One token for each byte."""
    return bytes(tokens).decode(errors="replace")


class Bytes:
    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return utf8(tokens)


def spelled(text: bytes, *versions: int) -> GeneratedTokens:
    born = VersionRuns.of(versions or [0] * len(text))
    return GeneratedTokens(np.frombuffer(text, np.uint8).astype(np.int32), np.zeros(len(text), np.float32), born)


def group(*rewards: float | None, name: str = "s/0", text: bytes = b"ok") -> ScoredGroup:
    prompt = EncodedPrompt(Prompt(name, "s", "question", "answer"), np.ones(1, np.int32))
    sequences = tuple(Completed((0, index), spelled(text), EndReason.STOP) for index in range(len(rewards)))
    return ScoredGroup(0, prompt, sequences, tuple(CombinedScore(reward, {}, {}) for reward in rewards))


def test_of_an_update_the_best_and_the_worst_of_the_first_group_that_teaches_something_are_shown():
    flat, graded, later = group(1.0, 1.0), group(0.5, None, 0.0, 1.0, 0.0), group(0.0, 1.0)
    assert trained([flat, graded, later]) == [(graded, 3), (graded, 2)]
    assert trained([flat, flat]) == [(flat, 0)]
    assert trained([group(None)]) != []
    assert trained([]) == []


def test_of_an_evaluation_the_same_prompts_are_shown_each_time():
    groups = [group(1.0, name=f"s/{row}") for row in range(10)]
    assert [chosen.prompt.prompt.id for chosen, _ in held_out(groups)] == ["s/0", "s/2", "s/5", "s/7"]
    assert [index for _, index in held_out(groups[:2])] == [0, 0]
    assert held_out([]) == []


def test_a_text_is_parted_where_the_lag_changes():
    assert pieces(spelled(b"abcd", 1, 1, 3, 4), 4, utf8) == [(3, "ab"), (1, "c"), (0, "d")]


def test_a_character_of_several_tokens_goes_with_the_last_of_them():
    assert pieces(spelled("aé".encode(), 0, 0, 1), 1, utf8) == [(1, "a"), (0, "é")]
    assert pieces(spelled(b"a\xffb", 0, 0, 1), 1, utf8) == [(1, "a\ufffd"), (0, "b")]


@given(st.data(), st.one_of(st.binary(max_size=12), st.text(max_size=6).map(str.encode)))
def test_the_parts_are_the_whole_text(data: st.DataObject, text: bytes):
    versions = data.draw(st.lists(st.integers(0, 3), min_size=len(text), max_size=len(text)).map(sorted))
    assert "".join(part for _, part in pieces(spelled(text, *versions), 3, utf8)) == utf8(text)


def test_a_sample_has_its_answer_and_bounded_texts():
    shown = sample((group(0.25, text=b"x" * 9000), 0), 0, utf8)
    assert (shown.prompt_id, shown.prompt, shown.answer, shown.reward, shown.tokens) == (
        "s/0",
        "question",
        "answer",
        0.25,
        9000,
    )
    assert sum(len(part) for _, part in shown.response) < 4100
    assert shown.response[1] == (None, " … 5,000 characters omitted … ")


def test_pictures_of_a_prompt_are_named():
    parts = [
        {"type": "image"},
        {"type": "text", "text": "and"},
        {"type": "image"},
        {"type": "video"},
        {"type": "image"},
    ]
    prompt = Prompt(
        "s/0",
        "s",
        (
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": parts},
            {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [{"name": "look"}]},
        ),
        images=(Path("/data/cat.png"), b"12345"),
        videos=(Video((b"1", b"2"), 2.0),),
    )
    assert prompt_text(prompt) == (
        "system: Be brief.\n\n"
        "user: [image cat.png]\nand\n[image of 5 bytes]\n[video of 2 frames, 2 per second]\n[image]\n\n"
        'assistant: hm\n\n[{"name": "look"}]'
    )


def test_what_the_loop_passes_is_in_the_file_when_the_sampler_is_closed(tmp_path):
    sampler = Sampler(tmp_path / "samples.jsonl", ResponseDecoder.of(Bytes()))
    sampler.evaluated([group(1.0)], update=0, version=0)
    sampler.trained([group(0.0, 1.0)], update=2, version=3)
    sampler.close()
    moments = read_samples(tmp_path / "samples.jsonl")
    assert [(each.kind, each.update, each.version, len(each.samples)) for each in moments] == [
        ("held out", 0, 0, 1),
        ("trained", 2, 3, 2),
    ]
    assert moments[1].samples[0].response == ((3, "ok"),)


def test_a_file_that_cannot_be_written_is_warned_of_once_and_the_run_continues(tmp_path, caplog):
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        sampler = Sampler(tmp_path / "file" / "samples.jsonl", ResponseDecoder.of(Bytes()))
        for update in range(200):
            sampler.trained([group(0.0, 1.0)], update=update, version=0)
        sampler.close()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "samples of responses are missing in" in caplog.text


@pytest.mark.parametrize("line", ["{}\n", "no JSON\n"])
def test_a_file_of_something_else_is_left_as_it_is(tmp_path, caplog, line):
    (tmp_path / "samples.jsonl").write_text(line)
    Sampler(tmp_path / "samples.jsonl", ResponseDecoder.of(Bytes())).close()
    assert "samples.jsonl, line 1" in caplog.text
    assert (tmp_path / "samples.jsonl").read_text() == line


def test_closing_does_not_wait_for_the_room_of_a_file_that_could_not_be_opened(tmp_path):
    """The queue is full before the thread fails."""
    (tmp_path / "file").touch()
    started = threading.Event()

    class Slow(ResponseDecoder):
        def load(self):
            started.wait(PATIENCE)
            raise OSError("the tokenizer cannot be read")

    sampler = Sampler(tmp_path / "samples.jsonl", Slow(None))
    for update in range(100):
        sampler.trained([group(0.0, 1.0)], update=update, version=0)
    started.set()
    sampler.close()
    assert sampler._queue.empty()
