"""A link to an operator through files in a folder: writes progress.json and history.json.gz, and polls control.json.

It replaces the ConfigMaps where there is no cluster. The files contain the same text as the keys of the ConfigMaps.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

from qwen35_trainer.atomic_files import write_atomically
from qwen35_trainer.contract import ContractError, Control, ProgressReport, parse_control
from qwen35_trainer.contract.shared_names import CONTROL_KEY, HISTORY_KEY, PROGRESS_KEY
from qwen35_trainer.runtime.link.operator_link import LinkDown, LinkRefused

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5


class FolderLink:
    """A link to an operator through the files of a folder.

    The folder is created if it does not exist. Raises LinkRefused if that fails.
    """

    def __init__(self, folder: Path) -> None:
        self._progress, self._control = folder / PROGRESS_KEY, folder / CONTROL_KEY
        self._history = folder / HISTORY_KEY
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LinkRefused(f"--link {folder}: {error.strerror}; name a folder, or cluster") from error

    async def report(self, progress: ProgressReport) -> None:
        try:
            await asyncio.to_thread(write_atomically, self._progress, progress.text())
        except OSError as error:
            raise LinkDown(f"{self._progress} was not written: {error.strerror}") from error

    async def history(self, packed: bytes) -> None:
        try:
            await asyncio.to_thread(write_atomically, self._history, packed)
        except OSError as error:
            raise LinkDown(f"{self._history} was not written: {error.strerror}") from error

    async def orders(self) -> AsyncIterator[Control]:
        latest_stamp: tuple[int, ...] | None = None
        while True:
            stamp, text = await asyncio.to_thread(self._read_changed, latest_stamp)
            if stamp != latest_stamp and text is not None:
                try:
                    yield parse_control(text)
                except ContractError as error:
                    logger.warning("%s: %s; the previous orders stay in force", self._control, error)
            latest_stamp = stamp
            await asyncio.sleep(POLL_SECONDS)

    async def close(self) -> None:
        """Do nothing, because no file stays open."""

    def _read_changed(self, latest_stamp: tuple[int, ...] | None) -> tuple[tuple[int, ...] | None, str | None]:
        """Return the stamp and the text of control.json.

        The stamp identifies a version of the file; it is None if there is no file. The text is None if there is no file,
        if the file still has the stamp `latest_stamp`, or if it cannot be read, which is logged.
        """
        try:
            stat = self._control.stat()
            stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            return stamp, None if stamp == latest_stamp else self._control.read_text()
        except FileNotFoundError:
            return None, None
        except (OSError, UnicodeDecodeError) as error:
            logger.warning("%s cannot be read: %s; the previous orders stay in force", self._control, error)
            return latest_stamp, None
