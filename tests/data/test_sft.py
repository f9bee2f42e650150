import pytest
from transformers import PreTrainedTokenizerFast

from qwen35_trainer.data import DataError, Prompt, SupervisedExample, character_tokenizer, encode_examples

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Marks the assistant's last turn, and only that: earlier turns change when a later one follows.
REWRITING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and loop.last %}!{% endif %}{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    characters = character_tokenizer("0123456789+=!abcdefghijklmnopqrstuvwxyz\n")
    characters.chat_template = template
    return characters


def learned(example: SupervisedExample, using: PreTrainedTokenizerFast) -> str:
    assert len(example.loss_mask) == len(example.token_ids)
    return using.decode([token for token, trains in zip(example.token_ids, example.loss_mask, strict=True) if trains])


def test_the_answer_and_its_end_train_and_the_prompt_does_not() -> None:
    using = tokenizer()
    [example] = encode_examples([Prompt("s/0", "s", "1+1=", "2")], using, 10)
    assert using.decode(example.token_ids) == "1+1=2<|im_end|>"
    assert example.loss_mask == (False,) * 4 + (True,) * 2


def test_every_turn_of_the_assistant_trains_up_to_its_end_token() -> None:
    using = tokenizer(TEMPLATE)
    turns = [("user", "1+1"), ("assistant", "2"), ("user", "2+2"), ("assistant", "4")]
    prompt = Prompt("s/0", "s", tuple({"role": role, "content": content} for role, content in turns))
    [example] = encode_examples([prompt], using, 200)
    assert learned(example, using) == "2<|im_end|>4<|im_end|>"


def test_an_answer_is_the_last_turn_of_the_conversation() -> None:
    using = tokenizer(TEMPLATE)
    text = Prompt("s/0", "s", "1+1", "2")
    chat = Prompt("s/1", "s", ({"role": "user", "content": "1+1"},), "2")
    first, second = encode_examples([text, chat], using, 200)
    assert first.token_ids == second.token_ids
    assert learned(first, using) == learned(second, using) == "2<|im_end|>"


def test_rows_that_teach_nothing_are_all_named() -> None:
    prompts = [Prompt("s/0", "s", "1+1="), Prompt("s/1", "s", ({"role": "user", "content": "a"},))]
    with pytest.raises(DataError) as raised:
        encode_examples(prompts, tokenizer(TEMPLATE), 200)
    first, second = raised.value.problems
    assert "prompt s/0: no answer to learn" in first
    assert "prompt s/1: no assistant's turn to learn" in second


def test_a_template_that_rewrites_earlier_turns_gives_one_example_for_each() -> None:
    using = tokenizer(REWRITING)
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    prompt = Prompt("s/0", "s", tuple({"role": role, "content": content} for role, content in turns))
    # The mark is what the template writes before a last turn, and the model's opening has it not: it is learned.
    first, second = encode_examples([prompt], using, 200)
    assert using.decode(first.token_ids) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n!b<|im_end|>"
    assert using.decode(second.token_ids) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n!d<|im_end|>"
    )
    assert [learned(each, using) for each in (first, second)] == ["!b<|im_end|>", "!d<|im_end|>"]


def test_what_follows_the_last_turn_is_left_out() -> None:
    using = tokenizer(TEMPLATE)
    turns = [("user", "a"), ("assistant", "b"), ("user", "c")]
    prompt = Prompt("s/0", "s", tuple({"role": role, "content": content} for role, content in turns))
    [example] = encode_examples([prompt], using, 200)
    assert using.decode(example.token_ids) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>"


def test_prompt_and_answer_share_one_limit() -> None:
    with pytest.raises(DataError, match=r"1 longer than data.maxPromptTokens \+ data.maxResponseTokens 5: s/0 \(6 "):
        encode_examples([Prompt("s/0", "s", "1+1=", "2")], tokenizer(), 5)
