"""The display of a running training: a panel if the output is a terminal, and otherwise lines of text."""

import time
from pathlib import Path
from typing import Final, Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.spinner import Spinner

from qwen35_trainer.progress.lines import LineView
from qwen35_trainer.progress.panel import panel
from qwen35_trainer.progress.records import RunRecord
from qwen35_trainer.progress.sinks.sink import Sink
from qwen35_trainer.progress.state import RunState

_MAX_WIDTH_COLUMNS: Final = 96


class View(Sink, Protocol):
    """A display of a run, which receives the records of the run. `close` leaves the last state on the screen."""

    def phase(self, text: str) -> None:
        """Show what the run is doing, such as "loading model". In a panel, an update changes the text to "training"."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def make_view(
    console: Console, *, name: str, folder: Path, updates_total: int | None, max_version_lag: int | None
) -> View:
    """Return the view for a console: a panel on a terminal, and lines elsewhere.

    folder: output folder of the run. max_version_lag: `async.maxVersionLag`, None in SFT.
    """
    run = RunState(name, folder, updates_total, max_version_lag)
    return LiveView(console, run) if console.is_terminal else LineView(console, run)


class LiveView:
    """A panel that redraws itself and fits into 80 columns and 24 lines."""

    def __init__(self, console: Console, run: RunState) -> None:
        self._run = run
        self._width = min(console.width, _MAX_WIDTH_COLUMNS)
        self._started = time.monotonic()
        self._spinner = Spinner("dots", style="cyan")
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=8)
        self._live.start()

    def phase(self, text: str) -> None:
        self._run.phase = text

    def write(self, record: RunRecord) -> None:
        self._run.add(record)

    def close(self) -> None:
        self._live.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _render(self) -> Panel:
        return panel(self._run, self._spinner, time.monotonic() - self._started, self._width)
