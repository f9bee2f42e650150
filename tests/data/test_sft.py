from collections.abc import Mapping

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from qwen35_trainer.data import DataError, Prompt, SupervisedExample, character_tokenizer, encode_examples
from qwen35_trainer.data.sft import EncodedExamples

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
    assert example.loss_mask.tolist() == [False] * 4 + [True] * 2


def test_every_turn_of_the_assistant_trains_up_to_its_end_token() -> None:
    using = tokenizer(TEMPLATE)
    turns = [("user", "1+1"), ("assistant", "2"), ("user", "2+2"), ("assistant", "4")]
    prompt = Prompt("s/0", "s", tuple({"role": role, "content": content} for role, content in turns))
    [example] = encode_examples([prompt], using, 200)
    assert learned(example, using) == "2<|im_end|>4<|im_end|>"


def test_a_turn_ends_with_the_token_that_the_template_writes_although_the_tokenizer_has_another_end() -> None:
    """Folders of base models have such tokenizers."""
    using = tokenizer(TEMPLATE)
    using.eos_token = "<|endoftext|>"
    [example] = encode_examples([Prompt("s/0", "s", "1+1", "2")], using, 200)
    assert learned(example, using) == "2<|im_end|>"


def test_an_answer_is_the_last_turn_of_the_conversation() -> None:
    using = tokenizer(TEMPLATE)
    text = Prompt("s/0", "s", "1+1", "2")
    chat = Prompt("s/1", "s", ({"role": "user", "content": "1+1"},), "2")
    first, second = encode_examples([text, chat], using, 200)
    assert first.token_ids.tolist() == second.token_ids.tolist()
    assert learned(first, using) == learned(second, using) == "2<|im_end|>"


def test_an_answer_after_a_turn_of_the_assistant_is_refused() -> None:
    chat = ({"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"})
    with pytest.raises(DataError) as raised:
        encode_examples([Prompt("s/0", "s", chat, "2")], tokenizer(TEMPLATE), 200)
    assert raised.value.problems == (
        "prompt s/0: the conversation ends with an assistant's turn and the row has an answer too. Set files.answerField "
        "to a column that the rows do not have, or remove that turn.",
    )


def conversation(*turns: Mapping[str, object]) -> Prompt:
    return Prompt("s/0", "s", turns)


def test_a_turn_of_weight_0_is_read_and_not_learned() -> None:
    using = tokenizer(TEMPLATE)
    first = {"role": "assistant", "content": "b", "weight": 0}
    question, last = {"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}
    [example] = encode_examples([conversation(question, first, question, last)], using, 200)
    assert learned(example, using) == "c<|im_end|>"
    assert "<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user" in using.decode(example.token_ids)
    [example] = encode_examples([conversation(question, last, question, first)], using, 200)
    assert using.decode(example.token_ids).endswith("<|im_start|>assistant\nc<|im_end|>")


def test_a_template_does_not_see_weights() -> None:
    using = tokenizer(TEMPLATE.replace("{{ message.content }}", "{{ message.content }}{{ message.weight }}"))
    first = {"role": "assistant", "content": "b", "weight": 0}
    [example] = encode_examples([conversation(first, {"role": "assistant", "content": "c"})], using, 200)
    assert "0" not in using.decode(example.token_ids)


def test_a_conversation_in_which_no_turn_trains_is_refused() -> None:
    turn = {"role": "assistant", "content": "b", "weight": 0}
    with pytest.raises(DataError, match=r"s/0: every assistant's turn has weight 0 or train false\. Let one train"):
        encode_examples([conversation({"role": "user", "content": "a"}, turn)], tokenizer(TEMPLATE), 200)


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


def test_the_examples_of_a_run_are_two_arrays_of_5_bytes_per_token_and_read_as_before() -> None:
    rows = [Prompt(f"s/{row}", "s", "1+1="[: row + 1], "2") for row in range(4)]
    examples = encode_examples(rows, tokenizer(), 10)
    together = EncodedExamples(examples)
    assert len(together) == 4
    for ours, theirs in zip(together, examples, strict=True):
        assert ours.prompt is theirs.prompt
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert ours.loss_mask.tolist() == theirs.loss_mask.tolist()
    ids, mask = together[0].token_ids, together[0].loss_mask
    assert (ids.dtype, mask.dtype) == (np.int32, np.bool_)
    assert ids.base is together[-1].token_ids.base is not None
    assert mask.base is together[-1].loss_mask.base is not None
    assert not EncodedExamples(())
