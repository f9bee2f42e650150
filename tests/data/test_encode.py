import logging
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from qwen35_trainer.data import DataError, Prompt, character_tokenizer, encode_prompts
from qwen35_trainer.data.encode import EncodedPrompts

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def plain() -> PreTrainedTokenizerFast:
    return character_tokenizer("0123456789+=abcdefghijklmnopqrstuvwxyz\n")


def templated() -> PreTrainedTokenizerFast:
    tokenizer = plain()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def prompts(*texts: str) -> list[Prompt]:
    return [Prompt(f"s/{row}", "s", text) for row, text in enumerate(texts)]


def test_a_text_is_encoded_as_it_stands_without_a_template() -> None:
    tokenizer = plain()
    [encoded] = encode_prompts(prompts("1+1="), tokenizer, 10)
    assert tokenizer.decode(encoded.token_ids) == "1+1="
    assert encoded.prompt.id == "s/0"


def test_a_text_is_a_users_message_with_a_template() -> None:
    tokenizer = templated()
    messages = ({"role": "user", "content": "1+1="},)
    text, chat = encode_prompts([*prompts("1+1="), Prompt("s/1", "s", messages)], tokenizer, 100)
    assert tokenizer.decode(text.token_ids) == "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"
    assert text.token_ids.tolist() == chat.token_ids.tolist()


def test_every_prompt_without_tokens_is_named_with_the_reason() -> None:
    chat = Prompt("s/9", "s", ({"role": "user", "content": "a"},))
    with pytest.raises(DataError) as raised:
        encode_prompts([*prompts("1+1", "1×1", "A?"), chat], plain(), 10)
    first, second, third = raised.value.problems
    assert first.startswith("prompt s/1: no token for '×'. Add to model.source.random.characters")
    assert second.startswith("prompt s/2: no token for '?', 'A'.")
    assert third.startswith("prompt s/9: chat messages need a chat template")


def test_a_character_without_token_is_blamed_on_the_tokenizer_of_the_folder(tmp_path: Path) -> None:
    plain().save_pretrained(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    with pytest.raises(DataError) as raised:
        encode_prompts(prompts("1×1"), tokenizer, 10)
    assert raised.value.problems == (f"prompt s/0: the tokenizer of {tmp_path} has no token for '×'. Change the text.",)


def test_a_conversation_that_the_template_refuses_is_named() -> None:
    chat = Prompt("s/0", "s", ({"role": "user", "content": "a"}, {"role": "tool", "content": "b"}))
    with pytest.raises(DataError, match="prompt s/0: the chat template rejects the roles user, tool: no tools"):
        encode_prompts([chat], templated(), 100)


def test_a_prompt_that_ends_with_a_turn_of_the_assistant_is_refused() -> None:
    chat = Prompt("s/0", "s", ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}))
    with pytest.raises(DataError) as raised:
        encode_prompts([chat], templated(), 100)
    assert raised.value.problems == (
        "prompt s/0: the prompt ends with an assistant's turn, and the model would write another one after it. Remove that "
        "turn. A reference answer belongs in files.answerField.",
    )


@pytest.mark.parametrize("using", [plain(), templated()])
def test_half_of_a_character_is_named_with_its_prompt(using: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError) as raised:
        encode_prompts(prompts("1", "nice \ud83d"), using, 100)
    [problem] = raised.value.problems
    assert problem.startswith("prompt s/1: no token for half of a character in UTF-16, '\\ud83d' after ")
    assert problem.endswith("nice '. Write the whole character, or remove the half.")


def test_overlong_prompts_are_refused_together_with_the_limit_that_fits() -> None:
    with pytest.raises(DataError) as raised:
        encode_prompts(prompts(*["1"] * 3, *["1" * length for length in range(4, 12)]), plain(), 3)
    [problem] = raised.value.problems
    assert problem.startswith("8 longer than data.maxPromptTokens 3: s/3 (4 tokens), s/4 (5 tokens),")
    assert "s/7 (8 tokens) and 3 more. Raise data.maxPromptTokens to 11, or set data.overlongPrompts: Skip" in problem


def test_a_prompt_of_exactly_the_limit_is_kept() -> None:
    assert len(encode_prompts(prompts("123"), plain(), 3)) == 1


def test_skipped_prompts_are_counted_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        kept = encode_prompts(prompts("1", "1234", "12"), plain(), 3, "Skip")
    assert [entry.prompt.id for entry in kept] == ["s/0", "s/2"]
    assert "left out 1 of 3 prompts, longer than data.maxPromptTokens 3 tokens" in caplog.text


def test_skipping_every_prompt_is_an_error() -> None:
    with pytest.raises(DataError, match=r"no prompt is left, all 2 are longer .* raise data.maxPromptTokens"):
        encode_prompts(prompts("1234", "12345"), plain(), 3, "Skip")


def test_no_prompts_are_an_error() -> None:
    with pytest.raises(DataError, match=r"no prompt is left\. Add prompts\."):
        encode_prompts([], plain(), 3)


def test_the_encoded_prompts_of_a_run_are_one_array_and_read_as_before() -> None:
    encoded = encode_prompts([Prompt(f"s/{row}", "s", "1+1="[: row + 1]) for row in range(4)], plain(), 9)
    together = EncodedPrompts(encoded)
    assert len(together) == 4
    assert [(each.prompt, each.token_ids.tolist()) for each in together] == [
        (each.prompt, each.token_ids.tolist()) for each in encoded
    ]
    assert together[-1].token_ids.base is together[0].token_ids.base is not None
    assert [each.prompt.id for each in together[1:3]] == ["s/1", "s/2"]
    assert not EncodedPrompts(())
