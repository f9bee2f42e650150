import pickle
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from qwen35_trainer.data import character_tokenizer
from qwen35_trainer.data.tokenizer import response_text
from qwen35_trainer.rewards.response_decoder import ResponseDecoder


def byte_tokenizer(**settings: object) -> PreTrainedTokenizerFast:
    """A token per byte, as in Qwen's, without merges; a special token, and one that only has its own text."""
    vocabulary = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", **settings)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Its spaces are cleaned, which only transformers does."""
    words = ["<unk>", "a", "b", ".", ",", "n't", "'m"]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=True)


class Subclass(PreTrainedTokenizerFast):
    """Decodes in its own way."""

    def _decode(self, token_ids: list[int], **settings: object) -> str:
        return super()._decode(token_ids, **settings).upper()


def shouting_tokenizer() -> PreTrainedTokenizerFast:
    return Subclass(tokenizer_object=character_tokenizer("abc").backend_tokenizer)


MADE = {
    "characters": character_tokenizer(string.printable + "äß€🙂"),
    "bytes": byte_tokenizer(),
    "bytes, cleaned": byte_tokenizer(clean_up_tokenization_spaces=True),
    "words, cleaned": word_tokenizer(),
    "own decode": shouting_tokenizer(),
}
LOADED = {name: pickle.loads(pickle.dumps(ResponseDecoder.of(tokenizer))).load() for name, tokenizer in MADE.items()}


@pytest.mark.parametrize("name", list(MADE))
@given(data=st.data())
def test_any_tokens_decode_as_with_transformers(name: str, data: st.DataObject) -> None:
    # Random bytes are seldom UTF-8. Ids after the last token exist, because models pad their vocabulary.
    tokenizer: PreTrainedTokenizerBase = MADE[name]
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 3), max_size=60))
    assert LOADED[name](ids) == response_text(tokenizer, ids)


def test_special_tokens_are_left_out_and_broken_characters_are_replaced() -> None:
    tokenizer, decode = MADE["bytes"], LOADED["bytes"]
    ids = tokenizer.encode("<think>a 🙂<|im_end|>")
    assert decode(ids) == "<think>a 🙂"
    assert decode(ids[:-2]) == "<think>a \ufffd"


@pytest.mark.parametrize(
    ("name", "small"),
    [("characters", True), ("bytes", True), ("bytes, cleaned", True), ("words, cleaned", False), ("own decode", False)],
)
def test_transformers_is_needed_only_by_tokenizers_that_decode_with_it(name: str, small: bool) -> None:
    decoder = ResponseDecoder.of(MADE[name])
    assert (decoder.backend is not None) is small
    assert (decoder.tokenizer is None) is small
