"""Writes a few responses of each batch and evaluation to samples.jsonl, for people to read.

    loop: trained, evaluated ─► queue ─► sampler's thread: decode ─► SampleFile
                                  │ full                              │ fails
                                  └────────────── warns once ◄────────┘        training continues without samples

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
from pathlib import Path

from qwen35_trainer.progress.sample_file import Moment, MomentKind, SampleFile
from qwen35_trainer.rewards.response_decoder import ResponseDecoder
from qwen35_trainer.runtime import process, response_samples
from qwen35_trainer.runtime.assembly import ScoredGroup

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 30.0
_MAX_QUEUED_MOMENTS = 64


class Sampler:
    """Writes sampled responses of one run to the file `path`, for reports. Errors do not end the run."""

    def __init__(self, path: Path, decoder: ResponseDecoder) -> None:
        self._path, self._decoder = path, decoder
        self._warned = False
        self._queue: queue.Queue[tuple[MomentKind, int, int, list[response_samples.SequencePick]] | None] = queue.Queue(
            _MAX_QUEUED_MOMENTS
        )
        self._thread = threading.Thread(target=self._write, name="samples", daemon=True)
        self._thread.start()

    def trained(self, groups: Sequence[ScoredGroup], *, update: int, version: int) -> None:
        """Add samples of a batch that trained at `version`. update: its last update."""
        self._put("trained", update, version, response_samples.trained(groups))

    def evaluated(self, groups: Sequence[ScoredGroup], *, update: int, version: int) -> None:
        """Add samples of an evaluation of `version`, after `update` updates."""
        self._put("held out", update, version, response_samples.held_out(groups))

    def close(self) -> None:
        """Wait until all samples are written, at most CLOSE_SECONDS."""
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

    def _put(self, kind: MomentKind, update: int, version: int, picks: list[response_samples.SequencePick]) -> None:
        try:
            self._queue.put_nowait((kind, update, version, picks))
        except queue.Full:
            self._warn("the disk is slower than the run")

    def _write(self) -> None:
        try:
            file = SampleFile(self._path)
            decode = self._decoder.load()
            process.trim()
            while (moment := self._queue.get()) is not None:
                kind, update, version, picks = moment
                try:
                    texts = tuple(response_samples.sample(pick, version, decode) for pick in picks)
                    file.add(Moment(kind=kind, update=update, version=version, samples=texts))
                except Exception as error:  # noqa: BLE001  # the texts or the tokenizer cause it, and the next samples may work
                    self._warn(f"{type(error).__name__}: {error}")
        except (OSError, ValueError) as error:
            self._warn(str(error))
            while self._queue.get() is not None:  # `close` must not wait for room
                pass

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("samples of responses are missing in %s and in the report: %s", self._path, reason)
