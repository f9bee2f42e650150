"""Exit codes, and the exceptions and messages with which a command ends early."""

from __future__ import annotations

import sys
from typing import NoReturn

from qwen35_trainer.failure_reasons import FailureReason

FAILED, REFUSED, CANNOT_RUN, SUPERSEDED, INTERRUPTED = 1, 2, 3, 4, 130
"""Exit codes of `qwen35`:

    1     FAILED        the run failed
    2     REFUSED       the command was refused before anything started
    3     CANNOT_RUN    the manifest is valid, but this release cannot run it
    4     SUPERSEDED    another attempt owns the folders of the run, so this attempt ended (epoch.py)
    130   INTERRUPTED   a signal ended the run without a last checkpoint

No exit code stands for a preemption: a preempted pod gets SIGTERM, and its run ends like any other run that gets
SIGTERM (runtime/signals.py). The operator reads the reason Preempted from the pod's status (kube/object_parsing.py).
"""


class Interrupted(Exception):
    """A signal, or the operator, ended the run without a last checkpoint.

    The message describes what the output folder contains.
    """

    failure = FailureReason.INTERRUPTED


def fail(text: str, code: int) -> NoReturn:
    """Print `text` to stderr, and end the command with exit code `code`, by raising typer.Exit."""
    import typer  # takes 0.1 s, too long for runtime/signals.py, which needs only the codes

    sys.stderr.write(f"{text}\n")
    raise typer.Exit(code)
