"""The actions that the coordinator returns: commands to the pools, and notices. Their order matters."""

from __future__ import annotations

from qwen35_trainer.pipeline.commands import Command
from qwen35_trainer.pipeline.notices import Notice

type Action = Command | Notice
