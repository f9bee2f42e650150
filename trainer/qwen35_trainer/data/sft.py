"""Encodes supervised examples, and selects the tokens that the model learns to write.

    system, user, assistant ₁, tool, assistant ₂, user, assistant ₃
                  ▔▔▔▔▔▔▔▔▔▔▔        ▔▔▔▔▔▔▔▔▔▔▔        ▔▔▔▔▔▔▔▔▔▔▔     learned: the tokens that the model writes, with end tokens

A turn is learned in the context in which the model would write it: the previous conversation, rendered with the start
of the assistant's turn. After a user message, Qwen3.5's template removes the reasoning of all earlier turns, so that
one text cannot contain all contexts. A row whose earlier turns the template changes becomes several examples, one for
each stretch of turns within which nothing is changed. In the picture, turns ₁ and ₂ are one stretch, because a tool
result is not a user message, and ₃ is another. Each turn is learned once.

Context and response are encoded separately, as in generation, so no token contains characters of both.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from qwen35_trainer.data.picture_reader import NO_TOWER, PictureReader
from qwen35_trainer.data.picture_set import PictureSet
from qwen35_trainer.data.prompt import ChatMessage, Prompt
from qwen35_trainer.data.template import EncodingError, TemplateEncoder, TokenIds
from qwen35_trainer.data.truncation import CutError, fit, select
from qwen35_trainer.manifest.data import Overlong

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

type Mask = tuple[bool, ...]


@dataclass(frozen=True)
class SupervisedExample:
    """One training sequence. token_ids: (tokens,). loss_mask: (tokens,), true for the tokens that train."""

    prompt: Prompt
    token_ids: TokenIds
    loss_mask: Mask
    pictures: PictureSet | None = None
    """The images and videos of the example.

    Their files are read when a batch needs them. None: the example has only text.
    """


@dataclass(frozen=True)
class _Turn:
    """One turn of the assistant.

    index: index of the message. opened: the rendered text before the turn. through: the rendered text up to the end of
    the turn.
    """

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
    """Encode each row as sequences in which only the answers and their end tokens train.

    A row is a prompt with an answer, or chat messages of which every assistant's turn trains. If a row has chat
    messages and an answer, the answer becomes the last turn. A row gives several examples if the template rewrites
    earlier turns; otherwise it gives one.

    max_tokens: limit of prompt and answer together (data.maxPromptTokens + data.maxResponseTokens). overlong: how
    longer examples are handled. thinking: passed to the template as enable_thinking; None: the template decides.
    reader: reads images and videos; None: the model has no vision tower. Raises DataError, which contains the
    problems of all rows, if a row has a problem or if no example remains.
    """
    encoder = TemplateEncoder(tokenizer, thinking)
    examples: list[SupervisedExample] = []
    problems: list[str] = []
    for prompt in prompts:
        try:
            examples += _examples(prompt, encoder, reader)
        except EncodingError as reason:
            problems.append(f"{prompt.described}: {reason}")

    def cut(example: SupervisedExample, parts: tuple[range, range]) -> SupervisedExample:
        return _cut(example, parts, reader)

    return fit(examples, max_tokens, "data.maxPromptTokens + data.maxResponseTokens", overlong, problems, cut)


def _examples(prompt: Prompt, encoder: TemplateEncoder, reader: PictureReader | None) -> list[SupervisedExample]:
    if isinstance(prompt.text, str) and prompt.answer is None:
        raise EncodingError("no answer to learn. Fill the answerField, or use chat messages with an assistant's turn.")
    if isinstance(prompt.text, str) and not encoder.has_template:
        return [_plain(prompt, prompt.text, str(prompt.answer), encoder)]
    if reader is None and (prompt.images or prompt.videos):
        raise EncodingError(NO_TOWER)
    answer: tuple[ChatMessage, ...] = ()
    if prompt.answer is not None:
        answer = ({"role": "assistant", "content": prompt.answer},)
    messages = (*prompt.messages, *answer)
    return [_example(stretch, messages, prompt, encoder, reader) for stretch in _stretches(messages, prompt, encoder)]


def _plain(prompt: Prompt, text: str, answer: str, encoder: TemplateEncoder) -> SupervisedExample:
    end = encoder.tokenizer.eos_token_id
    if end is None:
        raise EncodingError("the tokenizer has no end-of-sequence token, so that an answer would never end")
    context = encoder.text(text)
    learned = (*encoder.text(answer), end)
    return SupervisedExample(prompt, context + learned, (False,) * len(context) + (True,) * len(learned))


def _stretches(messages: Sequence[ChatMessage], prompt: Prompt, encoder: TemplateEncoder) -> list[list[_Turn]]:
    """Group the assistant's turns into stretches, in order.

    A stretch consists of turns that train in the same rendered text. In this text, each turn of the stretch follows the
    context in which the model learns the turn.
    """
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


def _turn(index: int, messages: Sequence[ChatMessage], prompt: Prompt, encoder: TemplateEncoder) -> _Turn:
    opened = encoder.render(messages[:index], prompt.tools, generation_prompt=True)
    through = encoder.render(messages[: index + 1], prompt.tools, generation_prompt=False)
    if not through.startswith(opened):
        switch = "data.chatTemplate.thinking" if "reasoning_content" in messages[index] else "the template"
        raise EncodingError(
            f"message {index} does not begin with the chat template's start of an assistant's turn ({opened[-30:]!r}), so "
            f"that the model would never write it. Check {switch}."
        )
    return _Turn(index, opened, through)


def _example(
    stretch: Sequence[_Turn],
    messages: Sequence[ChatMessage],
    prompt: Prompt,
    encoder: TemplateEncoder,
    reader: PictureReader | None,
) -> SupervisedExample:
    """Encode the rendered text of a stretch up to the end of its last turn.

    Only the assistant's turns in the stretch train.
    """
    token_ids: TokenIds = ()
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
    context = messages[: stretch[-1].index + 1]
    pictures = reader.pictures_of(prompt, _parts(context, "image"), _parts(context, "video"))
    token_ids, mask = reader.expand(token_ids, mask, pictures)
    return SupervisedExample(prompt, token_ids, mask, pictures if pictures else None)


def _parts(messages: Sequence[ChatMessage], kind: str) -> int:
    """Return the number of parts of the messages whose type is `kind`, such as "image"."""
    contents = [message["content"] for message in messages]
    return sum(part.get("type") == kind for content in contents if isinstance(content, list) for part in content)


def _cut(example: SupervisedExample, parts: tuple[range, range], reader: PictureReader | None) -> SupervisedExample:
    token_ids, mask = select(example.token_ids, parts), select(example.loss_mask, parts)
    if reader is not None and reader.placeholders(token_ids) != reader.placeholders(example.token_ids):
        raise CutError("the cut goes through an image or a video. Raise the limit, or set data.overlongPrompts: Skip.")
    if not any(mask[1:]):
        raise CutError("nothing to learn is left. Raise the limit, or set data.overlongPrompts: Skip.")
    return replace(example, token_ids=token_ids, loss_mask=mask)
