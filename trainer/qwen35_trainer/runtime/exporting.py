"""Exports checkpoints while a run continues, each by `qwen35 export` in a separate process.

    a checkpoint is complete ─► wanted? ─► qwen35 export CHECKPOINT --output exports/update-000020 ─► a record
                                                           └── stop request or deadline: killed, and its files are deleted

Training continues during an export. The next save waits until the export has ended, because a save deletes old
checkpoints, which may include the one that is being exported.

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
"""Name of the folder of the exports, which is inside the folder of the checkpoints."""
_TEMPORARY_FOLDER = ".temporary"
_MAX_PROBLEM_CHARACTERS = 2000
"""Maximum number of characters of an export's error output that its record contains. Earlier characters are cut."""


@dataclass(frozen=True)
class Exports:
    """Exports checkpoints of a run, and deletes old exports."""

    stop: asyncio.Event
    """The event that is set when the run has to stop. It ends a running export."""
    seconds: float
    """Maximum duration of an export, in seconds."""

    async def export(self, checkpoint: Path, keep: int) -> tuple[Path, str]:
        """Export the model of `checkpoint`. After success, delete all exports except the newest `keep`.

        Returns the folder of the export, and the reason why the export failed; "" after success.
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
    """Delete the files in `folder` of exports that were killed or failed.

    No export runs at this time, because a run makes one export at a time.
    """
    for leftover in (folder / _TEMPORARY_FOLDER, *folder.glob(".update-*.partial")):
        shutil.rmtree(leftover, ignore_errors=True)


def _delete_old(newest: Path, keep: int) -> None:
    """Delete old exports. Of the exports up to `newest`, the last `keep` are kept.

    Exports of later updates than `newest` are deleted too, because this run will make those updates again.
    """
    complete = sorted(newest.parent.glob("update-*"), key=_number)
    kept = [path for path in complete if _number(path) <= _number(newest)][-keep:]
    for path in complete:
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)


def _number(path: Path) -> int:
    """Return the number of the update in the name of an export's folder.

    Any other name gives 0, so the folder counts as the oldest and is deleted first.
    """
    digits = path.name.removeprefix("update-")
    return int(digits) if digits.isdecimal() else 0
