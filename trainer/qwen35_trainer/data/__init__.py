"""Prompts and supervised examples: their sources, the order in which they train, and their tokens.

Importing this package is quick: torch, transformers, datasets and reasoning-gym are imported when first used.
"""

from qwen35_trainer.data.data_errors import DataError
from qwen35_trainer.data.encode import EncodedPrompt, encode_prompts
from qwen35_trainer.data.picture_arrays import PictureArrays
from qwen35_trainer.data.picture_reader import PictureReader, load_picture_reader
from qwen35_trainer.data.prompt import ChatMessage, Prompt, Video
from qwen35_trainer.data.prompt_set import PromptOrder, PromptSet
from qwen35_trainer.data.sft import SupervisedExample, encode_examples
from qwen35_trainer.data.template import TemplateEncoder
from qwen35_trainer.data.tokenizer import character_tokenizer, load_tokenizer
from qwen35_trainer.data.tool_calls import MalformedCall, ParsedResponse, ToolCall, parse_tool_calls

__all__ = [
    "ChatMessage",
    "DataError",
    "EncodedPrompt",
    "MalformedCall",
    "ParsedResponse",
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
