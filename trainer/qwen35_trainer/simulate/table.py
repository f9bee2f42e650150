"""Results on a terminal of 80 columns."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from qwen35_trainer.simulate.load import Load
from qwen35_trainer.simulate.manifest import Constant
from qwen35_trainer.simulate.plan import Neighbour, Plan
from qwen35_trainer.simulate.result import Result
from qwen35_trainer.simulate.sweep import Axis, LeftOut, Row
from qwen35_trainer.simulate.trials import Trial
from qwen35_trainer.simulate.words import digits, lags_in_words, load_in_words, percent

NOTABLE_BIAS: Final = 0.05
WIDTH: Final = 80

type Column = tuple[str, Callable[[Result], str], Callable[[Result], bool]]
"""Head, cell, and which result makes the column worth its place."""


def _always(_: Result) -> bool:
    return True


def _masks(result: Result) -> bool:
    return result.masked_share > 0


COLUMNS: tuple[Column, ...] = (
    ("through-\nput", lambda result: digits(result.throughput), _always),
    ("effect-\nive", lambda result: digits(result.effective_throughput), _masks),
    ("of\nideal", lambda result: percent(result.effective_throughput / result.ideal_throughput), _always),
    ("mean\nlag", lambda result: digits(result.mean_lag), _always),
    ("max\nlag", lambda result: str(result.max_lag), _always),
    ("token\nmax", lambda result: str(result.max_token_lag), _masks),
    ("masked", lambda result: percent(result.masked_share), _masks),
    ("dis-\ncarded", lambda result: percent(result.discarded_share), lambda result: result.discarded_share > 0),
    ("bias", lambda result: percent(result.bias, signed=True), lambda result: abs(result.bias) > NOTABLE_BIAS),
    ("idle\nslots", lambda result: percent(result.idle_slots), _always),
    ("idle\ntrainer", lambda result: percent(result.idle_trainer), _always),
)


FIRST_TO_GO: Final = ("bias", "idle\nslots", "token\nmax", "of\nideal", "idle\ntrainer")
"""Columns that a narrow table goes without, in this order; JSON has them all."""


def run_table(load: Load, result: Result, seeds: int, constants: Sequence[Constant]) -> RenderableType:
    """One load."""
    lane = "" if result.idle_lane is None else f"; {percent(result.idle_lane)} of the lane's"
    full = "never all taken" if result.time_to_full is None else f"all taken after {digits(result.time_to_full)}"
    share = percent(result.effective_throughput / result.ideal_throughput)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", style="bold", no_wrap=True)
    table.add_column(style="dim")
    for name, value, note in (
        ("throughput", digits(result.throughput), "trained tokens per unit of time"),
        ("  effective", digits(result.effective_throughput), "without those masked for their age"),
        ("  ideal", digits(result.ideal_throughput), f"of the hardware, were it never idle; {share} of it reached"),
        ("lag of groups", digits(result.mean_lag), f"mean, in versions; greatest {result.max_lag}"),
        ("", "", lags_in_words(result)),
        (
            "lag of tokens",
            digits(result.mean_token_lag),
            f"mean, of those in the loss; greatest {result.max_token_lag}",
        ),
        ("masked", percent(result.masked_share), "of the tokens of trained groups"),
        ("discarded", percent(result.discarded_share), f"of the groups; filtered {percent(result.filtered_share)}"),
        (
            "length",
            digits(result.mean_trained_length),
            f"mean, trained; drawn {digits(result.true_mean_length)}: bias {percent(result.bias, signed=True)}",
        ),
        ("idle slots", percent(result.idle_slots), f"of the pool{lane}; idle engines {percent(result.idle_engines)}"),
        ("idle trainer", percent(result.idle_trainer), "of its time: it waits for a batch"),
        ("batch", digits(result.mean_step), "units of time from one to the next"),
        ("to fill", digits(result.time_to_first_batch), f"until the first batch; slots {full}"),
    ):
        table.add_row(name, value, note)
    return Group(_head(load, seeds), table, *_guesses(constants))


def sweep_table(
    load: Load, axes: Sequence[Axis], rows: Sequence[Row], left_out: Sequence[LeftOut], seeds: int
) -> RenderableType:
    """One row for each combination. Columns that are as good as 0 in every row are left out."""
    results = [row.result for row in rows]
    keys = sum(max(map(len, [*re.split(r"[-_.]", axis.key), *axis.values])) + 1 for axis in axes)
    shown = _fitting([column for column in COLUMNS if any(map(column[2], results))], WIDTH - keys - 2)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    for axis in axes:
        table.add_column(re.sub(r"[-_.]", "\n", axis.key), style="bold", overflow="fold")
    for head, _, _ in shown:
        table.add_column(head, justify="right", no_wrap=True)
    for row, result in zip(rows, results, strict=True):
        table.add_row(*row.values, *(cell(result) for _, cell, _ in shown))
    notes = [
        Text(f"left out: {_named(axes, each.values)}: {'; '.join(each.problems)}", style="dim") for each in left_out
    ]
    varied = Text(f"The first row; the others differ in {' and '.join(axis.key for axis in axes)}:")
    return Group(varied, _head(load, seeds), table, *notes)


def _fitting(columns: list[Column], width: int) -> list[Column]:
    """The columns that fit side by side."""
    for dropped in FIRST_TO_GO:
        if sum(max(map(len, head.split("\n"))) + 1 for head, _, _ in columns) <= width:
            break
        columns = [column for column in columns if column[0] != dropped]
    return columns


def plan_table(plan: Plan, constants: Sequence[Constant]) -> RenderableType:
    """The plan, what it gives, and what each neighbour would cost."""
    best = plan.recommended
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("change")
    for head in ("effective\nthroughput", "mean\nlag", "max\nlag", "idle\nslots", "idle\ntrainer"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_row("the plan", *_plan_cells(best, best), style="bold")
    if plan.manifest.choice != best.choice:
        table.add_row("the manifest as it is", *_plan_cells(plan.manifest, best), end_section=True)
    for each in plan.neighbours:
        table.add_row(_change(each), *_plan_cells(each.trial, best))
    changes = [f"  --set '{change}'" for change in plan.changes] or ["  the manifest as it is"]
    throughput, ideal = best.result.effective_throughput, best.result.ideal_throughput
    return Group(
        Text("\n".join(load_in_words(plan.load)[:2]), style="dim"),
        Text("\n".join(["", *changes, ""])),
        Text(
            f"{digits(throughput)} trained tokens per unit of time, {percent(throughput / ideal)} of what its hardware "
            f"could do. By arithmetic, s {digits(plan.estimate.least_staleness)} is the least that can keep it busy.",
        ),
        table,
        *([Text(f"* above the bound, {plan.max_lag}, or another policy: not for the plan to choose", style="dim")]),
        *_guesses(constants),
        Text(f"{plan.simulations} simulations", style="dim"),
    )


def _plan_cells(trial: Trial, best: Trial) -> list[str]:
    result = trial.result
    gain = result.effective_throughput / best.result.effective_throughput - 1
    cells = [
        digits(result.mean_lag),
        str(result.max_token_lag),
        percent(result.idle_slots),
        percent(result.idle_trainer),
    ]
    return [digits(result.effective_throughput) if trial is best else percent(gain, signed=True), *cells]


def _change(neighbour: Neighbour) -> str:
    return neighbour.change if neighbour.within else f"{neighbour.change} *"


def _head(load: Load, seeds: int) -> Text:
    return Text("\n".join([*load_in_words(load, seeds), ""]), style="dim")


def _guesses(constants: Sequence[Constant]) -> list[RenderableType]:
    found: list[RenderableType] = []
    for title, given in (("Given", True), ("Guessed, and decisive", False)):
        lines = [f"  {each.name}: {each.value}" for each in constants if each.given == given]
        if lines:
            found.append(Text("\n".join(["", f"{title}:", *lines]), style="dim"))
    return found


def _named(axes: Sequence[Axis], values: Sequence[str]) -> str:
    return ", ".join(f"{axis.key} {value}" for axis, value in zip(axes, values, strict=True))
