"""Draws the panel of a run, with at most 17 lines, from the run's state. It needs a terminal of at least 80 columns."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from qwen35_trainer import formatting
from qwen35_trainer.progress import held_out
from qwen35_trainer.progress.records import TIME_PARTS, EvaluationRecord, UpdateRecord
from qwen35_trainer.progress.state import RunState

_MAX_LAGS_DRAWN: Final = 16
_MIN_SHARE_SHOWN: Final = 0.01
_MAX_PARTS_SHOWN: Final = 2  # more do not fit into 80 columns


def panel(run: RunState, spinner: Spinner, elapsed: float, width: int) -> Panel:
    """Draw the panel of a run.

    elapsed: seconds since the display opened. This time is shown until the first update provides the time of the run.
    width: columns of the panel.
    """
    rows = Table.grid(padding=(0, 2), expand=True)
    rows.add_column(style="dim", no_wrap=True, width=10)
    rows.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    for label, value in _rows(run):
        rows.add_row(label, value)
    head = _head(run, spinner, elapsed)
    return Panel(
        Group(head, Text(), rows) if rows.row_count else head,
        title=Text.assemble(("qwen35", "bold"), f" · {run.name}"),
        title_align="left",
        subtitle=Text(str(run.folder), style="dim"),
        subtitle_align="left",
        border_style=_border(run),
        width=width,
        padding=(0, 1),
    )


def _border(run: RunState) -> str:
    if run.finish is None:
        return "cyan"
    return {"Succeeded": "green", "Stopped": "yellow", "Failed": "red"}[run.finish.outcome]


def _head(run: RunState, spinner: Spinner, elapsed: float) -> Table:
    """Return the first two lines of the panel.

    The first line shows the update, a progress bar and the time. The second line shows the version, the phase or
    outcome, and the time left.
    """
    head = Table.grid(padding=(0, 2), expand=True)
    head.add_column(no_wrap=True)
    head.add_column(ratio=1)
    head.add_column(no_wrap=True, justify="right")
    done = run.update.update if run.update else 0
    total = run.updates_total
    counter = Text.assemble(("update ", "dim"), (f"{done}", "bold"), (f" of {total}" if total else "", "dim"))
    bar = ProgressBar(total or 1, done, complete_style="cyan", finished_style="green")
    head.add_row(counter, bar, Text(formatting.duration(run.update.time if run.update else elapsed)))
    if run.finish:
        message = f": {run.finish.message}" if run.finish.message else ""
        status: RenderableType = Text(f"{run.finish.outcome}{message}", style=_border(run))
    else:
        spinner.update(text=Text(run.phase, no_wrap=True, overflow="ellipsis"))
        status = spinner
    seconds_left = run.seconds_left() if not run.finish else None
    version = Text.assemble(("version ", "dim"), str(run.update.version)) if run.update else Text()
    head.add_row(
        version, status, Text(f"{formatting.duration(seconds_left)} left" if seconds_left else "", style="dim")
    )
    return head


def _rows(run: RunState) -> list[tuple[str, Text]]:
    """Return (label, value) for each line of the panel that applies to this run."""
    rows: list[tuple[str, Text]] = []
    update = run.update
    if update and update.reward_mean is not None:
        spark = formatting.sparkline(run.rewards.means, 32)
        rows.append(("reward", _styled((f"{update.reward_mean:.3f}", "bold"), (spark, "cyan"), _deviation(update))))
        rows += _parts("rewards", update.score_by_reward) + _parts("sources", update.reward_by_source)
    if run.before and run.evaluation:
        rows.append(("held out", _held_out(run.before, run.evaluation)))
    if update:
        rows += _update_rows(run, update)
    if run.checkpoint:
        checkpoint = run.checkpoint
        name = Path(checkpoint.path).name
        rows.append(("checkpoint", _styled((f"update {checkpoint.update}", ""), (name, "dim"))))
    return rows


def _update_rows(run: RunState, update: UpdateRecord) -> list[tuple[str, Text]]:
    rows = []
    if update.response_tokens_mean is not None:
        truncated = update.truncated_share
        style = "yellow" if truncated and truncated > 0.2 else "dim"
        rows.append(
            (
                "response",
                _styled(
                    (f"{formatting.number(update.response_tokens_mean)} tokens", ""),
                    (f"maximum {formatting.count(update.response_tokens_max)}", "dim"),
                    (f"{formatting.percent(truncated)} truncated" if truncated else "", style),
                ),
            )
        )
    if update.lag_mean is not None:
        rows.append(("staleness", _staleness(run, update)))
    loss = [(f"{formatting.number(update.loss)}", "")]
    loss += [(f"entropy {formatting.number(update.entropy)}", "dim")] if update.entropy is not None else []
    rows.append(("loss", _styled(*loss, (f"gradient norm {formatting.number(update.gradient_norm)}", "dim"))))
    if update.rollout_idle is not None and update.train_idle is not None:
        pools = (("rollout", update.rollout_idle), ("train", update.train_idle))
        shares = [(f"{pool} {formatting.percent(share):<6}", "") for pool, share in pools]
        rows.append(("idle", _styled(*shares, (_idle_parts(update), "dim"))))
    speed = [(f"{formatting.number(update.tokens_per_second)} tokens/s", "")] if update.tokens_per_second else []
    rows.append(("speed", _styled(*speed, (f"{formatting.duration(update.seconds)} per update", "dim"))))
    if run.first_reward_error:
        style = "yellow" if update.reward_errors else "dim"
        rows.append(("errors", _styled((f"{formatting.count(update.reward_errors)} of rewards in this update", style))))
        rows.append(("", _styled((formatting.excerpt(run.first_reward_error), "dim"))))
    return rows


def _idle_parts(update: UpdateRecord) -> str:
    """Return the two largest activities of the train pool other than training, as text: "copying 12%, driver 3%"."""
    if not update.seconds:
        return ""
    shares = {part: getattr(update, f"seconds_{part}") / update.seconds for part in TIME_PARTS if part != "training"}
    shown = sorted((item for item in shares.items() if item[1] >= _MIN_SHARE_SHOWN), key=lambda item: -item[1])
    return ", ".join(f"{part} {share:.0%}" for part, share in shown[:_MAX_PARTS_SHOWN])


def _styled(*parts: tuple[str, str]) -> Text:
    """Join the non-empty (text, style) parts with spaces."""
    return Text("   ").join([Text(text, style) for text, style in parts if text])


def _deviation(update: UpdateRecord) -> tuple[str, str]:
    return (f"± {update.reward_std:.3f}" if update.reward_std is not None else "", "dim")


def _parts(label: str, values: Mapping[str, float]) -> list[tuple[str, Text]]:
    """Return a row with the mean of each reward or data source.

    The list is empty if there is only one reward or source, because another row already shows its mean.
    """
    if len(values) < 2:
        return []
    return [(label, Text(formatting.by_name(values)))]


def _held_out(before: EvaluationRecord, latest: EvaluationRecord) -> Text:
    evaluations = [before] if latest is before else [before, latest]
    after = (f"after update {latest.update}", "dim")
    losses = [f"{evaluation.loss:.3f}" for evaluation in evaluations if evaluation.loss is not None]
    if losses:
        return _styled((f"loss {held_out.arrows(losses)} nats per token", "bold"), after)
    measures = held_out.measures([(evaluation.accuracy, evaluation.reward_mean) for evaluation in evaluations])
    return _styled(*((f"{measure.name} {measure.values}", "bold") for measure in measures), after)


def _staleness(run: RunState, update: UpdateRecord) -> Text:
    bound = run.max_version_lag
    last = max(bound or 0, update.lag_max or 0)
    window = f"window {update.window_dispatched} of {update.window_limit}" if update.window_limit else ""
    return _styled(
        (f"mean {formatting.number(update.lag_mean)}", ""),
        (f"maximum {update.lag_max}" + (f" of {bound}" if bound is not None else ""), ""),
        (formatting.bars(update.lag_histogram, last) if last < _MAX_LAGS_DRAWN else "", "cyan"),
        (window, "dim"),
    )
