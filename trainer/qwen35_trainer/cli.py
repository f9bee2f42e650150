"""The entry point of `qwen35`. For `run`, runtime/signals.py takes over signals before anything slow is imported."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from qwen35_trainer.runtime.signals import Signals


def main() -> None:
    """Run the command line."""
    if sys.argv[1:2] == ["run"]:
        _run()
    _commands()


def _run() -> NoReturn:
    # Signals stay blocked until `attended` can receive them. It unblocks them.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    from qwen35_trainer.runtime.output import survive_readers
    from qwen35_trainer.runtime.signals import attended

    survive_readers()
    code = attended(_commands)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # during Python's shutdown a signal would have its default effect


def _commands(signals: Signals | None = None) -> None:
    from qwen35_trainer.commands import app

    app(obj=signals)


if __name__ == "__main__":
    main()
