import string
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.data import DataError, character_tokenizer, load_tokenizer
from qwen35_trainer.data.tokenizer import alphabet, response_text, unknown_characters
from qwen35_trainer.manifest.model import ModelSpec
from qwen35_trainer.rewards.response_decoder import ResponseDecoder

TOKENIZER = character_tokenizer(string.printable)


@given(st.text(string.printable, max_size=40))
def test_each_character_is_a_token_and_decodes_to_itself(text: str) -> None:
    token_ids = TOKENIZER.encode(text)
    assert len(token_ids) == len(text)
    assert TOKENIZER.decode(token_ids) == text


def test_the_special_tokens_come_first() -> None:
    tokenizer = character_tokenizer("ab")
    assert len(tokenizer) == 5
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 2)
    assert tokenizer.encode("<|im_start|>ab<|im_end|>") == [1, 3, 4, 2]


def test_a_model_that_sees_has_the_tokens_of_images_and_videos_behind_them(tmp_path: Path) -> None:
    model = ModelSpec.model_validate({"name": "tiny", "source": {"random": {"characters": "ab", "vision": {}}}})
    tokenizer = load_tokenizer(model, tmp_path)
    text = "<|vision_start|><|image_pad|><|video_pad|><|vision_end|>ab"
    assert tokenizer.encode(text) == [3, 5, 6, 4, 7, 8]
    assert unknown_characters(text, {"a"}) == ["b"]


def test_a_template_of_ones_own_takes_the_place_of_the_tokenizers(tmp_path: Path) -> None:
    model = ModelSpec.model_validate({"name": "tiny", "source": {"random": {}}})
    (tmp_path / "chat.jinja").write_text("{{ messages[0].content }}")
    assert load_tokenizer(model, tmp_path, "chat.jinja").chat_template == "{{ messages[0].content }}"
    with pytest.raises(DataError, match=r"data.chatTemplate.file .*absent.jinja cannot be read"):
        load_tokenizer(model, tmp_path, "absent.jinja")


def test_a_repeated_character_is_refused() -> None:
    with pytest.raises(DataError, match=r"characters 'abca'.*'a'"):
        character_tokenizer("abca")


def test_unknown_characters_are_found_next_to_special_tokens() -> None:
    characters = alphabet(character_tokenizer("ab"))
    assert characters == {"a", "b"}
    assert unknown_characters("<|im_start|>abYX<|im_end|>", characters) == ["X", "Y"]


def test_a_saved_tokenizer_loads_from_its_folder_unchanged(tmp_path: Path) -> None:
    saved = character_tokenizer("0123456789+= ")
    saved.save_pretrained(tmp_path / "model")
    loaded = load_tokenizer(ModelSpec.model_validate({"name": "tiny", "source": {"path": "model"}}), tmp_path)
    assert loaded.encode("1 + 2 =") == saved.encode("1 + 2 =")
    assert loaded.decode(loaded.encode("1 + 2 =")) == "1 + 2 ="
    assert alphabet(loaded) == alphabet(saved)


def test_random_weights_come_with_a_tokenizer_of_their_characters(tmp_path: Path) -> None:
    model = ModelSpec.model_validate({"name": "tiny", "source": {"random": {"characters": "01"}}})
    assert load_tokenizer(model, tmp_path).get_vocab() == character_tokenizer("01").get_vocab()


def test_a_folder_without_a_tokenizer_is_reported_with_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    with pytest.raises(DataError, match=r"no tokenizer_config.json \(found: config.json\)"):
        load_tokenizer(ModelSpec.model_validate({"name": "tiny", "source": {"path": "model"}}), tmp_path)
    with pytest.raises(DataError, match=r"found: no folder"):
        load_tokenizer(ModelSpec.model_validate({"name": "tiny", "source": {"path": "absent"}}), tmp_path)


def test_a_claim_outside_a_cluster_is_refused(tmp_path: Path) -> None:
    source = {"persistentVolumeClaim": {"claimName": "models"}}
    with pytest.raises(DataError, match="mounted only in a cluster"):
        load_tokenizer(ModelSpec.model_validate({"name": "tiny", "source": source}), tmp_path)


def test_responses_of_qwen_decode_without_transformers_to_the_same_text(make_qwen) -> None:
    tokenizer = make_qwen()
    decode = ResponseDecoder.of(tokenizer).load()
    text = "<|im_start|>assistant\n<think>\nSí, 是 ✅ 🙂\n</think>\n\n<tool_call>x</tool_call> ok <|im_end|>"
    words = tokenizer.encode(text)
    random = Random(1)
    lists = [words, words[:-7], *([random.randrange(len(tokenizer) + 100) for _ in range(300)] for _ in range(30))]
    assert [decode(ids) for ids in lists] == [response_text(tokenizer, ids) for ids in lists]
    assert decode(words) == "assistant\n<think>\nSí, 是 ✅ 🙂\n</think>\n\n<tool_call>x</tool_call> ok "
