"""Formats one training as a line of a log, for output that is not a terminal."""

from datetime import datetime

from qwen35_operator.console.status_text import explanation, remaining_seconds, unmet_conditions
from qwen35_operator.console.training_view import TrainingView
from qwen35_trainer import formatting


def line(view: TrainingView, now: datetime) -> str:
    """Format a training's state as one line: `12:03:04 Running update=412/1000 version=410 …`, with the time in UTC."""
    progress = view.status.progress
    fields: dict[str, str | None] = {}
    if progress is not None:
        total = "" if progress.totalUpdates is None else f"/{progress.totalUpdates}"
        seconds = remaining_seconds(view, now)
        fields = {
            "update": f"{progress.update}{total}",
            "version": str(progress.version),
            "reward": _format(progress.reward, ".3f"),
            "accuracy": _format(progress.accuracy, ".3f"),
            "held-out-reward": _format(progress.heldOutReward, ".3f"),
            "lag": None if progress.lagMean is None else f"{progress.lagMean:.2f}/{progress.lagMax}",
            "tokens/s": _format(progress.tokensPerSecond, ".0f"),
            "left": None if seconds is None else formatting.duration(seconds).replace(" ", ""),
        }
    fields |= {pool.name: f"{pool.ready}/{pool.desired}" for pool in view.status.pools}
    numbers = [f"{name}={value}" for name, value in fields.items() if value is not None]
    unmet = "".join(f" [{kind}: {meaning}]" for kind, meaning in unmet_conditions(view))
    reason = " ".join(explanation(view).split())
    return " ".join([f"{now:%H:%M:%S}", view.state, *numbers, *([f"· {reason}"] if reason else [])]) + unmet


def _format(value: float | None, form: str) -> str | None:
    return None if value is None else format(value, form)
