"""Masks under the published tokenizer and templates of Qwen3.5."""

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from qwen35_trainer.data import ChatMessage, DataError, Prompt, SupervisedExample, TemplateEncoder, encode_examples
from tests.profiles import examples

type MakeQwen = Callable[..., PreTrainedTokenizerFast]

TOOLS = ({"type": "function", "function": {"name": "加", "parameters": {"properties": {"数": {"type": "array"}}}}},)
CONVERSATION: tuple[ChatMessage, ...] = (
    {"role": "system", "content": "你会算术。"},
    {"role": "user", "content": "1+2 等于几？🤔"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "用工具",
        "tool_calls": [{"function": {"name": "加", "arguments": {"数": [1, 2]}}}],
    },
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "等于 3 🎉", "reasoning_content": "完成"},
    {"role": "user", "content": "谢谢 👩‍👩‍👧"},
    {"role": "assistant", "content": "不客气！", "reasoning_content": "礼貌"},
)


def learned(example: SupervisedExample, using: PreTrainedTokenizerFast) -> list[str]:
    """The stretches of the example that train, one text each."""
    runs: list[list[int]] = []
    before = False
    for token, trains in zip(example.token_ids, example.loss_mask, strict=True):
        if trains and not before:
            runs.append([])
        if trains:
            runs[-1].append(token)
        before = trains
    return [using.decode(run) for run in runs]


def test_every_turn_is_learned_once_in_the_context_that_the_model_sees(make_qwen: MakeQwen) -> None:
    tokenizer = make_qwen()
    first, second = encode_examples([Prompt("s/0", "s", CONVERSATION, tools=TOOLS)], tokenizer, 2000)
    assert learned(first, tokenizer) == [
        "用工具\n</think>\n\n<tool_call>\n<function=加>\n<parameter=数>\n[1, 2]\n</parameter>\n</function>\n</tool_call>"
        "<|im_end|>",
        "完成\n</think>\n\n等于 3 🎉<|im_end|>",
    ]
    assert learned(second, tokenizer) == ["礼貌\n</think>\n\n不客气！<|im_end|>"]
    context = tokenizer.decode(second.token_ids)
    assert "用工具" not in context
    assert context.endswith("<|im_start|>assistant\n<think>\n礼貌\n</think>\n\n不客气！<|im_end|>")
    assert "<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n完成" in tokenizer.decode(
        first.token_ids
    )


def test_tokens_are_those_of_a_generation_even_without_reasoning(make_qwen: MakeQwen) -> None:
    tokenizer = make_qwen()
    row = Prompt("s/0", "s", "你好", "好")
    [example] = encode_examples([row], tokenizer, 100)
    prompt_tokens = TemplateEncoder(tokenizer).prompt("你好")
    # Encoded as one text, the two newlines of an empty thought are one token, which no generation would have there.
    assert tuple(example.token_ids[: len(prompt_tokens)]) == prompt_tokens
    learned_tokens = len(example.token_ids) - len(prompt_tokens)
    assert example.loss_mask.tolist() == [False] * len(prompt_tokens) + [True] * learned_tokens
    assert learned(example, tokenizer) == ["\n</think>\n\n好<|im_end|>"]


@pytest.mark.parametrize("template", ["qwen3_5_think", "qwen3_5_nothink"])
def test_without_thinking_the_empty_thought_belongs_to_the_context(make_qwen: MakeQwen, template: str) -> None:
    tokenizer = make_qwen(template)
    [example] = encode_examples([Prompt("s/0", "s", "你好", "好 😀")], tokenizer, 100, thinking=False)
    assert learned(example, tokenizer) == ["好 😀<|im_end|>"]


def test_reasoning_without_thinking_is_refused_by_message(make_qwen: MakeQwen) -> None:
    with pytest.raises(DataError, match=r"s/0: message 2 does not begin with .* Check data.chatTemplate.thinking"):
        encode_examples([Prompt("s/0", "s", CONVERSATION)], make_qwen(), 2000, thinking=False)


def test_a_conversation_that_the_assistant_opens_is_learned(make_qwen: MakeQwen) -> None:
    tokenizer = make_qwen()
    messages: tuple[ChatMessage, ...] = (
        {"role": "system", "content": "s"},
        {"role": "assistant", "content": "欢迎 🙋"},
    )
    [example] = encode_examples([Prompt("s/0", "s", messages)], tokenizer, 100, thinking=False)
    assert tokenizer.decode(example.token_ids) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n欢迎 🙋<|im_end|>"
    )


WORDS = st.text(st.sampled_from("a 好\n🎉."), max_size=6)
TURNS = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "tool"]), "content": WORDS})
    | st.fixed_dictionaries({"role": st.just("assistant"), "content": WORDS, "reasoning_content": WORDS}),
    min_size=1,
    max_size=7,
)


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=TURNS)
def test_each_turn_trains_once_and_after_exactly_the_prompt_of_generation(
    make_qwen: MakeQwen, turns: list[ChatMessage]
) -> None:
    tokenizer = make_qwen()
    encoder = TemplateEncoder(tokenizer)
    spoken = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
    if not spoken:
        return
    examples = encode_examples([Prompt("s/0", "s", tuple(turns))], tokenizer, 2000)
    contexts: list[str] = []
    for example in examples:
        mask = [False, *example.loss_mask.tolist()]
        starts = [at for at in range(len(example.loss_mask)) if mask[at + 1] and not mask[at]]
        contexts += [tokenizer.decode(example.token_ids[:at]) for at in starts]
    assert contexts == [encoder.render(turns[:index], generation_prompt=True) for index in spoken]
