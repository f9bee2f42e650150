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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from qwen35_trainer.data.picture_reader import NO_TOWER, PictureReader
from qwen35_trainer.data.picture_set import PictureSet
from qwen35_trainer.data.prompt import ChatMessage, Prompt
from qwen35_trainer.data.row_sequence import RowSequence
from qwen35_trainer.data.template import EncodingError, TemplateEncoder, TokenIds
from qwen35_trainer.data.truncation import CutError, fit, select
from qwen35_trainer.manifest.data import Overlong

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

type Mask = tuple[bool, ...]


@dataclass(frozen=True, eq=False)
class SupervisedExample:
    """One training sequence. token_ids: (tokens,). loss_mask: (tokens,), true for the tokens that train."""

    prompt: Prompt
    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    pictures: PictureSet | None = None
    """The images and videos of the example.

    Their files are read when a batch needs them. None: the example has only text.
    """

    @classmethod
    def of(
        cls, prompt: Prompt, token_ids: TokenIds, loss_mask: Mask, pictures: PictureSet | None = None
    ) -> "SupervisedExample":
        return cls(prompt, np.array(token_ids, dtype=np.int32), np.array(loss_mask, dtype=np.bool_), pictures)


class EncodedExamples(RowSequence[SupervisedExample]):
    """Supervised examples whose tokens and masks are in two arrays (5 bytes per token), which processes can share."""

    def __init__(self, examples: Iterable[SupervisedExample]) -> None:
        entries = list(examples)
        self._prompts = [entry.prompt for entry in entries]
        self._pictures = [entry.pictures for entry in entries]
        self._ends = np.cumsum([0, *(len(entry.token_ids) for entry in entries)], dtype=np.int64)
        self._token_ids = np.concatenate([np.empty(0, np.int32), *(entry.token_ids for entry in entries)])
        self._loss_mask = np.concatenate([np.empty(0, np.bool_), *(entry.loss_mask for entry in entries)])

    def __len__(self) -> int:
        return len(self._prompts)

    def _row(self, row: int) -> SupervisedExample:
        tokens = slice(self._ends[row], self._ends[row + 1])
        return SupervisedExample(
            self._prompts[row], self._token_ids[tokens], self._loss_mask[tokens], self._pictures[row]
        )

    @property
    def have_pictures(self) -> bool:
        """Whether any example has images or videos."""
        return any(pictures is not None for pictures in self._pictures)


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

    A row is a prompt with an answer, or chat messages of which every assistant's turn without `weight: 0` trains. If a
    row has chat messages and an answer, the answer becomes the last turn. A row gives several examples if the template
    rewrites earlier turns; otherwise it gives one.

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
    messages = prompt.messages
    if prompt.answer is not None:
        if messages[-1]["role"] == "assistant":
            raise EncodingError(
                "the conversation ends with an assistant's turn and the row has an answer too. Set files.answerField to "
                "a column that the rows do not have, or remove that turn."
            )
        messages = (*messages, {"role": "assistant", "content": prompt.answer})
    return [_example(stretch, messages, prompt, encoder, reader) for stretch in _stretches(messages, prompt, encoder)]


def _plain(prompt: Prompt, text: str, answer: str, encoder: TemplateEncoder) -> SupervisedExample:
    end = encoder.tokenizer.eos_token_id
    if end is None:
        raise EncodingError("the tokenizer has no end-of-sequence token, so that an answer would never end")
    context = encoder.text(text)
    learned = (*encoder.text(answer), end)
    return SupervisedExample.of(prompt, context + learned, (False,) * len(context) + (True,) * len(learned))


def _stretches(messages: Sequence[ChatMessage], prompt: Prompt, encoder: TemplateEncoder) -> list[list[_Turn]]:
    """Group the assistant's turns that train into stretches, in order.

    A stretch consists of turns that train in the same rendered text. In this text, each turn of the stretch follows the
    context in which the model learns the turn. A turn with `weight: 0` only belongs to the context of later turns.
    """
    written = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not written:
        raise EncodingError("no assistant's turn to learn. Add one, or fill the answerField.")
    waiting = [_turn(index, messages, prompt, encoder) for index in written if messages[index].get("weight") != 0]
    if not waiting:
        raise EncodingError("every assistant's turn has weight 0 or train false. Let one train, or remove the row.")
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
        switch = "the template"
        if "reasoning_content" in messages[index]:
            switch = "data.chatTemplate.thinking, or remove the message's reasoning"
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
        return SupervisedExample.of(prompt, token_ids, mask)
    context = messages[: stretch[-1].index + 1]
    pictures = reader.pictures_of(prompt, _parts(context, "image"), _parts(context, "video"))
    token_ids, mask = reader.expand(token_ids, mask, pictures)
    return SupervisedExample.of(prompt, token_ids, mask, pictures if pictures else None)


def _parts(messages: Sequence[ChatMessage], kind: str) -> int:
    """Return the number of parts of the messages whose type is `kind`, such as "image"."""
    contents = [message["content"] for message in messages]
    return sum(part.get("type") == kind for content in contents if isinstance(content, list) for part in content)


def _cut(example: SupervisedExample, parts: tuple[range, range], reader: PictureReader | None) -> SupervisedExample:
    token_ids, mask = select(example.token_ids, parts), select(example.loss_mask, parts)
    if reader is not None and reader.placeholders(token_ids) != reader.placeholders(example.token_ids):
        raise CutError("the cut goes through an image or a video. Raise the limit, or set data.overlongPrompts: Skip.")
    if not mask[1:].any():
        raise CutError("nothing to learn is left. Raise the limit, or set data.overlongPrompts: Skip.")
    return replace(example, token_ids=token_ids, loss_mask=mask)
