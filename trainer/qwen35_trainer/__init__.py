"""The trainer: what runs inside a Qwen35Training's pods, and on a laptop."""

from importlib.metadata import version

__version__ = version("qwen35")
