"""Encodes text and chat messages as token ids, or explains why that is impossible.

    messages ─► render ─► text ─► token ids
                  │
                  └─ without a user message, which Qwen3.5's template rejects: render with an empty one, and remove its text

A longer conversation is rendered as a longer text with the same beginning. The start of an assistant's turn, the system
prompt and the separator of two turns are therefore found as differences of two rendered texts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from qwen35_trainer.data.data_errors import half_character
from qwen35_trainer.data.prompt import ChatMessage, Tool
from qwen35_trainer.data.tokenizer import alphabet, unknown_characters

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

type TokenIds = tuple[int, ...]

_EMPTY_USER_MESSAGE: ChatMessage = {"role": "user", "content": ""}
_CONTENT = "content of an answer"
_SYSTEM_ROLES = ("system", "developer")
_REWRITTEN = (
    "the chat template writes a message differently when others follow, so the text of an empty user message cannot be "
    "determined. Add a user message, or use another template in data.chatTemplate.file."
)


class EncodingError(Exception):
    """A text or a conversation cannot be encoded."""


@dataclass(frozen=True)
class TemplateEncoder:
    """Encodes texts and conversations as token ids, through the tokenizer's chat template if there is one.

    thinking: passed to the template as enable_thinking; None: the template decides.
    """

    tokenizer: "PreTrainedTokenizerBase"
    thinking: bool | None = None

    @cached_property
    def has_template(self) -> bool:
        return bool(self.tokenizer.chat_template)

    def text(self, text: str) -> TokenIds:
        """Encode a text without the template, with the tokens that the tokenizer adds to every text.

        Raises EncodingError for characters without a token.
        """
        return self._encode(text, special_tokens=True)

    def prompt(self, text: str | Sequence[ChatMessage], tools: Sequence[Tool] = ()) -> TokenIds:
        """Encode a prompt after which the model generates.

        With a template, a plain text is encoded as a user message, and the start of the assistant's turn is added at
        the end. Raises EncodingError for chat messages if there is no template, for a conversation that the template
        rejects, and for characters without a token.
        """
        if isinstance(text, str):
            return self.chat([{"role": "user", "content": text}], tools) if self.has_template else self.text(text)
        return self.chat(text, tools)

    def chat(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = (), *, generation_prompt: bool = True
    ) -> TokenIds:
        """Encode a conversation with the template.

        generation_prompt: whether to add the start of the assistant's next turn. Raises EncodingError if there is no
        template, if it rejects the conversation, and for characters without a token.
        """
        return self.rendered(self.render(messages, tools, generation_prompt=generation_prompt))

    def rendered(self, text: str) -> TokenIds:
        """Encode a text that the template has rendered.

        The name of a special token in the text is encoded as that token. Raises EncodingError for characters without
        a token.
        """
        return self._encode(text, special_tokens=False)

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = (), *, generation_prompt: bool) -> str:
        """Render a conversation as text.

        generation_prompt: whether to add the start of the assistant's next turn. Qwen3.5's template rejects a
        conversation without a user message. Such a conversation is rendered with an empty user message after the system
        prompt, and the text of this message is then removed. Raises EncodingError if there is no template, and if the
        template rejects the conversation.
        """
        if any(message["role"] == "user" for message in messages):
            return self._apply(messages, tools, generation_prompt=generation_prompt)
        first_turn = next(
            (at for at, message in enumerate(messages) if message["role"] not in _SYSTEM_ROLES), len(messages)
        )
        opening = [*messages[:first_turn], _EMPTY_USER_MESSAGE]
        through = self._apply(opening, tools)
        whole = self._apply([*opening, *messages[first_turn:]], tools, generation_prompt=generation_prompt)
        if not through.endswith(self._empty_user_turn):
            raise EncodingError(_REWRITTEN)
        return through.removesuffix(self._empty_user_turn) + _added(through, whole)

    @cached_property
    def generation_prompt(self) -> TokenIds:
        """Tokens with which the template begins a turn of the assistant that the model generates."""
        return self.rendered(
            _added(self._apply([_EMPTY_USER_MESSAGE]), self._apply([_EMPTY_USER_MESSAGE], generation_prompt=True))
        )

    @cached_property
    def system_prompt(self) -> TokenIds:
        """Tokens that the template writes before a conversation without a system message; empty for Qwen3.5."""
        return self.rendered(self._apply([_EMPTY_USER_MESSAGE]).removesuffix(self._empty_user_turn))

    @cached_property
    def separator(self) -> TokenIds:
        """Tokens that the template writes between the end token of an assistant's turn and the next turn.

        A generated response does not contain these tokens.
        """
        turn = _added(
            self._apply([_EMPTY_USER_MESSAGE]),
            self._apply([_EMPTY_USER_MESSAGE, {"role": "assistant", "content": "."}]),
        )
        return self.rendered(turn[self.end_of_turn(turn) :])

    @cached_property
    def turn_ending(self) -> str | None:
        """Text that the template writes after the content of an assistant's turn.

        None: the tokenizer has no template, or the template does not write the content of such a turn.
        """
        if not self.has_template:
            return None
        try:
            turns = self._apply([_EMPTY_USER_MESSAGE, {"role": "assistant", "content": _CONTENT}])
        except EncodingError:  # such a conversation is reported with its row, if there is one
            return None
        _, content, ending = turns.rpartition(_CONTENT)
        return ending if content else None

    def continuation(self, messages: Sequence[ChatMessage]) -> TokenIds:
        """Return the tokens to append to a response that ended with its end token, so that the model answers `messages`.

        The previous tokens stay as they were generated: nothing is rendered or encoded again. Tool results are appended
        as in a full rendering. After a user message, a full rendering by Qwen3.5's template would omit earlier
        reasoning; here the reasoning stays, because the model has read it. Only tests call this method today; rollouts
        with several turns will.
        """
        following = _added(
            self._apply([_EMPTY_USER_MESSAGE]), self._apply([_EMPTY_USER_MESSAGE, *messages], generation_prompt=True)
        )
        return self.separator + self.rendered(following)

    def end_of_turn(self, text: str) -> int:
        """Return how many characters of an assistant's turn the model writes. text: the rendered turn.

        The model writes the characters up to and including the last end token. Without an end token, it writes
        all characters.
        """
        end = self.end_token
        at = text.rfind(end) if end else -1
        return len(text) if at < 0 else at + len(str(end))

    @cached_property
    def end_token(self) -> str | None:
        """The token with which the model ends a turn; None: there is none.

        It is the end token of the tokenizer, unless the template ends a turn with another special token, as it does for
        many base models: <|im_end|> instead of <|endoftext|>.
        """
        end, ending = self.tokenizer.eos_token, self.turn_ending
        if ending is not None and not (end and end in ending):
            special = [each.content for each in self.tokenizer.added_tokens_decoder.values() if each.special]
            end = min((token for token in special if token in ending), key=ending.index, default=end)
        return None if end is None else str(end)

    @cached_property
    def _empty_user_turn(self) -> str:
        return _added(self._apply([_EMPTY_USER_MESSAGE]), self._apply([_EMPTY_USER_MESSAGE, _EMPTY_USER_MESSAGE]))

    def _apply(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = (), *, generation_prompt: bool = False
    ) -> str:
        from jinja2 import TemplateError  # comes with transformers' templates

        if not self.has_template:
            raise EncodingError(
                "chat messages need a chat template and the tokenizer has none. Write the prompt as one text, or name "
                "a template in data.chatTemplate.file."
            )
        conversation: list[Any] = [
            {key: value for key, value in message.items() if key != "weight"} for message in messages
        ]
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
            raise EncodingError(f"the chat template rejects the roles {roles}: {error}") from error
        return str(rendered)

    def _encode(self, text: str, *, special_tokens: bool) -> TokenIds:
        if (half := half_character(text)) is not None:
            raise EncodingError(f"no token for {half}. Write the whole character, or remove the half.")
        if self._alphabet is not None and (unknown := unknown_characters(text, self._alphabet)):
            characters = ", ".join(map(repr, unknown))
            if folder := self.tokenizer.name_or_path:  # a model with random weights that was exported
                raise EncodingError(f"the tokenizer of {folder} has no token for {characters}. Change the text.")
            raise EncodingError(
                f"no token for {characters}. Add to model.source.random.characters, or change the text."
            )
        return tuple(self.tokenizer.encode(text, add_special_tokens=special_tokens))

    @cached_property
    def _alphabet(self) -> frozenset[str] | None:
        characters = alphabet(self.tokenizer)
        return None if characters is None else frozenset(characters)


def _added(before: str, whole: str) -> str:
    """Return the end of the text `whole`, after the text `before` at its beginning.

    Raises EncodingError if `whole` does not begin with `before`.
    """
    if not whole.startswith(before):
        raise EncodingError(_REWRITTEN)
    return whole.removeprefix(before)
