"""Prompts: where they come from, in which order they train, and how they become tokens.

Importing this package is quick: torch, transformers, datasets and reasoning-gym load when first used.
"""

from qwen35_trainer.data.encode import EncodedPrompt, encode_prompts
from qwen35_trainer.data.errors import DataError
from qwen35_trainer.data.prompt import Message, Prompt
from qwen35_trainer.data.prompts import PromptOrder, PromptSet
from qwen35_trainer.data.sft import SupervisedExample, encode_examples
from qwen35_trainer.data.tokenizer import character_tokenizer, load_tokenizer

__all__ = [
    "DataError",
    "EncodedPrompt",
    "Message",
    "Prompt",
    "PromptOrder",
    "PromptSet",
    "SupervisedExample",
    "character_tokenizer",
    "encode_examples",
    "encode_prompts",
    "load_tokenizer",
]
