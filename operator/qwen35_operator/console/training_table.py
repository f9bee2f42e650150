"""Draws several trainings as a table, with one line for each."""

from collections.abc import Sequence
from datetime import datetime

from rich.table import Table
from rich.text import Text

from qwen35_operator.console.screen import STATE_STYLES
from qwen35_operator.console.status_text import brief, unmet_conditions
from qwen35_operator.console.training_view import TrainingView
from qwen35_trainer import formatting


def table(views: Sequence[TrainingView], now: datetime, *, namespaces: bool) -> Table:
    """Draw a table with a line for each training, in the given order.

    namespaces: whether the table has a column for the namespace.
    """
    drawn = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for name in ("NAMESPACE",) * namespaces + ("NAME", "STATE"):
        drawn.add_column(name, no_wrap=True)
    drawn.add_column("WAITS FOR")
    for name in ("UPDATE", "REWARD", "ROLLOUT", "AGE"):
        drawn.add_column(name, justify="right", no_wrap=True)
    for view in views:
        drawn.add_row(*(([view.namespace] if namespaces else []) + _cells(view, now)))
    return drawn


def _cells(view: TrainingView, now: datetime) -> list[str | Text]:
    progress, rollout = view.status.progress, view.pool("rollout")
    total = f"/{progress.totalUpdates}" if progress and progress.totalUpdates else ""
    return [
        view.name,
        Text(view.state, style=STATE_STYLES.get(view.state, "yellow")),
        _waiting(view),
        f"{progress.update}{total}" if progress else formatting.MISSING,
        formatting.MISSING if progress is None or progress.reward is None else f"{progress.reward:.3f}",
        formatting.MISSING if rollout is None else f"{rollout.ready}/{rollout.desired}",
        brief((now - view.created).total_seconds()),
    ]


def _waiting(view: TrainingView) -> str:
    """Return the first unmet condition and the number of further unmet conditions, such as "ClusterReady +2".

    If every condition is met, return the reason of the condition Ready, or an empty string if the reason equals the
    state or the training has ended.
    """
    if unmet := unmet_conditions(view):
        return unmet[0][0] + (f" +{len(unmet) - 1}" if len(unmet) > 1 else "")
    ready = view.condition("Ready")
    return "" if ready is None or view.ended or ready.reason == view.state else ready.reason
