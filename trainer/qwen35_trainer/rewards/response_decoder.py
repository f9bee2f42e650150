"""Decodes responses without the transformers library, which takes seconds and 100 MB to import.

A fast tokenizer of transformers wraps an object of the tokenizers library. For Qwen's tokenizers, the wrapped object
decodes to the same text as the wrapper, so only the wrapped object is sent. If the wrapper changes the text, or the
tokenizer is not a fast one, the whole tokenizer is pickled.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

type Decode = Callable[[list[int]], str]
"""A function that returns the text of token ids, without special tokens such as the end token. Invalid
UTF-8 becomes U+FFFD."""


@dataclass(frozen=True)
class ResponseDecoder:
    """The decoding part of a tokenizer, as data that can be sent to another process.

    The function that `load` returns decodes to the same text as `response_text` with the whole tokenizer.
    """

    backend: str | None
    """The decoding part, as JSON of the tokenizers library; None if the whole tokenizer is needed."""
    tokenizer: bytes | None = None
    """The whole tokenizer, pickled; None if `backend` is enough."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> ResponseDecoder:
        if _only_backend_decodes(tokenizer):
            return cls(tokenizer.backend_tokenizer.to_str())
        return cls(None, pickle.dumps(tokenizer))

    def load(self) -> Decode:
        """Return the function that decodes token ids.

        For a vocabulary of 248,000 tokens, loading takes half a second and 0.1 GB of memory.
        """
        if self.backend is None:
            assert self.tokenizer is not None
            return _decode_of(pickle.loads(self.tokenizer))  # noqa: S301  # from our caller
        from tokenizers import Tokenizer

        decode: Callable[..., str] = Tokenizer.from_str(self.backend).decode
        return lambda ids: decode(ids, skip_special_tokens=True)


def _only_backend_decodes(tokenizer: PreTrainedTokenizerBase) -> bool:
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return False
    own = any(
        getattr(type(tokenizer), name) is not getattr(PreTrainedTokenizerFast, name) for name in ("decode", "_decode")
    )
    return not own and not _cleans_spaces(tokenizer)


def _cleans_spaces(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Return whether `tokenizer` removes spaces when it decodes (`clean_up_tokenization_spaces`).

    For byte-pair encoding, transformers ignores this setting unless a second setting confirms it.
    """
    byte_pairs = type(tokenizer.backend_tokenizer.model).__name__ == "BPE"
    insists = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    return bool(tokenizer.clean_up_tokenization_spaces) and (not byte_pairs or bool(insists))


def _decode_of(tokenizer: PreTrainedTokenizerBase) -> Decode:
    from qwen35_trainer.data.tokenizer import response_text

    return lambda ids: response_text(tokenizer, ids)
