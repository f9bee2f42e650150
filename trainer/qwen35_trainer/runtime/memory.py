"""The greatest memory that a run used, over all its processes."""

from __future__ import annotations

import contextlib
import threading

import psutil


class MemoryWatch:
    """Samples the resident memory of this process and its descendants until `stop`. Shared pages count in each."""

    def __init__(self, every_seconds: float = 1.0) -> None:
        self._every = every_seconds
        self._peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)
        self._thread.start()

    def stop(self) -> float:
        """End sampling. Returns the peak in MiB."""
        self._stop.set()
        self._thread.join()
        return self._peak / 2**20

    def _watch(self) -> None:
        me = psutil.Process()
        while not self._stop.wait(self._every):
            total = 0
            for process in (me, *me.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    total += process.memory_info().rss
            self._peak = max(self._peak, total)
