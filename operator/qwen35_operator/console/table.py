"""Many trainings, one line each."""

from collections.abc import Sequence
from datetime import datetime

from rich.table import Table
from rich.text import Text

from qwen35_operator.console.screen import STYLES
from qwen35_operator.console.seen import Seen
from qwen35_operator.console.words import brief, waits
from qwen35_trainer.progress import formatting


def table(trainings: Sequence[Seen], now: datetime, *, namespaces: bool) -> Table:
    """In the order given. namespaces: with a column for them."""
    drawn = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for name in ("NAMESPACE",) * namespaces + ("NAME", "STATE"):
        drawn.add_column(name, no_wrap=True)
    drawn.add_column("WAITS FOR")
    for name in ("UPDATE", "REWARD", "ROLLOUT", "AGE"):
        drawn.add_column(name, justify="right", no_wrap=True)
    for seen in trainings:
        drawn.add_row(*(([seen.namespace] if namespaces else []) + _cells(seen, now)))
    return drawn


def _cells(seen: Seen, now: datetime) -> list[str | Text]:
    progress, rollout = seen.status.progress, seen.pool("rollout")
    total = f"/{progress.updates}" if progress and progress.updates else ""
    return [
        seen.name,
        Text(seen.state, style=STYLES.get(seen.state, "yellow")),
        _waiting(seen),
        f"{progress.update}{total}" if progress else formatting.NONE,
        formatting.NONE if progress is None or progress.reward is None else f"{progress.reward:.3f}",
        formatting.NONE if rollout is None else f"{rollout.ready}/{rollout.desired}",
        brief((now - seen.created).total_seconds()),
    ]


def _waiting(seen: Seen) -> str:
    """The first condition that is missing and how many more; else why it does not run, as one word."""
    if missing := waits(seen):
        return missing[0][0] + (f" +{len(missing) - 1}" if len(missing) > 1 else "")
    ready = seen.condition("Ready")
    return "" if ready is None or seen.over or ready.reason == seen.state else ready.reason
