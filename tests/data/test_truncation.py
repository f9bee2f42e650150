import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.data import DataError, Prompt, character_tokenizer, encode_examples, encode_prompts
from qwen35_trainer.data.truncation import kept_positions, select
from qwen35_trainer.manifest.data import Overlong

RULES = st.sampled_from(["TruncateLeft", "TruncateRight", "TruncateMiddle"])
DIGITS = character_tokenizer("0123456789=")


def prompt(text: str, answer: str | None = None) -> Prompt:
    return Prompt("s/0", "s", text, answer)


@pytest.mark.parametrize(
    ("rule", "remaining"), [("TruncateLeft", "56789"), ("TruncateRight", "01234"), ("TruncateMiddle", "01789")]
)
def test_a_prompt_is_cut_at_the_side_that_the_rule_names(
    rule: Overlong, remaining: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        [encoded] = encode_prompts([prompt("0123456789")], DIGITS, 5, rule)
    assert DIGITS.decode(encoded.token_ids) == remaining
    assert "cut 1 of 1 prompts, longer than data.maxPromptTokens 5 tokens" in caplog.text


@given(st.integers(2, 60).flatmap(lambda length: st.tuples(st.just(length), st.integers(1, length - 1))), RULES)
def test_what_stays_fills_the_limit_in_order(sizes: tuple[int, int], rule: Overlong) -> None:
    length, limit = sizes
    positions = select(np.arange(length), kept_positions(length, limit, rule)).tolist()
    assert len(positions) == limit
    assert positions == sorted(set(positions))


@pytest.mark.parametrize(
    ("rule", "text", "learned"),
    [
        ("TruncateLeft", "4=567<|im_end|>", "567<|im_end|>"),
        ("TruncateRight", "01234=", ""),
        ("TruncateMiddle", "01267<|im_end|>", "67<|im_end|>"),
    ],
)
def test_tokens_and_mask_of_an_example_are_cut_alike(rule: Overlong, text: str, learned: str) -> None:
    rows = [prompt("01234=", "567")]
    if not learned:
        with pytest.raises(DataError, match=r"prompt s/0, 10 tokens cut to .* 6: nothing to learn is left"):
            encode_examples(rows, DIGITS, 6, rule)
        return
    [example] = encode_examples(rows, DIGITS, 6, rule)
    assert DIGITS.decode(example.token_ids) == text
    assert (
        DIGITS.decode([t for t, trains in zip(example.token_ids, example.loss_mask, strict=True) if trains]) == learned
    )


def test_a_lone_target_at_the_first_position_is_nothing_to_learn() -> None:
    with pytest.raises(DataError, match="nothing to learn is left"):
        encode_examples([prompt("0", "1")], DIGITS, 1, "TruncateLeft")


def test_the_refusal_names_every_other_rule() -> None:
    with pytest.raises(DataError, match=r"overlongPrompts: Skip to leave them out, or Truncate… to cut them"):
        encode_prompts([prompt("0123")], DIGITS, 2)
