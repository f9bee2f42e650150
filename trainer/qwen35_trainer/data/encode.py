"""Encodes prompts as token ids, within the length limit."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from qwen35_trainer.data.picture_reader import NO_TOWER, PictureReader
from qwen35_trainer.data.picture_set import PictureSet
from qwen35_trainer.data.prompt import Prompt
from qwen35_trainer.data.row_sequence import RowSequence
from qwen35_trainer.data.template import EncodingError, TemplateEncoder
from qwen35_trainer.data.truncation import CutError, fit, select
from qwen35_trainer.manifest.data import Overlong

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, eq=False)
class EncodedPrompt:
    """A prompt, and the tokens after which the model generates. token_ids: (tokens,)."""

    prompt: Prompt
    token_ids: NDArray[np.int32]
    pictures: PictureSet | None = None
    """The images and videos of the prompt.

    Their files are read where the prompt is computed. None: the prompt has only text.
    """


class EncodedPrompts(RowSequence[EncodedPrompt]):
    """Encoded prompts whose token ids are in one int32 array, which processes of one machine can share."""

    def __init__(self, encoded: Iterable[EncodedPrompt]) -> None:
        entries = list(encoded)
        self._prompts = [entry.prompt for entry in entries]
        self._pictures = [entry.pictures for entry in entries]
        self._ends = np.cumsum([0, *(len(entry.token_ids) for entry in entries)], dtype=np.int64)
        self._token_ids = np.concatenate([np.empty(0, np.int32), *(entry.token_ids for entry in entries)])

    def __len__(self) -> int:
        return len(self._prompts)

    def _row(self, row: int) -> EncodedPrompt:
        token_ids = self._token_ids[self._ends[row] : self._ends[row + 1]]
        return EncodedPrompt(self._prompts[row], token_ids, self._pictures[row])

    @property
    def have_pictures(self) -> bool:
        """Whether any prompt has images or videos."""
        return any(pictures is not None for pictures in self._pictures)


def encode_prompts(
    prompts: Sequence[Prompt],
    tokenizer: "PreTrainedTokenizerBase",
    max_prompt_tokens: int,
    overlong: Overlong = "Error",
    thinking: bool | None = None,
    reader: PictureReader | None = None,
) -> list[EncodedPrompt]:
    """Encode each prompt, in order.

    If the tokenizer has a chat template, a plain text is encoded as a user message; otherwise it is encoded unchanged.
    Chat messages need a template. overlong: how prompts longer than max_prompt_tokens are handled; the number of
    skipped or cut prompts is logged. thinking: passed to the template as enable_thinking; None: the template decides.
    reader: expands the placeholders of images and videos; None: the model has no vision tower. Raises DataError,
    which contains the problems of all prompts, if a prompt has a problem or if no prompt remains.
    """
    encoder = TemplateEncoder(tokenizer, thinking)
    encoded: list[EncodedPrompt] = []
    problems: list[str] = []
    for prompt in prompts:
        try:
            encoded.append(_encoded(prompt, encoder, reader))
        except EncodingError as reason:
            problems.append(f"{prompt.described}: {reason}")

    def cut(entry: EncodedPrompt, parts: tuple[range, range]) -> EncodedPrompt:
        return _cut(entry, parts, reader)

    return fit(encoded, max_prompt_tokens, "data.maxPromptTokens", overlong, problems, cut)


def _encoded(prompt: Prompt, encoder: TemplateEncoder, reader: PictureReader | None) -> EncodedPrompt:
    if prompt.messages[-1]["role"] == "assistant":
        raise EncodingError(
            "the prompt ends with an assistant's turn, and the model would write another one after it. Remove that turn. "
            "A reference answer belongs in files.answerField."
        )
    token_ids, pictures = encoder.prompt(prompt.text, prompt.tools), None
    if reader is None:
        if prompt.images or prompt.videos:
            raise EncodingError(NO_TOWER)
    else:
        pictures = reader.pictures_of(prompt)
        token_ids, _ = reader.expand(token_ids, (True,) * len(token_ids), pictures)
    return EncodedPrompt(prompt, np.array(token_ids, dtype=np.int32), pictures or None)


def _cut(encoded: EncodedPrompt, parts: tuple[range, range], reader: PictureReader | None) -> EncodedPrompt:
    token_ids = select(encoded.token_ids, parts)
    if reader is not None and reader.placeholders(token_ids) != reader.placeholders(encoded.token_ids):
        raise CutError("the cut goes through an image or a video. Raise the limit, or set data.overlongPrompts: Skip.")
    return replace(encoded, token_ids=token_ids)
