"""Golden files: what should be, as files to read. A run with UPDATE_GOLDEN=1 writes them, and fails for each that it wrote."""

import difflib
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def compare(text: str, golden: Path, meaning: Callable[[str], object] = str) -> None:
    """Fails unless `text` means the same as the file does."""
    if os.environ.get("UPDATE_GOLDEN") == "1" and (not golden.exists() or golden.read_text() != text):
        golden.write_text(text)
        pytest.fail(f"updated {golden}: read the difference, and run again without UPDATE_GOLDEN")
    if not golden.exists():
        pytest.fail(f"{golden} does not exist: run with UPDATE_GOLDEN=1, and read what it wrote")
    if meaning(text) != meaning(expected := golden.read_text()):
        difference = difflib.unified_diff(expected.splitlines(), text.splitlines(), golden.name, "now", lineterm="")
        pytest.fail("\n".join(difference))
