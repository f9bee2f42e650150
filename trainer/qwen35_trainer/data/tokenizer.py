"""The tokenizer of a model: the tokenizer in its checkpoint, or one token per character for a model with random weights."""

from collections.abc import Set
from pathlib import Path
from typing import TYPE_CHECKING

from qwen35_trainer.data.data_errors import DataError
from qwen35_trainer.manifest.model import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

PAD = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
IMAGE_PAD, VIDEO_PAD = "<|image_pad|>", "<|video_pad|>"


def load_tokenizer(model: ModelSpec, base: Path, template: str | None = None) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a model. Only local files are read.

    model: `spec.model` of the manifest. base: the folder to which relative paths are relative. template: path of a chat
    template that replaces the tokenizer's template (`data.chatTemplate.file`). Raises DataError if the tokenizer or the
    template is missing or cannot be read.
    """
    tokenizer = _load(model, base)
    if template is not None:
        try:
            tokenizer.chat_template = (base / template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError([f"data.chatTemplate.file {base / template} cannot be read: {error}."]) from error
    return tokenizer


def _load(model: ModelSpec, base: Path) -> "PreTrainedTokenizerBase":
    source = model.source
    if source.random is not None:
        return character_tokenizer(source.random.characters, vision=source.random.vision is not None)
    if source.path is None:
        raise DataError(
            ["model.source.persistentVolumeClaim is mounted only in a cluster. Outside one, use model.source.path."]
        )
    folder = base / source.path
    if not (folder / "tokenizer_config.json").is_file():
        names = ", ".join(sorted(entry.name for entry in folder.iterdir())[:10]) if folder.is_dir() else "no folder"
        raise DataError([f"model.source.path {folder}: no tokenizer_config.json (found: {names or 'nothing'})."])
    from qwen35_trainer.light_transformers import transformers  # seconds to import

    try:
        tokenizer: PreTrainedTokenizerBase = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise DataError([f"model.source.path {folder}: the tokenizer cannot be loaded: {error}"]) from error
    return tokenizer


def character_tokenizer(characters: str, *, vision: bool = False) -> "PreTrainedTokenizerFast":
    """Create a tokenizer with one token per character, after the special tokens.

    The special tokens are <|endoftext|> (0, padding), <|im_start|> (1) and <|im_end|> (2, ends a response), and with
    `vision` also <|vision_start|> (3), <|vision_end|> (4), <|image_pad|> (5) and <|video_pad|> (6). A character that is
    not in `characters` has no token. Raises DataError if `characters` is empty or has a character twice.
    """
    repeated = sorted({character for character in characters if characters.count(character) > 1})
    if repeated or not characters:
        raise DataError([f"model.source.random.characters {characters!r}: each character once, twice: {repeated}."])
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    from qwen35_trainer.light_transformers import transformers  # seconds to import

    special = [VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD] if vision else []
    vocabulary = {token: index for index, token in enumerate([PAD, TURN_START, TURN_END, *special, *characters])}
    # The unknown token is deliberately outside the vocabulary: encoding an unknown character then fails.
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unknown|>"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=TURN_END,
        additional_special_tokens=[TURN_START, *special],
        clean_up_tokenization_spaces=False,
    )


def response_text(tokenizer: "PreTrainedTokenizerBase", tokens: list[int]) -> str:
    """Return the text of a response for rewards and for people, without special tokens such as the end token.

    Bytes that are not UTF-8 become the character U+FFFD.
    """
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    assert isinstance(text, str)
    return text


def alphabet(tokenizer: "PreTrainedTokenizerBase") -> Set[str] | None:
    """Return the characters for which a character tokenizer has tokens; None for a tokenizer that encodes any text."""
    from tokenizers.models import WordLevel

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not isinstance(backend.model, WordLevel):
        return None
    return {token for token in tokenizer.get_vocab() if len(token) == 1}


def unknown_characters(text: str, alphabet: Set[str]) -> list[str]:
    """Return the characters of `text` that are not in `alphabet`, sorted.

    Names of special tokens in the text are ignored.
    """
    for token in (PAD, TURN_START, TURN_END, VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD):
        text = text.replace(token, "")
    return sorted(set(text) - alphabet)
