"""Text and chat messages to token ids, with the reason when that is impossible."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from qwen35_trainer.data.prompt import Message
from qwen35_trainer.data.tokenizer import alphabet, unknown_characters

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

type Tokens = tuple[int, ...]


class EncodingError(Exception):
    """Why a text or a conversation has no token ids."""


@dataclass(frozen=True)
class TemplateEncoder:
    """Encodes through the tokenizer's chat template where it has one."""

    tokenizer: "PreTrainedTokenizerBase"

    @cached_property
    def has_template(self) -> bool:
        return bool(self.tokenizer.chat_template)

    def text(self, text: str) -> Tokens:
        """A text as it stands. Raises EncodingError for characters without a token."""
        return self._encode(text, special_tokens=True)

    def prompt(self, text: str | Sequence[Message]) -> Tokens:
        """What the model continues with its response: a plain text is a user's message if there is a template.

        Raises EncodingError for messages without a template, and for what the template refuses.
        """
        if isinstance(text, str):
            return self.chat([{"role": "user", "content": text}]) if self.has_template else self.text(text)
        return self.chat(text)

    def chat(self, messages: Sequence[Message], *, generation_prompt: bool = True) -> Tokens:
        """A conversation; generation_prompt opens the assistant's next turn."""
        from jinja2 import TemplateError  # comes with transformers' templates

        if not self.has_template:
            raise EncodingError(
                "chat messages need a chat template and the tokenizer has none. Write the prompt as one text."
            )
        conversation: list[Any] = [dict(message) for message in messages]
        try:
            rendered = self.tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=generation_prompt
            )
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise EncodingError(f"the chat template refuses the roles {roles}: {error}") from error
        # The template has written the special tokens itself.
        return self._encode(str(rendered), special_tokens=False)

    def _encode(self, text: str, *, special_tokens: bool) -> Tokens:
        if self._alphabet is not None and (unknown := unknown_characters(text, self._alphabet)):
            raise EncodingError(
                f"no token for {', '.join(map(repr, unknown))}. Add to model.source.random.characters, or change the text."
            )
        return tuple(self.tokenizer.encode(text, add_special_tokens=special_tokens))

    @cached_property
    def _alphabet(self) -> frozenset[str] | None:
        known = alphabet(self.tokenizer)
        return None if known is None else frozenset(known)
