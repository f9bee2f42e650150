"""The tokenizer of Qwen3.5 with its chat templates, made once per session."""

from collections.abc import Callable

import pytest
from transformers import PreTrainedTokenizerFast

from tests.data import qwen


@pytest.fixture(scope="session")
def make_qwen() -> Callable[..., PreTrainedTokenizerFast]:
    """make_qwen(template="qwen3_5_think"): the tokenizer with one of the published templates; do not change it."""
    tokenizer = qwen.tokenizer()

    def make(name: str = "qwen3_5_think") -> PreTrainedTokenizerFast:
        tokenizer.chat_template = qwen.template(name)
        return tokenizer

    return make
