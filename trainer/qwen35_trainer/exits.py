"""How a command ends that does not do what it was asked."""

from __future__ import annotations

import sys
from typing import NoReturn

import typer

FAILED, REFUSED, INTERRUPTED = 1, 2, 130
"""Exit codes: the run failed; it was refused before anything was started; it was ended by a second signal."""


def fail(text: str, code: int) -> NoReturn:
    """Say why, and end with the code."""
    sys.stderr.write(f"{text}\n")
    raise typer.Exit(code)
