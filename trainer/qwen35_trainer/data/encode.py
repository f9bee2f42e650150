"""Prompts to token ids, within the length limit."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from qwen35_trainer.data.prompt import Prompt
from qwen35_trainer.data.template import EncodingError, TemplateEncoder, Tokens
from qwen35_trainer.data.truncation import fit, select
from qwen35_trainer.spec.data import Overlong

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt and the tokens that the model continues."""

    prompt: Prompt
    token_ids: Tokens


def encode_prompts(
    prompts: Sequence[Prompt],
    tokenizer: "PreTrainedTokenizerBase",
    max_prompt_tokens: int,
    overlong: Overlong = "Error",
    thinking: bool | None = None,
) -> list[EncodedPrompt]:
    """Each prompt with its tokens, in order.

    A plain text is encoded as it stands by a tokenizer without a chat template, and as a user's message by one with;
    chat messages need a template. overlong: what becomes of prompts above max_prompt_tokens; those left out or cut are
    counted in the log. thinking: see TemplateEncoder. Raises DataError with all problems, and when no prompt is left.
    """
    encoder = TemplateEncoder(tokenizer, thinking)
    encoded: list[EncodedPrompt] = []
    problems: list[str] = []
    for prompt in prompts:
        if prompt.images or prompt.videos:
            problems.append(f"prompt {prompt.id}: images and videos train in mode SFT only. Remove them.")
            continue
        try:
            encoded.append(EncodedPrompt(prompt, encoder.prompt(prompt.text, prompt.tools)))
        except EncodingError as reason:
            problems.append(f"prompt {prompt.id}: {reason}")
    return fit(encoded, max_prompt_tokens, "data.maxPromptTokens", overlong, problems, _cut)


def _cut(encoded: EncodedPrompt, parts: tuple[range, range]) -> EncodedPrompt:
    return replace(encoded, token_ids=select(encoded.token_ids, parts))
