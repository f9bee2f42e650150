"""A link through files of a folder: progress.json and history.json.gz are written, control.json is watched.

Stands in for the ConfigMaps where there is no cluster, with the same text in the files as in their keys.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

from qwen35_trainer.contract import ContractError, Control, Progress, parse_control
from qwen35_trainer.contract.names import CONTROL_KEY, HISTORY_KEY, PROGRESS_KEY
from qwen35_trainer.runtime.folder import write_whole
from qwen35_trainer.runtime.link.base import LinkDown, LinkRefused

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5


class FileLink:
    """Makes the folder. Raises LinkRefused when that is impossible."""

    def __init__(self, folder: Path) -> None:
        self._progress, self._control = folder / PROGRESS_KEY, folder / CONTROL_KEY
        self._history = folder / HISTORY_KEY
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LinkRefused(f"--link {folder}: {error.strerror}; name a folder, or cluster") from error

    async def report(self, progress: Progress) -> None:
        try:
            await asyncio.to_thread(write_whole, self._progress, progress.text())
        except OSError as error:
            raise LinkDown(f"{self._progress} was not written: {error.strerror}") from error

    async def history(self, packed: bytes) -> None:
        try:
            await asyncio.to_thread(write_whole, self._history, packed)
        except OSError as error:
            raise LinkDown(f"{self._history} was not written: {error.strerror}") from error

    async def orders(self) -> AsyncIterator[Control]:
        seen: tuple[int, ...] | None = None
        while True:
            stamp, text = await asyncio.to_thread(self._look, seen)
            if stamp != seen and text is not None:
                try:
                    yield parse_control(text)
                except ContractError as error:
                    logger.warning("%s: %s; what was asked before stays", self._control, error)
            seen = stamp
            await asyncio.sleep(LOOK_SECONDS)

    async def close(self) -> None:
        """Nothing is held."""

    def _look(self, seen: tuple[int, ...] | None) -> tuple[tuple[int, ...] | None, str | None]:
        """The file's stamp, and its text where the stamp is new."""
        try:
            stat = self._control.stat()
            stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            return stamp, None if stamp == seen else self._control.read_text()
        except FileNotFoundError:
            return None, None
        except (OSError, UnicodeDecodeError) as error:
            logger.warning("%s cannot be read: %s; what was asked before stays", self._control, error)
            return seen, None
