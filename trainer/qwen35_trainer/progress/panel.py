"""The panel of a run: pure, from its state to what rich draws. At most 17 lines, from 80 columns on."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from qwen35_trainer.progress import formatting, held_out
from qwen35_trainer.progress.records import EvaluationRecord, UpdateRecord
from qwen35_trainer.progress.state import RunState

_LAGS_DRAWN: Final = 16


def panel(run: RunState, spinner: Spinner, elapsed: float, width: int) -> Panel:
    """elapsed: seconds since the view opened, shown until the first update tells the run's own time."""
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
    """Update x of n with its bar, and what goes on."""
    head = Table.grid(padding=(0, 2), expand=True)
    head.add_column(no_wrap=True)
    head.add_column(ratio=1)
    head.add_column(no_wrap=True, justify="right")
    done = run.update.update if run.update else 0
    total = run.updates_total
    left = Text.assemble(("update ", "dim"), (f"{done}", "bold"), (f" of {total}" if total else "", "dim"))
    bar = ProgressBar(total or 1, done, complete_style="cyan", finished_style="green")
    head.add_row(left, bar, Text(formatting.duration(run.update.time if run.update else elapsed)))
    if run.finish:
        message = f": {run.finish.message}" if run.finish.message else ""
        status: RenderableType = Text(f"{run.finish.outcome}{message}", style=_border(run))
    else:
        spinner.update(text=Text(run.phase, no_wrap=True, overflow="ellipsis"))
        status = spinner
    wait = run.seconds_left() if not run.finish else None
    version = Text.assemble(("version ", "dim"), str(run.update.version)) if run.update else Text()
    head.add_row(version, status, Text(f"{formatting.duration(wait)} left" if wait else "", style="dim"))
    return head


def _rows(run: RunState) -> list[tuple[str, Text]]:
    """Label and value of each line that this run has."""
    rows: list[tuple[str, Text]] = []
    update = run.update
    if update and update.reward_mean is not None:
        spark = formatting.sparkline(run.rewards, 32)
        rows.append(("reward", _words((f"{update.reward_mean:.3f}", "bold"), (spark, "cyan"), _spread(update))))
        rows += _parts("rewards", update.score_by_reward) + _parts("sources", update.reward_by_source)
    if run.before and run.evaluation:
        rows.append(("held out", _held_out(run.before, run.evaluation)))
    if update:
        rows += _update_rows(run, update)
    if run.checkpoint:
        made = run.checkpoint
        rows.append(("checkpoint", _words((f"update {made.update}", ""), (Path(made.path).name, "dim"))))
    return rows


def _update_rows(run: RunState, update: UpdateRecord) -> list[tuple[str, Text]]:
    rows = []
    if update.response_tokens_mean is not None:
        cut = update.truncated_share
        rows.append(
            (
                "response",
                _words(
                    (f"{formatting.number(update.response_tokens_mean)} tokens", ""),
                    (f"longest {formatting.count(update.response_tokens_max)}", "dim"),
                    (f"{formatting.percent(cut)} truncated" if cut else "", "yellow" if cut and cut > 0.2 else "dim"),
                ),
            )
        )
    if update.lag_mean is not None:
        rows.append(("staleness", _staleness(run, update)))
    loss = [(f"{formatting.number(update.loss)}", "")]
    loss += [(f"entropy {formatting.number(update.entropy)}", "dim")] if update.entropy is not None else []
    rows.append(("loss", _words(*loss, (f"gradient norm {formatting.number(update.gradient_norm)}", "dim"))))
    if update.rollout_idle is not None and update.trainer_idle is not None:
        pools = (("rollout", update.rollout_idle), ("trainer", update.trainer_idle))
        rows.append(("idle", _words(*((f"{pool} {formatting.percent(share):<6}", "") for pool, share in pools))))
    speed = [(f"{formatting.number(update.tokens_per_second)} tokens/s", "")] if update.tokens_per_second else []
    rows.append(("speed", _words(*speed, (f"{formatting.duration(update.seconds)} per update", "dim"))))
    if run.first_reward_error:
        style = "yellow" if update.reward_errors else "dim"
        rows.append(("errors", _words((f"{formatting.count(update.reward_errors)} of rewards in this update", style))))
        rows.append(("", _words((" ".join(run.first_reward_error.split()), "dim"))))
    return rows


def _words(*parts: tuple[str, str]) -> Text:
    return Text("   ").join([Text(text, style) for text, style in parts if text])


def _spread(update: UpdateRecord) -> tuple[str, str]:
    return (f"± {update.reward_std:.3f}" if update.reward_std is not None else "", "dim")


def _parts(label: str, values: Mapping[str, float]) -> list[tuple[str, Text]]:
    """A row with the mean of each reward or source. None for a single one, whose mean is already there."""
    if len(values) < 2:
        return []
    return [(label, Text(formatting.by_name(values)))]


def _held_out(before: EvaluationRecord, latest: EvaluationRecord) -> Text:
    evaluations = [before] if latest is before else [before, latest]
    after = (f"after update {latest.update}", "dim")
    losses = [f"{evaluation.loss:.3f}" for evaluation in evaluations if evaluation.loss is not None]
    if losses:
        return _words((f"loss {held_out.course(losses)} nats per token", "bold"), after)
    found = held_out.measures([(evaluation.accuracy, evaluation.reward_mean) for evaluation in evaluations])
    return _words(*((f"{measure.name} {measure.course}", "bold") for measure in found), after)


def _staleness(run: RunState, update: UpdateRecord) -> Text:
    bound = run.max_version_lag
    last = max(bound or 0, update.lag_max or 0)
    window = f"window {update.window_dispatched} of {update.window_limit}" if update.window_limit else ""
    return _words(
        (f"mean {formatting.number(update.lag_mean)}", ""),
        (f"greatest {update.lag_max}" + (f" of {bound}" if bound is not None else ""), ""),
        (formatting.bars(update.lag_histogram, last) if last < _LAGS_DRAWN else "", "cyan"),
        (window, "dim"),
    )
