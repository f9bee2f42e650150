"""Exports checkpoints while a run continues, each by `qwen35 export` in a separate process.

    a checkpoint is complete ─► wanted? ─► qwen35 export CHECKPOINT ─► renamed to exports/update-000020 ─► a record
                                                           └── stop request or deadline: killed, and its files are deleted

Training continues during an export. The next save waits until the export has ended, because a save deletes old
checkpoints, which may include the one that is being exported.

Each export is a process, because the driver does not import torch, and because the memory of an export is freed with its process.
An export that fails does not end the run: the checkpoint contains the trained weights, and the record contains the problem.
That is also so if the disk is full or does not answer. Only another owner of the folder ends the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from qwen35_trainer.atomic_files import FolderWriter
from qwen35_trainer.runtime.background import Unfinished, done_before, done_within

EXPORT_COMMAND = (sys.executable, "-m", "qwen35_trainer.cli", "export")
STOPPED_PROBLEM = "the run received a request to stop"
EXPORTS_FOLDER = "exports"
"""Name of the folder of the exports, which is inside the folder of the checkpoints."""
_TEMPORARY_FOLDER = ".temporary"
_MAX_PROBLEM_CHARACTERS = 2000
"""Maximum length of a problem in an export's record. It is the end of the error output of `qwen35 export`."""


@dataclass(frozen=True)
class Exports:
    """Exports checkpoints of a run as Hugging Face folders while the run continues, and deletes old exports.

    Each export is written in the workspace of the attempt, and renamed when it is complete (qwen35_trainer/epoch.py).
    """

    stop: asyncio.Event
    """Set when the run has to stop. A running export then ends without a result."""
    seconds: float
    """Maximum duration, in seconds, of an export and of each of its steps with files. After it the export is killed."""

    async def export(self, checkpoint: Path, keep: int, writer: FolderWriter) -> tuple[Path, str]:
        """Export the model of `checkpoint`. After success, delete all exports except the newest `keep`.

        Returns (folder of the export, problem), where problem is the reason why the export failed, or "" after success.
        writer: writes into the folder of the checkpoints. Raises Superseded if another attempt owns that folder, and
        FolderRefused if its owner.json is damaged.
        """
        output = _output_of(checkpoint)
        if self.stop.is_set():
            return output, STOPPED_PROBLEM
        try:
            return output, await self._make(checkpoint, output, keep, writer)
        except Unfinished:
            return output, f"{output.parent} did not answer within spec.async.stallSeconds {self.seconds:g} s"
        except OSError as error:
            return output, f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}"

    async def is_missing(self, checkpoint: Path) -> bool:
        """Return whether no export of `checkpoint` is complete. True if the disk does not answer in time."""
        try:
            return not await done_within(self.seconds, _output_of(checkpoint).is_dir)
        except Unfinished:
            return True

    async def _make(self, checkpoint: Path, output: Path, keep: int, writer: FolderWriter) -> str:
        """Export `checkpoint` to `output`. Returns the problem, or "" after success.

        Raises OSError if the disk fails or no process can start, Unfinished if the disk does not answer in time, and
        Superseded and FolderRefused as `export` does.
        """
        making = await done_within(self.seconds, partial(_begin, writer, output))
        async with AsyncExitStack() as leftovers:
            delete = partial(shutil.rmtree, making, ignore_errors=True)
            leftovers.push_async_callback(done_within, self.seconds, delete)
            problem = await self._run(checkpoint, making / output.name)
            if not problem:
                try:
                    await done_within(self.seconds, partial(_finish, writer, making / output.name, output, keep))
                except Unfinished:
                    leftovers.pop_all()  # the thread may still publish the export, which must not be half deleted then
                    raise
        return problem

    async def _run(self, checkpoint: Path, output: Path) -> str:
        """Export `checkpoint` to `output` in another process. Returns the problem, or "" after success."""
        temporary = output.parent / _TEMPORARY_FOLDER
        temporary.mkdir(parents=True)
        silent = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(
            *EXPORT_COMMAND,
            checkpoint,
            "--output",
            output,
            stdin=silent,
            stdout=silent,
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | {"TMPDIR": str(temporary)},  # so that the files of a killed export are deleted too
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


def _output_of(checkpoint: Path) -> Path:
    """Return the folder of the export of a checkpoint, which may not exist."""
    return checkpoint.parent / EXPORTS_FOLDER / checkpoint.name


def _begin(writer: FolderWriter, output: Path) -> Path:
    """Create the folder in which `qwen35 export` writes, and return its path.

    Files of an earlier, unfinished export to `output` are deleted. So are the files that a killed export of an earlier
    release has left in the folder of the exports.
    """
    making = writer.place(f"export-{output.name}")
    shutil.rmtree(making, ignore_errors=True)
    with writer.guarded():
        making.mkdir()
    for leftover in (output.parent / _TEMPORARY_FOLDER, *output.parent.glob(".update-*.partial")):
        shutil.rmtree(leftover, ignore_errors=True)
    return making


def _finish(writer: FolderWriter, made: Path, output: Path, keep: int) -> None:
    """Rename the complete export `made` to `output`, and delete old exports.

    Of the exports up to `output`, the last `keep` are kept. Exports of later updates are deleted, because this run will
    make those updates again.
    """
    output.parent.mkdir(exist_ok=True)
    # An attempt may have exported this update before the run resumed from an earlier one.
    writer.replace(made, output)
    exports = sorted(output.parent.glob("update-*"), key=_number)
    kept = [path for path in exports if _number(path) <= _number(output)][-keep:]
    for path in exports:
        if path not in kept:
            writer.delete(path)


def _number(path: Path) -> int:
    """Return the number of the update in the name of an export's folder, or 0 for any other name.

    A folder with another name therefore counts as the oldest export, and is deleted first.
    """
    digits = path.name.removeprefix("update-")
    return int(digits) if digits.isdecimal() else 0
