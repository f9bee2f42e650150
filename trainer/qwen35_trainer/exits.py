"""Exit codes, and the exceptions and messages with which a command ends early."""

from __future__ import annotations

import sys
from typing import NoReturn

from qwen35_trainer.failure_reasons import FailureReason

FAILED, REFUSED, CANNOT_RUN, SUPERSEDED, INTERRUPTED = 1, 2, 3, 4, 130
"""Exit codes: the run failed; the command was refused before anything started; the manifest is valid, but this release cannot run it;
another attempt owns the folders of the run, so this one ended (epoch.py); a signal ended the run without a last checkpoint.

No exit code stands for a preemption: a preempted pod gets SIGTERM, and its run ends like any other that gets it (runtime/signals.py).
The operator reads Preempted from the pod's status (kube/object_parsing.py).
"""


class Interrupted(Exception):
    """A signal, or the operator, ended the run without a last checkpoint.

    The message says what the output folder still has.
    """

    failure = FailureReason.INTERRUPTED


def fail(text: str, code: int) -> NoReturn:
    """Print `text` to stderr, and exit with `code`."""
    import typer  # takes 0.1 s, too long for runtime/signals.py, which needs only the codes

    sys.stderr.write(f"{text}\n")
    raise typer.Exit(code)
