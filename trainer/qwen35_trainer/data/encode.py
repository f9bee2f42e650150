"""Prompts to token ids, within the length limit."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from qwen35_trainer.data.errors import DataError
from qwen35_trainer.data.prompt import Prompt
from qwen35_trainer.data.template import EncodingError, TemplateEncoder, Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
_NAMED_OFFENDERS = 5

type Overlong = Literal["Error", "Skip"]


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt and the tokens that the model continues."""

    prompt: Prompt
    token_ids: Tokens


class _Encoded(Protocol):
    @property
    def prompt(self) -> Prompt: ...
    @property
    def token_ids(self) -> Tokens: ...


def encode_prompts(
    prompts: Sequence[Prompt],
    tokenizer: "PreTrainedTokenizerBase",
    max_prompt_tokens: int,
    overlong: Overlong = "Error",
) -> list[EncodedPrompt]:
    """Each prompt with its tokens, in order.

    A plain text is encoded as it stands by a tokenizer without a chat template, and as a user's message by one with;
    chat messages need a template. overlong: with Error, prompts above max_prompt_tokens are refused; with Skip they
    are left out and their number is logged. Raises DataError with all problems, and when no prompt is left.
    """
    encoder = TemplateEncoder(tokenizer)
    encoded: list[EncodedPrompt] = []
    problems: list[str] = []
    for prompt in prompts:
        try:
            encoded.append(EncodedPrompt(prompt, encoder.prompt(prompt.text)))
        except EncodingError as reason:
            problems.append(f"prompt {prompt.id}: {reason}")
    return within_limit(encoded, max_prompt_tokens, "data.maxPromptTokens", overlong, problems)


def within_limit[T: _Encoded](
    encoded: Sequence[T], limit: int, limit_name: str, overlong: Overlong, problems: Sequence[str]
) -> list[T]:
    """Those of at most `limit` tokens. Raises DataError with `problems` and, unless they are skipped, the others."""
    kept = [entry for entry in encoded if len(entry.token_ids) <= limit]
    offenders = [entry for entry in encoded if len(entry.token_ids) > limit]
    found = list(problems)
    if offenders and overlong == "Error":
        found.append(_too_long(offenders, limit, limit_name))
    elif not kept and not found:
        skipped = f", all {len(offenders)} are longer than {limit_name} {limit}" if offenders else ""
        found.append(f"no prompt is left{skipped}. Add prompts{f' or raise {limit_name}' if offenders else ''}.")
    if found:
        raise DataError(found)
    if offenders:
        logger.warning(
            "left out %d of %d prompts, longer than %s %d tokens", len(offenders), len(encoded), limit_name, limit
        )
    return kept


def _too_long(offenders: Sequence[_Encoded], limit: int, limit_name: str) -> str:
    longest = max(len(entry.token_ids) for entry in offenders)
    named = ", ".join(f"{entry.prompt.id} ({len(entry.token_ids)} tokens)" for entry in offenders[:_NAMED_OFFENDERS])
    more = len(offenders) - _NAMED_OFFENDERS
    return (
        f"{len(offenders)} longer than {limit_name} {limit}: {named}{f' and {more} more' if more > 0 else ''}. "
        f"Raise {limit_name} to {longest}, or set data.overlongPrompts: Skip to leave them out."
    )
