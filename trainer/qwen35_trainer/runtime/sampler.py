"""Writes a few responses of each update and evaluation to samples.jsonl, for people to read.

    loop: trained, evaluated ─► queue ─► sampler's thread: decode ─► SampleFile
                                  │ full                              │ fails
                                  └────────────── warns once ◄────────┘        training goes on, without samples

waits on                 unblocked by          deadline
trained, evaluated       never wait            –
sampler's thread: queue  a moment, or close    daemon: ends with the process
close                    everything written    CLOSE_SECONDS
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from qwen35_trainer.data.tokenizer import response_text
from qwen35_trainer.progress.samples import Kind, Moment, SampleFile
from qwen35_trainer.runtime import samples
from qwen35_trainer.runtime.assembly import ScoredGroup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 30.0
_MOMENTS = 64
"""That wait to be written."""


class Sampler:
    """Samples of one run, into the file `path`. Nothing that goes wrong here ends the run."""

    def __init__(self, path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        self._path, self._tokenizer = path, tokenizer
        self._warned = False
        self._queue: queue.Queue[tuple[Kind, int, int, list[samples.Pick]] | None] = queue.Queue(_MOMENTS)
        self._thread = threading.Thread(target=self._write, name="samples", daemon=True)
        self._thread.start()

    def trained(self, groups: Sequence[ScoredGroup], *, update: int, version: int) -> None:
        """A batch was trained at `version`; `update` is its last one."""
        self._put("trained", update, version, samples.trained(groups))

    def evaluated(self, groups: Sequence[ScoredGroup], *, update: int, version: int) -> None:
        """The held-out prompts were answered by `version`, after so many updates."""
        self._put("held out", update, version, samples.held_out(groups))

    def close(self) -> None:
        """Wait until all is written."""
        if not self._thread.is_alive():
            return
        try:
            self._queue.put(None, timeout=CLOSE_SECONDS)
        except queue.Full:
            self._warn("the disk is slower than the run")
            return
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._warn(f"the disk did not take them within {CLOSE_SECONDS:g} s")

    def _put(self, kind: Kind, update: int, version: int, picks: list[samples.Pick]) -> None:
        try:
            self._queue.put_nowait((kind, update, version, picks))
        except queue.Full:
            self._warn("the disk is slower than the run")

    def _write(self) -> None:
        decode = partial(response_text, self._tokenizer)
        try:
            file = SampleFile(self._path)
            while (moment := self._queue.get()) is not None:
                kind, update, version, picks = moment
                try:
                    texts = tuple(samples.sample(pick, version, decode) for pick in picks)
                    file.add(Moment(kind=kind, update=update, version=version, samples=texts))
                except Exception as error:  # noqa: BLE001  # whatever texts and templates hold: the next moment may be well
                    self._warn(f"{type(error).__name__}: {error}")
        except (OSError, ValueError) as error:
            self._warn(str(error))

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("samples of responses are missing in %s and in the report: %s", self._path, reason)
