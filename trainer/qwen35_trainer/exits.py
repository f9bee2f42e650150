"""How a command ends that does not do what it was asked."""

from __future__ import annotations

import sys
from typing import NoReturn

FAILED, REFUSED, CANNOT_RUN, INTERRUPTED = 1, 2, 3, 130
"""Exit codes: the run failed; it was refused before anything was started; the manifest is valid, but this release cannot run it;
a signal ended the run without a last checkpoint.
"""


def fail(text: str, code: int) -> NoReturn:
    """Say why, and end with the code."""
    import typer  # 0.1 s, and who needs the codes alone is in a hurry (runtime/signals.py)

    sys.stderr.write(f"{text}\n")
    raise typer.Exit(code)
