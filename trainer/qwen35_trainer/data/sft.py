"""Supervised examples: which tokens of a row the model learns to write.

    system, user, assistant ₁, tool, assistant ₂, user, assistant ₃
                  ▔▔▔▔▔▔▔▔▔▔▔        ▔▔▔▔▔▔▔▔▔▔▔        ▔▔▔▔▔▔▔▔▔▔▔     learned: what the model writes, with its end tokens

A turn is learned in the context that the model has when it writes it: the conversation before it, rendered with the
assistant's turn opened. Qwen3.5's template leaves the reasoning of earlier turns out once the user speaks again, so
that no single text holds all those contexts. Such a row becomes one example for each stretch that the template leaves
alone: above ₁ and ₂ (tool results are no user's message), and ₃. Each turn is learned once.

Context and response are encoded apart, as in generation: a token never reaches over the place where the model begins.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from qwen35_trainer.data.picture_reader import PictureReader, PictureSet
from qwen35_trainer.data.prompt import Message, Prompt
from qwen35_trainer.data.template import EncodingError, TemplateEncoder, Tokens
from qwen35_trainer.data.truncation import CutError, fit, select
from qwen35_trainer.spec.data import Overlong

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

type Mask = tuple[bool, ...]


@dataclass(frozen=True)
class SupervisedExample:
    """One sequence. loss_mask: (tokens,) true where the token is a target; as long as token_ids."""

    prompt: Prompt
    token_ids: Tokens
    loss_mask: Mask
    pictures: PictureSet | None = None
    """What its placeholders stand for; read when a batch needs it. None: text only."""


@dataclass(frozen=True)
class _Turn:
    """An assistant's turn. opened: the text that it continues. through: that text with the turn."""

    index: int
    opened: str
    through: str


def encode_examples(
    prompts: Sequence[Prompt],
    tokenizer: "PreTrainedTokenizerBase",
    max_tokens: int,
    overlong: Overlong = "Error",
    *,
    thinking: bool | None = None,
    reader: PictureReader | None = None,
) -> list[SupervisedExample]:
    """Each row as sequences whose answers, and the tokens that end them, train; the rest does not.

    Rows are a prompt with an answer, or chat messages, of which every assistant's turn trains; an answer beside
    messages is the last turn. A row gives one example, or several where the template rewrites earlier turns.
    max_tokens bounds prompt and answer together (data.maxPromptTokens + data.maxResponseTokens). thinking: see
    TemplateEncoder. reader: of images and videos, None for a model without a vision tower.
    Raises DataError with all problems at once.
    """
    encoder = TemplateEncoder(tokenizer, thinking)
    examples: list[SupervisedExample] = []
    problems: list[str] = []
    for prompt in prompts:
        try:
            examples += _examples(prompt, encoder, reader)
        except EncodingError as reason:
            problems.append(f"prompt {prompt.id}: {reason}")

    def cut(example: SupervisedExample, parts: tuple[range, range]) -> SupervisedExample:
        return _cut(example, parts, reader)

    return fit(examples, max_tokens, "data.maxPromptTokens + data.maxResponseTokens", overlong, problems, cut)


def _examples(prompt: Prompt, encoder: TemplateEncoder, reader: PictureReader | None) -> list[SupervisedExample]:
    if isinstance(prompt.text, str) and prompt.answer is None:
        raise EncodingError("no answer to learn. Fill the answerField, or use chat messages with an assistant's turn.")
    if isinstance(prompt.text, str) and not encoder.has_template:
        return [_plain(prompt, prompt.text, str(prompt.answer), encoder)]
    if reader is None and (prompt.images or prompt.videos):
        raise EncodingError(
            "the model has no vision tower for its images and videos. Remove them, or use one that has."
        )
    answer: tuple[Message, ...] = ()
    if prompt.answer is not None:
        answer = ({"role": "assistant", "content": prompt.answer},)
    messages = (*prompt.messages, *answer)
    return [_example(stretch, messages, prompt, encoder, reader) for stretch in _stretches(messages, prompt, encoder)]


def _plain(prompt: Prompt, text: str, answer: str, encoder: TemplateEncoder) -> SupervisedExample:
    end = encoder.tokenizer.eos_token_id
    if end is None:
        raise EncodingError("the tokenizer has no end-of-sequence token, so that an answer would never end")
    asked = encoder.text(text)
    learned = (*encoder.text(answer), end)
    return SupervisedExample(prompt, asked + learned, (False,) * len(asked) + (True,) * len(learned))


def _stretches(messages: Sequence[Message], prompt: Prompt, encoder: TemplateEncoder) -> list[list[_Turn]]:
    """The assistant's turns, those together whose contexts one text holds; in order."""
    waiting = [
        _turn(index, messages, prompt, encoder)
        for index, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    if not waiting:
        raise EncodingError("no assistant's turn to learn. Add one, or fill the answerField.")
    stretches: list[list[_Turn]] = []
    while waiting:
        whole = waiting[-1].through
        stretches.insert(0, [turn for turn in waiting if whole.startswith(turn.through)])
        waiting = [turn for turn in waiting if not whole.startswith(turn.through)]
    return stretches


def _turn(index: int, messages: Sequence[Message], prompt: Prompt, encoder: TemplateEncoder) -> _Turn:
    opened = encoder.render(messages[:index], prompt.tools, generation_prompt=True)
    through = encoder.render(messages[: index + 1], prompt.tools, generation_prompt=False)
    if not through.startswith(opened):
        switch = "data.chatTemplate.thinking" if "reasoning_content" in messages[index] else "the template"
        raise EncodingError(
            f"message {index} does not begin as the chat template opens the assistant's turn ({opened[-30:]!r}), so that "
            f"the model would never write it. Check {switch}."
        )
    return _Turn(index, opened, through)


def _example(
    stretch: Sequence[_Turn],
    messages: Sequence[Message],
    prompt: Prompt,
    encoder: TemplateEncoder,
    reader: PictureReader | None,
) -> SupervisedExample:
    """The stretch's text, up to the end of its last turn."""
    token_ids: Tokens = ()
    mask: Mask = ()
    done = 0
    for turn in stretch:
        written = turn.through[len(turn.opened) :]
        end = encoder.end_of_turn(written)
        for text, learned in ((turn.opened[done:], False), (written[:end], True)):
            tokens = encoder.rendered(text)
            token_ids += tokens
            mask += (learned,) * len(tokens)
        done = len(turn.opened) + end
    if reader is None:
        return SupervisedExample(prompt, token_ids, mask)
    seen = messages[: stretch[-1].index + 1]
    pictures = PictureSet(reader, prompt.images[: _parts(seen, "image")], prompt.videos[: _parts(seen, "video")])
    token_ids, mask = reader.expand(token_ids, mask, pictures)
    return SupervisedExample(prompt, token_ids, mask, pictures if pictures else None)


def _parts(messages: Sequence[Message], kind: str) -> int:
    """Image, or video, parts of the messages."""
    contents = [message["content"] for message in messages]
    return sum(part.get("type") == kind for content in contents if isinstance(content, list) for part in content)


def _cut(example: SupervisedExample, parts: tuple[range, range], reader: PictureReader | None) -> SupervisedExample:
    token_ids, mask = select(example.token_ids, parts), select(example.loss_mask, parts)
    if reader is not None and reader.placeholders(token_ids) != reader.placeholders(example.token_ids):
        raise CutError("the cut goes through an image or a video. Raise the limit, or set data.overlongPrompts: Skip.")
    if not any(mask[1:]):
        raise CutError("nothing to learn is left. Raise the limit, or set data.overlongPrompts: Skip.")
    return replace(example, token_ids=token_ids, loss_mask=mask)
