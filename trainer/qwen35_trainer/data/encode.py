"""Encodes prompts as token ids, within the length limit."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from qwen35_trainer.data.prompt import Prompt
from qwen35_trainer.data.row_sequence import RowSequence
from qwen35_trainer.data.template import EncodingError, TemplateEncoder
from qwen35_trainer.data.truncation import fit
from qwen35_trainer.manifest.data import Overlong

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, eq=False)
class EncodedPrompt:
    """A prompt and its tokens, which the model continues. token_ids: the ids of the tokens, (tokens,)."""

    prompt: Prompt
    token_ids: NDArray[np.int32]


class EncodedPrompts(RowSequence[EncodedPrompt]):
    """Encoded prompts whose tokens are in one array of 4 bytes per token, which processes of one machine can share."""

    def __init__(self, encoded: Iterable[EncodedPrompt]) -> None:
        entries = list(encoded)
        self._prompts = [entry.prompt for entry in entries]
        self._ends = np.cumsum([0, *(len(entry.token_ids) for entry in entries)], dtype=np.int64)
        self._token_ids = np.concatenate([np.empty(0, np.int32), *(entry.token_ids for entry in entries)])

    def __len__(self) -> int:
        return len(self._prompts)

    def _row(self, row: int) -> EncodedPrompt:
        return EncodedPrompt(self._prompts[row], self._token_ids[self._ends[row] : self._ends[row + 1]])


def encode_prompts(
    prompts: Sequence[Prompt],
    tokenizer: "PreTrainedTokenizerBase",
    max_prompt_tokens: int,
    overlong: Overlong = "Error",
    thinking: bool | None = None,
) -> list[EncodedPrompt]:
    """Encode each prompt, in order.

    If the tokenizer has a chat template, a plain text is encoded as a user message; otherwise it is encoded unchanged.
    Chat messages need a template. overlong: how prompts longer than max_prompt_tokens are handled; the log has the
    number of skipped or cut prompts. thinking: passed to the template as enable_thinking; None leaves the choice to the
    template. Raises DataError with all problems, and when no prompt remains.
    """
    encoder = TemplateEncoder(tokenizer, thinking)
    encoded: list[EncodedPrompt] = []
    problems: list[str] = []
    for prompt in prompts:
        if prompt.images or prompt.videos:
            problems.append(f"prompt {prompt.id}: images and videos train in mode SFT only. Remove them.")
            continue
        try:
            encoded.append(EncodedPrompt(prompt, np.array(encoder.prompt(prompt.text, prompt.tools), dtype=np.int32)))
        except EncodingError as reason:
            problems.append(f"prompt {prompt.id}: {reason}")
    return fit(encoded, max_prompt_tokens, "data.maxPromptTokens", overlong, problems, _cut)


def _cut(encoded: EncodedPrompt, parts: tuple[range, range]) -> EncodedPrompt:
    return replace(encoded, token_ids=np.concatenate([encoded.token_ids[part.start : part.stop] for part in parts]))
