"""Prompts and examples: where they come from, in which order they train, and how they become tokens.

Importing this package is quick: torch, transformers, datasets and reasoning-gym load when first used.
"""

from qwen35_trainer.data.encode import EncodedPrompt, encode_prompts
from qwen35_trainer.data.errors import DataError
from qwen35_trainer.data.picture_reader import PictureReader, load_picture_reader
from qwen35_trainer.data.pictures import PictureArrays
from qwen35_trainer.data.prompt import Message, Prompt, Video
from qwen35_trainer.data.prompts import PromptOrder, PromptSet
from qwen35_trainer.data.sft import SupervisedExample, encode_examples
from qwen35_trainer.data.template import TemplateEncoder
from qwen35_trainer.data.tokenizer import character_tokenizer, load_tokenizer
from qwen35_trainer.data.tool_calls import MalformedCall, Parsed, ToolCall, parse_tool_calls

__all__ = [
    "DataError",
    "EncodedPrompt",
    "MalformedCall",
    "Message",
    "Parsed",
    "PictureArrays",
    "PictureReader",
    "Prompt",
    "PromptOrder",
    "PromptSet",
    "SupervisedExample",
    "TemplateEncoder",
    "ToolCall",
    "Video",
    "character_tokenizer",
    "encode_examples",
    "encode_prompts",
    "load_picture_reader",
    "load_tokenizer",
    "parse_tool_calls",
]
