"""Encodes prompts as token ids, within the length limit."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from qwen35_trainer.data.prompt import Prompt
from qwen35_trainer.data.template import EncodingError, TemplateEncoder, TokenIds
from qwen35_trainer.data.truncation import fit, select
from qwen35_trainer.manifest.data import Overlong

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt and its tokens, which the model continues."""

    prompt: Prompt
    token_ids: TokenIds


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
            encoded.append(EncodedPrompt(prompt, encoder.prompt(prompt.text, prompt.tools)))
        except EncodingError as reason:
            problems.append(f"prompt {prompt.id}: {reason}")
    return fit(encoded, max_prompt_tokens, "data.maxPromptTokens", overlong, problems, _cut)


def _cut(encoded: EncodedPrompt, parts: tuple[range, range]) -> EncodedPrompt:
    return replace(encoded, token_ids=select(encoded.token_ids, parts))
