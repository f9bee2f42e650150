"""Text and chat messages to token ids, with the reason when that is impossible.

    messages ─► render ─► text ─► token ids
                  │
                  └─ no user's message: Qwen3.5's template refuses it, so that an empty one is put in and cut out again

A rendered conversation is text that grows turn by turn, and everything else is a difference of two such texts: what
opens the assistant's turn, the system prompt, what stands between two turns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from qwen35_trainer.data.prompt import Message, Tool
from qwen35_trainer.data.tokenizer import alphabet, unknown_characters

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

type Tokens = tuple[int, ...]

_NOBODY: Message = {"role": "user", "content": ""}
_PREFACE = ("system", "developer")
_REWRITTEN = (
    "the chat template writes a message in another way once others follow, so that what an empty user's message adds "
    "cannot be told. Add a user's message, or use another template in data.chatTemplate.file."
)


class EncodingError(Exception):
    """Why a text or a conversation has no token ids."""


@dataclass(frozen=True)
class TemplateEncoder:
    """Encodes through the tokenizer's chat template where it has one.

    thinking: handed to every rendering as enable_thinking; None leaves the choice to the template.
    """

    tokenizer: "PreTrainedTokenizerBase"
    thinking: bool | None = None

    @cached_property
    def has_template(self) -> bool:
        return bool(self.tokenizer.chat_template)

    def text(self, text: str) -> Tokens:
        """A text as it stands. Raises EncodingError for characters without a token."""
        return self._encode(text, special_tokens=True)

    def prompt(self, text: str | Sequence[Message], tools: Sequence[Tool] = ()) -> Tokens:
        """What the model continues with its response: a plain text is a user's message if there is a template.

        Raises EncodingError for messages without a template, and for what the template refuses.
        """
        if isinstance(text, str):
            return self.chat([{"role": "user", "content": text}], tools) if self.has_template else self.text(text)
        return self.chat(text, tools)

    def chat(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, generation_prompt: bool = True
    ) -> Tokens:
        """A conversation; generation_prompt opens the assistant's next turn."""
        return self.rendered(self.render(messages, tools, generation_prompt=generation_prompt))

    def rendered(self, text: str) -> Tokens:
        """A text that the template has written, special tokens included."""
        return self._encode(text, special_tokens=False)

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, generation_prompt: bool) -> str:
        """The conversation as text. Raises EncodingError without a template, and for what the template refuses.

        Qwen3.5's template refuses a conversation without a user's message. Such a one is rendered with an empty user's
        message after the system prompt, whose text is then taken out: what is left is the conversation alone.
        """
        if any(message["role"] == "user" for message in messages):
            return self._apply(messages, tools, generation_prompt=generation_prompt)
        spoken = next((at for at, message in enumerate(messages) if message["role"] not in _PREFACE), len(messages))
        opening = [*messages[:spoken], _NOBODY]
        through = self._apply(opening, tools)
        whole = self._apply([*opening, *messages[spoken:]], tools, generation_prompt=generation_prompt)
        if not through.endswith(self._turn_of_nobody):
            raise EncodingError(_REWRITTEN)
        return through.removesuffix(self._turn_of_nobody) + _added(through, whole)

    @cached_property
    def generation_prompt(self) -> Tokens:
        """What opens the assistant's turn."""
        return self.rendered(_added(self._apply([_NOBODY]), self._apply([_NOBODY], generation_prompt=True)))

    @cached_property
    def system_prompt(self) -> Tokens:
        """What the template writes ahead of a conversation that brings no system message; empty for Qwen3.5."""
        return self.rendered(self._apply([_NOBODY]).removesuffix(self._turn_of_nobody))

    @cached_property
    def separator(self) -> Tokens:
        """What stands between a turn's end token and the next turn. The model stops at its end token and never writes it."""
        turn = _added(self._apply([_NOBODY]), self._apply([_NOBODY, {"role": "assistant", "content": "."}]))
        return self.rendered(turn[self.end_of_turn(turn) :])

    def continuation(self, messages: Sequence[Message]) -> Tokens:
        """Tokens to append to a response that ended with its end token, so that the model answers `messages`.

        The tokens of the conversation so far stay as they were generated: nothing is rendered or encoded again.
        Tool results after a call continue as a full rendering would. After a user's message Qwen3.5's template leaves
        earlier reasoning out of a full rendering; appended, it stays, which is what the model has seen.
        """
        following = _added(self._apply([_NOBODY]), self._apply([_NOBODY, *messages], generation_prompt=True))
        return self.separator + self.rendered(following)

    def end_of_turn(self, text: str) -> int:
        """Length of the part of an assistant's turn that the model writes: through the last end token, if there is one."""
        end = self.tokenizer.eos_token
        at = text.rfind(end) if end else -1
        return len(text) if at < 0 else at + len(str(end))

    @cached_property
    def _turn_of_nobody(self) -> str:
        return _added(self._apply([_NOBODY]), self._apply([_NOBODY, _NOBODY]))

    def _apply(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, generation_prompt: bool = False
    ) -> str:
        from jinja2 import TemplateError  # comes with transformers' templates

        if not self.has_template:
            raise EncodingError(
                "chat messages need a chat template and the tokenizer has none. Write the prompt as one text, or name "
                "a template in data.chatTemplate.file."
            )
        conversation: list[Any] = [dict(message) for message in messages]
        switch: Mapping[str, Any] = {} if self.thinking is None else {"enable_thinking": self.thinking}
        try:
            rendered = self.tokenizer.apply_chat_template(
                conversation,
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **switch,
            )
        except TemplateError as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise EncodingError(f"the chat template refuses the roles {roles}: {error}") from error
        return str(rendered)

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


def _added(before: str, whole: str) -> str:
    """What a longer conversation has behind a shorter one."""
    if not whole.startswith(before):
        raise EncodingError(_REWRITTEN)
    return whole.removeprefix(before)
