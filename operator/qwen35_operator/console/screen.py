"""One training on one screen of 80 columns: pure, from what is seen to what rich draws."""

from datetime import datetime
from typing import Final

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from qwen35_operator.api.v1alpha1 import Attempt, Progress
from qwen35_operator.console.seen import Seen
from qwen35_operator.console.words import FRESH, ago, left, report_age, waits, why
from qwen35_trainer.progress import formatting

STYLES: Final = {"Running": "green", "Succeeded": "green", "Failed": "red"}
LABEL: Final = 10
LINES: Final = 2
"""Of a message: the whole one is in `kubectl describe`."""


def view(seen: Seen, now: datetime, trouble: str = "") -> Group:
    """The screen. now: the API server's time. trouble: why what is shown may be old."""
    rows = Table.grid(padding=(0, 2), expand=True)
    rows.add_column(style="dim", no_wrap=True, width=LABEL)
    rows.add_column(ratio=1, overflow="fold")
    for label, value in [*_state_rows(seen), *_progress_rows(seen, now), *_record_rows(seen, now)]:
        rows.add_row(label, value)
    parts: list[RenderableType] = [_head(seen, now), Text(), rows]
    if trouble:
        parts.append(Text(f"\n{trouble}", style="yellow"))
    return Group(*parts)


def _head(seen: Seen, now: datetime) -> Table:
    head = Table.grid(padding=(0, 2), expand=True)
    head.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    head.add_column(no_wrap=True, justify="right")
    facts = " · ".join(fact for fact in (seen.namespace, seen.mode, seen.profile) if fact)
    created = Text(f"created {ago(seen.created, now)}", style="dim")
    head.add_row(Text.assemble((seen.name, "bold"), (f" · {facts}", "dim")), created)
    return head


def _state_rows(seen: Seen) -> list[tuple[str, RenderableType]]:
    """The state and why; what is missing; what is not as it should be."""
    said = why(seen)
    state = Text.assemble((seen.state, f"bold {STYLES.get(seen.state, 'yellow')}"), f": {said}" if said else "")
    rows: list[tuple[str, RenderableType]] = [("state", state)]
    for place, (kind, meaning) in enumerate(waits(seen)):
        rows.append(("waits for" if place == 0 else "", Text.assemble((f"{kind}: ", "yellow"), meaning)))
    degraded = seen.condition("Degraded")
    if degraded is not None and degraded.status == "True" and not seen.over:
        rows.append(("degraded", Text.assemble((f"{degraded.reason}: ", "yellow"), degraded.message)))
    if (seen.status.observedGeneration or 0) < seen.generation and seen.status.conditions:
        rows.append(("", Text("the operator has not seen the latest change of the spec yet", style="yellow")))
    return rows


def _progress_rows(seen: Seen, now: datetime) -> list[tuple[str, RenderableType]]:
    progress = seen.status.progress
    if progress is None:
        return []
    rows: list[tuple[str, RenderableType]] = [("", ""), ("update", _bar(seen, progress, now))]
    reward, held_out = "" if progress.reward is None else f"{progress.reward:.3f}", _held_out(progress)
    if reward or held_out:
        rows.append(("reward" if reward else "", _words(reward, held_out)))
    if progress.lagMean is not None:
        lag = f"lag {formatting.number(progress.lagMean)} mean, {formatting.count(progress.lagMax)} greatest"
        rows.append(("version", _words(formatting.count(progress.version), f"{lag}, in versions")))
    pace, speed = progress.secondsPerUpdate, progress.tokensPerSecond
    if seen.state == "Running" and (pace is not None or speed is not None):
        tokens = "" if speed is None else f"{formatting.number(speed)} tokens/s"
        rows.append(("speed", _words(tokens, "" if pace is None else f"{formatting.duration(pace)} per update")))
    if (totals := progress.totals) is not None:
        trained = {"prompts": totals.prompts, "samples": totals.samples, "tokens": totals.tokens}
        rows.append(("trained", Text(", ".join(f"{formatting.count(many)} {what}" for what, many in trained.items()))))
    if seen.state == "Running" and (old := report_age(seen, now)) is not None and old > FRESH:
        rows.append(("", Text(f"numbers of {ago(progress.time or '', now)}", style="yellow")))
    return rows


def _held_out(progress: Progress) -> str:
    measures = []
    if progress.accuracy is not None:
        measures.append(f"accuracy {formatting.percent(progress.accuracy)}")
    if progress.heldOutReward is not None:
        measures.append(f"reward {progress.heldOutReward:.3f}")
    return f"held-out {', '.join(measures)}" if measures else ""


def _bar(seen: Seen, progress: Progress, now: datetime) -> RenderableType:
    total = progress.updates
    if not total:
        return Text(formatting.count(progress.update))
    row = Table.grid(padding=(0, 2), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True, justify="right")
    seconds = left(seen, now)
    rest = formatting.percent(progress.update / total)
    rest += "" if seconds is None else f", about {formatting.duration(seconds)} left"
    done = f"{formatting.count(progress.update)} of {formatting.count(total)}"
    row.add_row(done, ProgressBar(total, progress.update, complete_style="cyan", finished_style="green"), rest)
    return row


def _record_rows(seen: Seen, now: datetime) -> list[tuple[str, RenderableType]]:
    """Pools, the checkpoint, attempts, warnings."""
    rows: list[tuple[str, RenderableType]] = []
    if seen.status.pools:
        rows += [("", ""), ("pools", _pools(seen))]
    rows.append(("", ""))
    if (saved := seen.status.lastCheckpoint) is not None:
        when = f"update {formatting.count(saved.update)}, {ago(saved.time, now)}"
        rows.append(("checkpoint", Text.assemble(when, "\n", (saved.uri, "dim"))))
    if (export := seen.status.lastExport) is not None:
        when = f"update {formatting.count(export.update)}, {ago(export.time, now)}"
        rows.append(("model", Text.assemble(when, "\n", (export.uri, "dim"))))
    rows += _attempt_rows(seen, now)
    if seen.warnings is None:
        rows.append(("warnings", Text("not shown: no permission to list events here", style="dim")))
    news = [one for one in seen.warnings or () if not why(seen).startswith(one.message)]
    for place, one in enumerate(news):
        text = _short(f"{ago(one.time, now)}  {one.reason}: {one.message}")
        rows.append(("warnings" if place == 0 else "", text))
    return rows[:-1] if rows[-1] == ("", "") else rows


def _pools(seen: Seen) -> Table:
    table = Table.grid(padding=(0, 3))
    table.add_column(no_wrap=True)
    names = ("desired", "ready", "unhealthy", "idle")
    for _ in names:
        table.add_column(justify="right", no_wrap=True)
    table.add_row("", *(Text(name, style="dim") for name in names))
    for pool in seen.status.pools:
        ready = Text(str(pool.ready), style="" if pool.ready >= pool.desired else "yellow")
        bad = Text(str(pool.unhealthy), style="red" if pool.unhealthy else "dim")
        table.add_row(pool.name, str(pool.desired), ready, bad, formatting.percent(seen.idle(pool.name)))
    return table


def _attempt_rows(seen: Seen, now: datetime) -> list[tuple[str, RenderableType]]:
    """The present one, and how the last ended."""
    attempts = seen.status.attempts
    if not attempts:
        return []
    newest = attempts[-1]
    counted = f"restarts counted: {seen.status.restarts}"
    counted += "" if seen.most_restarts is None else f" of at most {seen.most_restarts}"
    ended = [attempt for attempt in attempts if attempt.outcome != "Running"][-1:]
    rows: list[tuple[str, RenderableType]] = []
    if newest.outcome == "Running":
        started = f" started {ago(newest.startTime, now)}" if newest.startTime else ""
        rows.append(("attempt", Text(f"{newest.number}{started}; {counted}")))
    rows += [("attempt" if not rows else "", _short(_ended(seen, attempt, now))) for attempt in ended]
    return rows


def _ended(seen: Seen, attempt: Attempt, now: datetime) -> str:
    when = f" {ago(attempt.endTime, now)}" if attempt.endTime else ""
    reason = f", {attempt.reason}" if attempt.reason and attempt.reason != attempt.outcome else ""
    said = f": {attempt.message}" if attempt.message and attempt.message not in why(seen) else ""
    return f"{attempt.number} {attempt.outcome.lower()}{when}{reason}{said}"


def _short(text: str) -> Text:
    """At most LINES lines of it."""
    words = " ".join(text.split())
    most = (80 - LABEL - 4) * LINES
    return Text(words if len(words) <= most else f"{words[: most - 2]} …")


def _words(*parts: str) -> Text:
    return Text("   ".join(part for part in parts if part))
