"""Exports of checkpoints while a run goes on, each by `qwen35 export` in a process of its own.

    a checkpoint is complete ─► asked for? ─► qwen35 export CHECKPOINT --output exports/update-000020 ─► a record
                                                              └── stop request or deadline: killed, and its files are deleted

The next checkpoint waits for it, since it may delete the one that is exported; training does not, until that checkpoint is due.

A process of its own, because the driver has no torch, and the memory that an export needs goes with it. An export that fails does
not end the run: what it trained is in the checkpoint, and the record says what went wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from qwen35_trainer.runtime.stopping import done_before

COMMAND = (sys.executable, "-m", "qwen35_trainer.cli", "export")
STOPPED = "the run received a request to stop"
EXPORTS = "exports"
"""Folder of the exports, in that of the checkpoints."""
_TEMPORARY = ".temporary"
_PRINTED = 2000
"""Characters at the end of what a failed export wrote."""


@dataclass(frozen=True)
class Exports:
    """The exports of a run, one for each checkpoint that is exported. Keeps as many as there are checkpoints."""

    stop: asyncio.Event
    """Set when the run has to stop; a running export is then ended."""
    seconds: float
    """Deadline of an export."""

    async def export(self, checkpoint: Path, keep: int) -> tuple[Path, str]:
        """Write the model of `checkpoint`, and delete all exports but the newest `keep`.

        Returns the folder, and what went wrong, or an empty text.
        """
        output = checkpoint.parent / EXPORTS / checkpoint.name
        if self.stop.is_set():
            return output, STOPPED
        # There may be one of an attempt that was resumed from earlier.
        await asyncio.to_thread(shutil.rmtree, output, ignore_errors=True)
        try:
            problem = await self._run(checkpoint, output)
        finally:
            await asyncio.to_thread(_sweep, output.parent)
        if not problem:
            await asyncio.to_thread(_forget, output, keep)
        return output, problem

    async def _run(self, checkpoint: Path, output: Path) -> str:
        """What went wrong, or an empty text."""
        temporary = output.parent / _TEMPORARY
        temporary.mkdir(parents=True, exist_ok=True)
        silent = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(
            *COMMAND,
            checkpoint,
            "--output",
            output,
            stdin=silent,
            stdout=silent,
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | {"TMPDIR": str(temporary)},  # where `_sweep` finds what a killed one leaves
        )
        try:
            written = asyncio.ensure_future(asyncio.wait_for(process.communicate(), self.seconds))
            if not await done_before(self.stop, written):
                return STOPPED
        except TimeoutError:
            return f"it took more than spec.async.stallSeconds {self.seconds:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                process.kill()
            await process.wait()
        _, said = written.result()
        if not process.returncode:
            return ""
        return said.decode(errors="replace").strip()[-_PRINTED:] or f"it ended with code {process.returncode}"


def _sweep(folder: Path) -> None:
    """Delete what exports have left that did not come to their end: the run makes one at a time."""
    for left in (folder / _TEMPORARY, *folder.glob(".update-*.partial")):
        shutil.rmtree(left, ignore_errors=True)


def _forget(newest: Path, keep: int) -> None:
    """Delete what is older than the newest `keep`, and what an attempt left that was resumed from earlier."""
    whole = sorted(newest.parent.glob("update-*"), key=_number)
    kept = [path for path in whole if _number(path) <= _number(newest)][-keep:]
    for path in whole:
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)


def _number(path: Path) -> int:
    """The update of a folder; 0 for one that only looks like an export, and goes first."""
    digits = path.name.removeprefix("update-")
    return int(digits) if digits.isdecimal() else 0
