import json
from collections.abc import Callable

import pytest
from transformers import PreTrainedTokenizerFast

from qwen35_trainer.data import ChatMessage, TemplateEncoder, character_tokenizer
from qwen35_trainer.data.template import EncodingError

type MakeQwen = Callable[..., PreTrainedTokenizerFast]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_SYSTEM = "{% if messages[0].role != 'system' %}<|im_start|>system\nbe kind<|im_end|>\n{% endif %}" + CHATML
WEATHER = {
    "type": "function",
    "function": {
        "name": "天气",
        "description": "今天的天气 ☀️",
        "parameters": {"type": "object", "properties": {"城市": {"type": "string"}}, "required": ["城市"]},
    },
}
CALL: ChatMessage = {
    "role": "assistant",
    "content": "我查一下。",
    "reasoning_content": "要用工具",
    "tool_calls": [{"type": "function", "function": {"name": "天气", "arguments": {"城市": "北京"}}}],
}


def say(role: str, content: str) -> ChatMessage:
    return {"role": role, "content": content}


def chatml(template: str = CHATML) -> TemplateEncoder:
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz.? \n")
    tokenizer.chat_template = template
    return TemplateEncoder(tokenizer)


@pytest.mark.parametrize(
    ("template", "thinking", "opening"),
    [
        ("qwen3_5_think", None, "<|im_start|>assistant\n<think>\n"),
        ("qwen3_5_think", False, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ("qwen3_5_nothink", None, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ("qwen3_5_nothink", True, "<|im_start|>assistant\n<think>\n"),
    ],
)
def test_the_thinking_switch_decides_how_the_answer_opens(
    make_qwen: MakeQwen, template: str, thinking: bool | None, opening: str
) -> None:
    tokenizer = make_qwen(template)
    encoder = TemplateEncoder(tokenizer, thinking)
    assert tokenizer.decode(encoder.generation_prompt) == opening
    prompt_text = tokenizer.decode(encoder.prompt("你好 🎉"))
    assert prompt_text == f"<|im_start|>user\n你好 🎉<|im_end|>\n{opening}"


def test_a_prompt_with_tools_is_golden(make_qwen: MakeQwen) -> None:
    tokenizer = make_qwen()
    encoder = TemplateEncoder(tokenizer)
    messages = [say("system", "你是助手。"), say("user", "北京天气 🌤️？")]
    tokens = encoder.chat(messages, [WEATHER])
    text = tokenizer.decode(tokens)
    head, rest = text.split("\n</tools>")
    assert head == (
        "<|im_start|>system\n# Tools\n\nYou have access to the following functions:\n\n<tools>\n"
        + json.dumps(WEATHER, ensure_ascii=False)
    )
    assert rest.endswith(
        "</IMPORTANT>\n\n你是助手。<|im_end|>\n<|im_start|>user\n北京天气 🌤️？<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )
    assert tokens[:3] == (248045, 8678, 198)
    assert tokens[-5:] == (248045, 74455, 198, 248068, 198)


def test_a_conversation_without_a_user_renders_as_if_it_were_allowed(make_qwen: MakeQwen) -> None:
    encoder = TemplateEncoder(make_qwen())
    prompt = encoder.render([say("system", "你是诗人。")], generation_prompt=True)
    assert prompt == "<|im_start|>system\n你是诗人。<|im_end|>\n<|im_start|>assistant\n<think>\n"
    spoken = encoder.render([say("system", "s"), say("assistant", "a"), say("tool", "t")], generation_prompt=False)
    assert spoken == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\na<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nt\n</tool_response><|im_end|>\n"
    )
    assert encoder.render([], generation_prompt=True) == "<|im_start|>assistant\n<think>\n"


def test_a_template_that_takes_any_roles_gives_the_same_text_without_a_user() -> None:
    encoder = chatml()
    messages = [say("system", "s"), say("assistant", "a"), say("tool", "t")]
    direct = "<|im_start|>system\ns<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n<|im_start|>tool\nt<|im_end|>\n"
    assert encoder.render(messages, generation_prompt=False) == direct


def test_a_template_that_hides_the_empty_message_is_refused_with_the_fix() -> None:
    encoder = chatml("{% for message in messages %}{{ message.content }}{{ messages|length }}{% endfor %}")
    with pytest.raises(EncodingError, match=r"cannot be determined\. Add a user message"):
        encoder.render([say("system", "s")], generation_prompt=False)


def test_what_the_template_refuses_is_an_error_with_its_reason(make_qwen: MakeQwen) -> None:
    encoder = TemplateEncoder(make_qwen())
    with pytest.raises(EncodingError, match="rejects the roles user, system: System message must be at the beginning"):
        encoder.chat([say("user", "a"), say("system", "b")])
    with pytest.raises(EncodingError, match="No user query found"):
        encoder.chat([say("user", "<tool_response>\n1\n</tool_response>")])


def test_the_system_prompt_is_what_stands_before_the_first_turn(make_qwen: MakeQwen) -> None:
    assert TemplateEncoder(make_qwen()).system_prompt == ()
    encoder = chatml(WITH_SYSTEM)
    assert encoder.tokenizer.decode(encoder.system_prompt) == "<|im_start|>system\nbe kind<|im_end|>\n"


def test_the_separator_is_what_follows_an_end_token(make_qwen: MakeQwen) -> None:
    tokenizer = make_qwen()
    assert tokenizer.decode(TemplateEncoder(tokenizer).separator) == "\n"
    assert chatml(CHATML.replace("<|im_end|>\n", "<|im_end|>")).separator == ()


@pytest.mark.parametrize("thinking", [None, False])
def test_appended_tool_results_equal_a_rendering_of_the_whole_conversation(
    make_qwen: MakeQwen, thinking: bool | None
) -> None:
    encoder = TemplateEncoder(make_qwen(), thinking)
    call = dict(CALL) if thinking is None else {key: CALL[key] for key in CALL if key != "reasoning_content"}
    question = [say("user", "北京 ☀️？")]
    results = [say("tool", "晴，25°C 🌞"), say("tool", "{}")]
    prompt = encoder.chat(question, [WEATHER])
    whole = encoder.render([*question, call], [WEATHER], generation_prompt=False)
    opened = encoder.render(question, [WEATHER], generation_prompt=True)
    response = encoder.rendered(whole.removeprefix(opened).removesuffix("\n"))
    assert response[-1] == encoder.tokenizer.eos_token_id
    appended = prompt + response + encoder.continuation(results)
    assert appended == encoder.chat([*question, call, *results], [WEATHER])


def test_a_further_question_is_appended_without_changing_the_conversation(make_qwen: MakeQwen) -> None:
    tokenizer = make_qwen()
    continuation = TemplateEncoder(tokenizer, thinking=False).continuation([say("user", "再见 👋")])
    assert tokenizer.decode(continuation) == (
        "\n<|im_start|>user\n再见 👋<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert TemplateEncoder(tokenizer).continuation([say("user", "b")])[:2] == (198, 248045)


def test_a_default_system_prompt_is_not_repeated_between_turns() -> None:
    encoder = chatml(WITH_SYSTEM)
    appended = encoder.tokenizer.decode(encoder.continuation([say("user", "b")]))
    assert appended == "\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
