"""Supervised examples: which tokens of a row the model learns to write."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qwen35_trainer.data.encode import Overlong, within_limit
from qwen35_trainer.data.prompt import Message, Prompt
from qwen35_trainer.data.template import EncodingError, TemplateEncoder, Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class SupervisedExample:
    """One sequence. loss_mask: (tokens,) true where the token is a target; as long as token_ids."""

    prompt: Prompt
    token_ids: Tokens
    loss_mask: tuple[bool, ...]


def encode_examples(
    prompts: Sequence[Prompt],
    tokenizer: "PreTrainedTokenizerBase",
    max_tokens: int,
    overlong: Overlong = "Error",
) -> list[SupervisedExample]:
    """Each row as a sequence whose answer, and the token that ends it, train; the prompt does not.

    Rows are a prompt with an answer, or chat messages, of which every assistant's turn trains; an answer beside
    messages is the last turn. max_tokens bounds prompt and answer together (data.maxPromptTokens +
    data.maxResponseTokens). Raises DataError with all problems at once.
    """
    encoder = TemplateEncoder(tokenizer)
    examples: list[SupervisedExample] = []
    problems: list[str] = []
    for prompt in prompts:
        try:
            examples.append(_example(prompt, encoder))
        except EncodingError as reason:
            problems.append(f"prompt {prompt.id}: {reason}")
    return within_limit(examples, max_tokens, "data.maxPromptTokens + data.maxResponseTokens", overlong, problems)


def _example(prompt: Prompt, encoder: TemplateEncoder) -> SupervisedExample:
    if isinstance(prompt.text, str) and prompt.answer is None:
        raise EncodingError("no answer to learn. Fill the answerField, or use chat messages with an assistant's turn.")
    if isinstance(prompt.text, str) and not encoder.has_template:
        return _plain(prompt, prompt.text, str(prompt.answer), encoder)
    turns: list[Message] = (
        [{"role": "user", "content": prompt.text}] if isinstance(prompt.text, str) else list(prompt.text)
    )
    if prompt.answer is not None:
        turns.append({"role": "assistant", "content": prompt.answer})
    token_ids, mask = _conversation(turns, encoder)
    return SupervisedExample(prompt, token_ids, mask)


def _plain(prompt: Prompt, text: str, answer: str, encoder: TemplateEncoder) -> SupervisedExample:
    end = encoder.tokenizer.eos_token_id
    if end is None:
        raise EncodingError("the tokenizer has no end-of-sequence token, so that an answer would never end")
    asked = encoder.text(text)
    learned = (*encoder.text(answer), end)
    return SupervisedExample(prompt, asked + learned, (False,) * len(asked) + (True,) * len(learned))


def _conversation(turns: Sequence[Message], encoder: TemplateEncoder) -> tuple[Tokens, tuple[bool, ...]]:
    """Tokens of a conversation, and the mask of the assistant's turns.

    A turn is what rendering one message more adds to the rendered prefix (with the turn opened). Templates that
    rewrite earlier turns, as Qwen3's does with reasoning, have no such prefix and are refused, since the model would
    train on a context it never sees.
    """
    token_ids = encoder.chat(turns, generation_prompt=False)
    mask = [False] * len(token_ids)
    spoken = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
    if not spoken:
        raise EncodingError("no assistant's turn to learn. Add one, or fill the answerField.")
    for index in spoken:
        opened = encoder.chat(turns[:index])
        spoken_through = encoder.chat(turns[: index + 1], generation_prompt=False)
        if token_ids[: len(spoken_through)] != spoken_through or spoken_through[: len(opened)] != opened:
            raise EncodingError(
                f"the chat template rewrites message {index} once later ones follow. Write one row per assistant's turn."
            )
        for position in range(len(opened), _end_of_turn(spoken_through, len(opened), encoder)):
            mask[position] = True
    return token_ids, tuple(mask)


def _end_of_turn(token_ids: Tokens, start: int, encoder: TemplateEncoder) -> int:
    """Just after the last end token: a separator that the template puts behind it is never generated."""
    end = encoder.tokenizer.eos_token_id
    for position in range(len(token_ids) - 1, start - 1, -1):
        if token_ids[position] == end:
            return position + 1
    return len(token_ids)
