"""Exports of checkpoints while a run continues, each by `qwen35 export` in a process of its own.

    a checkpoint is complete ─► wanted? ─► qwen35 export CHECKPOINT --output exports/update-000020 ─► a record
                                                           └── stop request or deadline: killed, and its files are deleted

Training continues during an export. The next save waits until the export has ended, because a save deletes old checkpoints, which
may include the one that is being exported.

Each export is a process, because the driver does not import torch, and because the memory of an export is freed with its process.
An export that fails does not end the run: the checkpoint contains the trained weights, and the record contains the problem.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from qwen35_trainer.runtime.background import done_before

EXPORT_COMMAND = (sys.executable, "-m", "qwen35_trainer.cli", "export")
STOPPED_PROBLEM = "the run received a request to stop"
EXPORTS_FOLDER = "exports"
"""Folder of the exports, inside the folder of the checkpoints."""
_TEMPORARY_FOLDER = ".temporary"
_MAX_PROBLEM_CHARACTERS = 2000
"""Length of the end of a failed export's output that the record contains."""


@dataclass(frozen=True)
class Exports:
    """The exports of a run. Keeps as many exports as checkpoints."""

    stop: asyncio.Event
    """Set when the run has to stop, which ends a running export."""
    seconds: float
    """Deadline of an export."""

    async def export(self, checkpoint: Path, keep: int) -> tuple[Path, str]:
        """Export the model of `checkpoint`, and delete all exports but the newest `keep`.

        Returns the folder of the export, and the problem if there was one, else "".
        """
        output = checkpoint.parent / EXPORTS_FOLDER / checkpoint.name
        if self.stop.is_set():
            return output, STOPPED_PROBLEM
        # An attempt may have exported this update before the run resumed from an earlier one.
        await asyncio.to_thread(shutil.rmtree, output, ignore_errors=True)
        try:
            problem = await self._run(checkpoint, output)
        finally:
            await asyncio.to_thread(_delete_leftovers, output.parent)
        if not problem:
            await asyncio.to_thread(_delete_old, output, keep)
        return output, problem

    async def _run(self, checkpoint: Path, output: Path) -> str:
        """Export `checkpoint` to `output` in another process. Returns the problem, or "" after success."""
        temporary = output.parent / _TEMPORARY_FOLDER
        temporary.mkdir(parents=True, exist_ok=True)
        silent = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(
            *EXPORT_COMMAND,
            checkpoint,
            "--output",
            output,
            stdin=silent,
            stdout=silent,
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | {"TMPDIR": str(temporary)},  # where `_delete_leftovers` finds the files of a killed export
        )
        try:
            communicating = asyncio.ensure_future(asyncio.wait_for(process.communicate(), self.seconds))
            if not await done_before(self.stop, communicating):
                return STOPPED_PROBLEM
        except TimeoutError:
            return f"it took more than spec.async.stallSeconds {self.seconds:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                process.kill()
            await process.wait()
        _, stderr = communicating.result()
        if not process.returncode:
            return ""
        text = stderr.decode(errors="replace").strip()[-_MAX_PROBLEM_CHARACTERS:]
        return text or f"it ended with code {process.returncode}"


def _delete_leftovers(folder: Path) -> None:
    """Delete the files of exports that were killed or failed. The run makes one export at a time, so none is running."""
    for leftover in (folder / _TEMPORARY_FOLDER, *folder.glob(".update-*.partial")):
        shutil.rmtree(leftover, ignore_errors=True)


def _delete_old(newest: Path, keep: int) -> None:
    """Delete old exports: of those up to `newest`, keep the last `keep`.

    Delete also all exports of later updates than `newest`, because this run will make those updates again.
    """
    complete = sorted(newest.parent.glob("update-*"), key=_number)
    kept = [path for path in complete if _number(path) <= _number(newest)][-keep:]
    for path in complete:
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)


def _number(path: Path) -> int:
    """Return the update in the name of an export's folder; 0 for any other name, so that it is deleted first."""
    digits = path.name.removeprefix("update-")
    return int(digits) if digits.isdecimal() else 0
