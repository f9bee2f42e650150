"""Draws one training on one screen, with the library rich. All functions are pure."""

from datetime import datetime
from typing import Final

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from qwen35_operator.api.v1alpha1 import Attempt, ProgressStatus
from qwen35_operator.console.status_text import (
    FRESH_SECONDS,
    ago,
    explanation,
    remaining_seconds,
    report_age_seconds,
    unmet_conditions,
)
from qwen35_operator.console.training_view import TrainingView
from qwen35_trainer import formatting

STATE_STYLES: Final = {"Running": "green", "Succeeded": "green", "Failed": "red"}
SCREEN_COLUMNS: Final = 80
LABEL_COLUMNS: Final = 10
MAX_LINES: Final = 2
"""Maximum number of lines of a message on the screen; `kubectl describe` shows the whole message."""


def draw(view: TrainingView, now: datetime, trouble: str = "") -> Group:
    """Draw the screen of `qwen35 status`.

    now: the API server's time. trouble: why the shown state may be outdated; empty if it is current.
    """
    rows = Table.grid(padding=(0, 2), expand=True)
    rows.add_column(style="dim", no_wrap=True, width=LABEL_COLUMNS)
    rows.add_column(ratio=1, overflow="fold")
    for label, value in [*_state_rows(view), *_progress_rows(view, now), *_record_rows(view, now)]:
        rows.add_row(label, value)
    parts: list[RenderableType] = [_head(view, now), Text(), rows]
    if trouble:
        parts.append(Text(f"\n{trouble}", style="yellow"))
    return Group(*parts)


def _head(view: TrainingView, now: datetime) -> Table:
    head = Table.grid(padding=(0, 2), expand=True)
    head.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    head.add_column(no_wrap=True, justify="right")
    facts = " · ".join(fact for fact in (view.namespace, view.mode, view.profile) if fact)
    created = Text(f"created {ago(view.created, now)}", style="dim")
    head.add_row(Text.assemble((view.name, "bold"), (f" · {facts}", "dim")), created)
    return head


def _state_rows(view: TrainingView) -> list[tuple[str, RenderableType]]:
    """Return the rows about the state with its reason, the unmet conditions, the problem that Degraded reports, and the
    warnings of an accepted spec.

    A further row appears while the operator has not handled the latest change of the spec. Each row is a label and its
    content.
    """
    reason = explanation(view)
    state = Text.assemble(
        (view.state, f"bold {STATE_STYLES.get(view.state, 'yellow')}"), f": {reason}" if reason else ""
    )
    rows: list[tuple[str, RenderableType]] = [("state", state)]
    for place, (kind, meaning) in enumerate(unmet_conditions(view)):
        rows.append(("waits for" if place == 0 else "", Text.assemble((f"{kind}: ", "yellow"), meaning)))
    degraded = view.condition("Degraded")
    if degraded is not None and degraded.status == "True" and not view.ended:
        rows.append(("degraded", Text.assemble((f"{degraded.reason}: ", "yellow"), degraded.message)))
    accepted = view.condition("Accepted")
    if accepted is not None and accepted.status == "True" and accepted.message and not view.ended:
        rows.append(("note", Text(accepted.message, style="yellow")))
    if (view.status.observedGeneration or 0) < view.generation and view.status.conditions:
        rows.append(("", Text("the operator has not handled the latest change of the spec yet", style="yellow")))
    return rows


def _progress_rows(view: TrainingView, now: datetime) -> list[tuple[str, RenderableType]]:
    progress = view.status.progress
    if progress is None:
        return []
    rows: list[tuple[str, RenderableType]] = [("", ""), ("update", _bar(view, progress, now))]
    reward, held_out = "" if progress.reward is None else f"{progress.reward:.3f}", _held_out(progress)
    if reward or held_out:
        rows.append(("reward" if reward else "", _joined(reward, held_out)))
    if progress.lagMean is not None:
        lag = f"lag {formatting.number(progress.lagMean)} mean, {formatting.count(progress.lagMax)} max"
        rows.append(("version", _joined(formatting.count(progress.version), f"{lag}, in versions")))
    pace, speed = progress.secondsPerUpdate, progress.tokensPerSecond
    if view.state == "Running" and (pace is not None or speed is not None):
        tokens = "" if speed is None else f"{formatting.number(speed)} tokens/s"
        rows.append(("speed", _joined(tokens, "" if pace is None else f"{formatting.duration(pace)} per update")))
    if (totals := progress.totals) is not None:
        trained = {"prompts": totals.prompts, "samples": totals.samples, "tokens": totals.tokens}
        rows.append(
            ("trained", Text(", ".join(f"{formatting.count(total)} {name}" for name, total in trained.items())))
        )
    if view.state == "Running" and (age := report_age_seconds(view, now)) is not None and age > FRESH_SECONDS:
        rows.append(("", Text(f"numbers from {ago(progress.time or '', now)}", style="yellow")))
    return rows


def _held_out(progress: ProgressStatus) -> str:
    measures = []
    if progress.accuracy is not None:
        measures.append(f"accuracy {formatting.percent(progress.accuracy)}")
    if progress.heldOutReward is not None:
        measures.append(f"reward {progress.heldOutReward:.3f}")
    return f"held-out {', '.join(measures)}" if measures else ""


def _bar(view: TrainingView, progress: ProgressStatus, now: datetime) -> RenderableType:
    total = progress.totalUpdates
    if not total:
        return Text(formatting.count(progress.update))
    row = Table.grid(padding=(0, 2), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True, justify="right")
    seconds = remaining_seconds(view, now)
    rest = formatting.percent(progress.update / total)
    rest += "" if seconds is None else f", about {formatting.duration(seconds)} left"
    done = f"{formatting.count(progress.update)} of {formatting.count(total)}"
    row.add_row(done, ProgressBar(total, progress.update, complete_style="cyan", finished_style="green"), rest)
    return row


def _record_rows(view: TrainingView, now: datetime) -> list[tuple[str, RenderableType]]:
    """Return the rows about the pools, the newest checkpoint and export, the attempts, and the warnings.

    Each row is a label and its content.
    """
    rows: list[tuple[str, RenderableType]] = []
    if view.status.pools:
        rows += [("", ""), ("pools", _pools(view))]
    rows.append(("", ""))
    if (saved := view.status.lastCheckpoint) is not None:
        when = f"update {formatting.count(saved.update)}, {ago(saved.time, now)}"
        rows.append(("checkpoint", Text.assemble(when, "\n", (saved.uri, "dim"))))
    if (export := view.status.lastExport) is not None:
        when = f"update {formatting.count(export.update)}, {ago(export.time, now)}"
        rows.append(("model", Text.assemble(when, "\n", (export.uri, "dim"))))
    rows += _attempt_rows(view, now)
    if view.warnings is None:
        rows.append(("warnings", Text("not shown: no permission to list events here", style="dim")))
    warnings = [event for event in view.warnings or () if not explanation(view).startswith(event.message)]
    for place, event in enumerate(warnings):
        text = _short(f"{ago(event.time, now)}  {event.reason}: {event.message}")
        rows.append(("warnings" if place == 0 else "", text))
    return rows[:-1] if rows[-1] == ("", "") else rows


def _pools(view: TrainingView) -> Table:
    table = Table.grid(padding=(0, 3))
    table.add_column(no_wrap=True)
    names = ("desired", "ready", "unhealthy", "idle")
    for _ in names:
        table.add_column(justify="right", no_wrap=True)
    table.add_row("", *(Text(name, style="dim") for name in names))
    for pool in view.status.pools:
        ready = Text(str(pool.ready), style="" if pool.ready >= pool.desired else "yellow")
        bad = Text(str(pool.unhealthy), style="red" if pool.unhealthy else "dim")
        table.add_row(pool.name, str(pool.desired), ready, bad, formatting.percent(view.idle(pool.name)))
    return table


def _attempt_rows(view: TrainingView, now: datetime) -> list[tuple[str, RenderableType]]:
    """Return a row about the open attempt, and a row about how the last ended attempt ended.

    A row is left out if there is no such attempt.
    """
    attempts = view.status.attempts
    if not attempts:
        return []
    newest = attempts[-1]
    counted = f"restarts counted: {view.status.restarts}"
    counted += "" if view.max_restarts is None else f" of at most {view.max_restarts}"
    ended = [attempt for attempt in attempts if attempt.outcome != "Running"][-1:]
    rows: list[tuple[str, RenderableType]] = []
    if newest.outcome == "Running":
        started = f" started {ago(newest.startTime, now)}" if newest.startTime else ""
        rows.append(("attempt", Text(f"{newest.number}{started}; {counted}")))
    rows += [("attempt" if not rows else "", _short(_ended(view, attempt, now))) for attempt in ended]
    return rows


def _ended(view: TrainingView, attempt: Attempt, now: datetime) -> str:
    when = f" {ago(attempt.endTime, now)}" if attempt.endTime else ""
    reason = f", {attempt.reason}" if attempt.reason and attempt.reason != attempt.outcome else ""
    message = f": {attempt.message}" if attempt.message and attempt.message not in explanation(view) else ""
    return f"{attempt.number} {attempt.outcome.lower()}{when}{reason}{message}"


def _short(text: str) -> Text:
    """Return the text without line breaks, cut to what fits in MAX_LINES lines of the screen."""
    flat = " ".join(text.split())
    limit = (SCREEN_COLUMNS - LABEL_COLUMNS - 4) * MAX_LINES
    return Text(flat if len(flat) <= limit else f"{flat[: limit - 2]} …")


def _joined(*parts: str) -> Text:
    return Text("   ".join(part for part in parts if part))
