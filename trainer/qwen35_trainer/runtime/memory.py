"""The maximum memory that the processes of a run used together."""

from __future__ import annotations

import contextlib
import itertools
import threading

import psutil


class MemoryWatch:
    """Samples the resident memory of this process and its descendants until `stop`. Shared pages count once per process.

    Descendants are listed only in every `search_every`-th sample: that reads all of /proc, which slows a training on two cores.
    """

    def __init__(self, every_seconds: float = 2.0, search_every: int = 5) -> None:
        self._every = every_seconds
        self._search_every = search_every
        self._peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)
        self._thread.start()

    @property
    def peak(self) -> float:
        """The maximum resident memory so far, in MiB."""
        return self._peak / 2**20

    def stop(self) -> float:
        """Stop sampling, and return the peak in MiB."""
        self._stop.set()
        self._thread.join()
        return self.peak

    def _watch(self) -> None:
        me = psutil.Process()
        family: list[psutil.Process] = []
        for sample in itertools.count():
            if self._stop.wait(self._every):
                return
            if sample % self._search_every == 0:
                family = [me, *me.children(recursive=True)]
            total = 0
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    total += process.memory_info().rss
            self._peak = max(self._peak, total)
