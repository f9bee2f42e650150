"""Formats the results of simulations, sweeps and plans as text for a terminal of 80 columns, and as JSON (`--json`)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from qwen35_trainer.formatting import counted, number, percent
from qwen35_trainer.simulate.manifest_workload import AssumedConstant, describe_lengths
from qwen35_trainer.simulate.plan import Neighbour, PlanResult
from qwen35_trainer.simulate.plan_search import Trial
from qwen35_trainer.simulate.simulation_result import SimulationResult
from qwen35_trainer.simulate.sweep import SkippedCombination, SweepAxis, SweepRow
from qwen35_trainer.simulate.workload import BatchPolicy, Workload

NOTABLE_BIAS: Final = 0.05
MAX_WIDTH_COLUMNS: Final = 80

type Column = tuple[str, Callable[[SimulationResult], str], Callable[[SimulationResult], bool]]
"""A column of a table of results: its head, a function that returns the text of a result's cell, and a function that
returns whether the column is of interest for a result. A column that is of interest for no result is left out."""


def _always(_: SimulationResult) -> bool:
    return True


def _masks(result: SimulationResult) -> bool:
    return result.masked_share > 0


def _prefills(result: SimulationResult) -> bool:
    return result.prefill_tokens > 0


COLUMNS: tuple[Column, ...] = (
    ("through-\nput", lambda result: number(result.throughput), _always),
    ("effect-\nive", lambda result: number(result.effective_throughput), _masks),
    ("of\nideal", lambda result: percent(result.effective_throughput / result.ideal_throughput), _always),
    ("mean\nlag", lambda result: number(result.mean_lag), _always),
    ("max\nlag", lambda result: str(result.max_lag), _always),
    ("token\nmax", lambda result: str(result.max_token_lag), _masks),
    ("masked", lambda result: percent(result.masked_share), _masks),
    ("dis-\ncarded", lambda result: percent(result.discarded_share), lambda result: result.discarded_share > 0),
    ("bias", lambda result: percent(result.bias, signed=True), lambda result: abs(result.bias) > NOTABLE_BIAS),
    ("tokens\nprefilled", lambda result: f"{result.prefill_tokens:,.0f}", _prefills),
    ("replicas\nper group", lambda result: number(result.replicas_per_group), _prefills),
    ("idle\nslots", lambda result: percent(result.idle_slots), _always),
    ("idle\ntrainer", lambda result: percent(result.train_idle), _always),
)


DROP_ORDER: Final = (
    "tokens\nprefilled",
    "replicas\nper group",
    "bias",
    "idle\nslots",
    "token\nmax",
    "of\nideal",
    "idle\ntrainer",
)
"""Heads of the columns that may be left out. The first ones are left out first, until the table fits into the terminal.

JSON has all columns.
"""


def run_table(
    workload: Workload, result: SimulationResult, seeds: int, constants: Sequence[AssumedConstant]
) -> RenderableType:
    """Return the table that `qwen35 simulate` prints for one workload.

    seeds: number of seeds over which `result` is averaged. constants: quantities that the manifest does not contain.
    """
    lane = "" if result.idle_lane is None else f"; {percent(result.idle_lane)} of the lane's"
    slots = "never all taken" if result.time_to_full is None else f"all taken after {number(result.time_to_full)}"
    share = percent(result.effective_throughput / result.ideal_throughput)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", style="bold", no_wrap=True)
    table.add_column(style="dim")
    for name, value, note in (
        ("throughput", number(result.throughput), "trained tokens per unit of time"),
        ("  effective", number(result.effective_throughput), "without those masked because of their age"),
        ("  ideal", number(result.ideal_throughput), f"if the hardware were never idle; {share} of it reached"),
        ("lag of groups", number(result.mean_lag), f"mean, in versions; maximum {result.max_lag}"),
        ("", "", describe_lags(result)),
        (
            "lag of tokens",
            number(result.mean_token_lag),
            f"mean, of those in the loss; maximum {result.max_token_lag}",
        ),
        ("masked", percent(result.masked_share), "of the tokens of trained groups"),
        ("discarded", percent(result.discarded_share), f"of the groups; filtered {percent(result.filtered_share)}"),
        (
            "length",
            number(result.mean_trained_length),
            f"mean, trained; sampled {number(result.true_mean_length)}: bias {percent(result.bias, signed=True)}",
        ),
        ("idle slots", percent(result.idle_slots), f"of the pool{lane}; idle replicas {percent(result.idle_replicas)}"),
        (
            "idle trainer",
            percent(result.train_idle),
            f"of its time: it waits for a batch; copies weights {percent(result.train_copying)}",
        ),
        (
            "prefill",
            f"{result.prefill_tokens:,.0f}",
            f"tokens; a group is on {number(result.replicas_per_group)} replicas on average",
        ),
        ("batch", number(result.mean_step), "units of time from one to the next"),
        ("to fill", number(result.time_to_first_batch), f"until the first batch; slots {slots}"),
    ):
        table.add_row(name, value, note)
    return Group(_head(workload, seeds), table, *_assumptions(constants))


def sweep_table(
    workload: Workload,
    axes: Sequence[SweepAxis],
    rows: Sequence[SweepRow],
    skipped: Sequence[SkippedCombination],
    seeds: int,
) -> RenderableType:
    """Return a table with one row per combination of a sweep.

    A column is left out if it is of interest for no row. Further columns are left out, in the
    order of DROP_ORDER, until the table fits into 80 columns of the terminal.
    """
    results = [row.result for row in rows]
    axes_width = sum(max(map(len, [*re.split(r"[-_.]", axis.key), *axis.values])) + 1 for axis in axes)
    relevant = [column for column in COLUMNS if any(map(column[2], results))]
    columns = _fitting(relevant, MAX_WIDTH_COLUMNS - axes_width - 2)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    for axis in axes:
        table.add_column(re.sub(r"[-_.]", "\n", axis.key), style="bold", overflow="fold")
    for head, _, _ in columns:
        table.add_column(head, justify="right", no_wrap=True)
    for row, result in zip(rows, results, strict=True):
        table.add_row(*row.values, *(cell(result) for _, cell, _ in columns))
    notes = [
        Text(f"left out: {_assignments(axes, item.values)}: {'; '.join(item.problems)}", style="dim")
        for item in skipped
    ]
    title = Text(f"The first row; the others differ in {' and '.join(axis.key for axis in axes)}:")
    return Group(title, _head(workload, seeds), table, *notes)


def _fitting(columns: list[Column], width: int) -> list[Column]:
    """Return the columns that fit into `width` characters. Others are left out in the order of DROP_ORDER."""
    for dropped in DROP_ORDER:
        if sum(max(map(len, head.split("\n"))) + 1 for head, _, _ in columns) <= width:
            break
        columns = [column for column in columns if column[0] != dropped]
    return columns


def plan_table(plan: PlanResult, constants: Sequence[AssumedConstant]) -> RenderableType:
    """Return the table that `qwen35 plan` prints, and the text above and below it.

    The text has the workload, the changes as `--set` options, and `constants`, which the manifest does not contain. The
    rows are the recommended plan, the manifest without changes if it differs from this plan, and each neighbour: a plan
    that differs from the recommended plan in one choice.
    """
    best = plan.recommended
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("change")
    for head in ("effective\nthroughput", "mean\nlag", "max\nlag", "idle\nslots", "idle\ntrainer", "copies\nweights"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_row("the plan", *_plan_cells(best, best), style="bold")
    if plan.manifest.choice != best.choice:
        table.add_row("the manifest as it is", *_plan_cells(plan.manifest, best), end_section=True)
    for neighbour in plan.neighbours:
        table.add_row(_change(neighbour), *_plan_cells(neighbour.trial, best))
    changes = [f"  --set '{change}'" for change in plan.changes] or ["  the manifest as it is"]
    throughput, ideal = best.result.effective_throughput, best.result.ideal_throughput
    return Group(
        Text("\n".join(describe_workload(plan.workload)[:2]), style="dim"),
        Text("\n".join(["", *changes, ""])),
        Text(
            f"{number(throughput)} trained tokens per unit of time, {percent(throughput / ideal)} of the hardware's ideal. "
            f"The analytic estimate of the minimum s that keeps it busy is {number(plan.estimate.min_staleness)}.",
        ),
        table,
        Text(f"* above the bound of {plan.max_lag}, or with another policy: the plan may not choose it", style="dim"),
        *_assumptions(constants),
        Text(f"{plan.simulations} simulations", style="dim"),
    )


def speeds_of_split(workload: Workload, mean: float, *, has_speeds: bool) -> str:
    """Return a sentence about the speeds and lengths with which the split below is simulated, and those of the times above.

    mean: mean tokens of a response with which the times were computed. has_speeds: whether options gave the speeds.
    """
    speeds = "the speeds of --decode and --train-seconds-per-token" if has_speeds else "assumed speeds"
    how = "" if has_speeds else " Set speeds by --decode and --train-seconds-per-token, and lengths by --mean."
    return (
        f"The split below is simulated with {speeds}, not with the times above. Its responses are {describe_lengths(workload)}; "
        f"the times are for {mean:,.0f} tokens in the mean.{how}\n"
    )


def _plan_cells(trial: Trial, best: Trial) -> list[str]:
    result = trial.result
    gain = result.effective_throughput / best.result.effective_throughput - 1
    cells = [
        number(result.mean_lag),
        str(result.max_token_lag),
        percent(result.idle_slots),
        percent(result.train_idle),
        percent(result.train_copying),
    ]
    return [number(result.effective_throughput) if trial is best else percent(gain, signed=True), *cells]


def _change(neighbour: Neighbour) -> str:
    return neighbour.change if neighbour.is_allowed else f"{neighbour.change} *"


def _head(workload: Workload, seeds: int) -> Text:
    return Text("\n".join([*describe_workload(workload, seeds), ""]), style="dim")


def _assumptions(constants: Sequence[AssumedConstant]) -> list[RenderableType]:
    """Return the quantities that a manifest does not contain as text: first those that options set, then the assumed
    ones.
    """
    texts: list[RenderableType] = []
    for title, is_given in (("Given", True), ("Assumed, and decisive", False)):
        lines = [f"  {constant.name}: {constant.value}" for constant in constants if constant.is_given == is_given]
        if lines:
            texts.append(Text("\n".join(["", f"{title}:", *lines]), style="dim"))
    return texts


def _assignments(axes: Sequence[SweepAxis], values: Sequence[str]) -> str:
    return ", ".join(f"{axis.key} {value}" for axis, value in zip(axes, values, strict=True))


def describe_workload(workload: Workload, seeds: int = 1) -> list[str]:
    """Return a description of a workload in three lines.

    The first line has the policy and its settings, such as the staleness threshold s and the maximum lag S. Then it has
    P groups per batch, G sequences per group and K batches per version. The second line has the pools. The third line
    has the response lengths, the number of batches and the seeds.
    """
    window = workload.settings.window
    knobs = [str(workload.policy)]
    if workload.policy is BatchPolicy.DEADLINE_FIRST:
        knobs += [f"s {window.staleness_threshold:g}, S {window.max_version_lag}", str(workload.on_missed_deadline)]
        knobs += ["adaptive"] if workload.adaptive else []
    elif window.staleness_threshold:
        knobs.append(f"s {window.staleness_threshold:g}")
    seed = f"seed {workload.seed}" if seeds == 1 else f"seeds {workload.seed} to {workload.seed + seeds - 1}"
    return [
        " · ".join(
            [*knobs, f"P {workload.prompts_per_batch}, G {workload.group_size}, K {workload.batches_per_version}"]
        ),
        " · ".join([_pool(workload), *_lane(workload), counted(workload.train_pool.units, "trainer unit")]),
        f"{describe_lengths(workload)} · {workload.batches - workload.warm_up} batches after {workload.warm_up}, {seed}",
    ]


def _pool(workload: Workload) -> str:
    slots = sorted({replica.slots for replica in workload.replicas})
    return f"{counted(len(workload.replicas), 'replica')} × {'/'.join(f'{n:,}' for n in slots)} slots"


def _lane(workload: Workload) -> list[str]:
    if (lane := workload.lane) is None:
        return []
    return [
        f"lane: {counted(lane.replicas, 'replica')}, {lane.speed:.3g} × as fast, after {lane.after_tokens:,} tokens"
    ]


def describe_lags(result: SimulationResult, max_lags: int = 8) -> str:
    """Return the share of trained groups by lag in versions as text, such as "1: 29%, 2: 47%".

    max_lags: number of lags that are listed; larger lags are summed up as "above".
    """
    total = sum(result.lag_histogram) or 1
    shares = [(lag, count / total) for lag, count in enumerate(result.lag_histogram) if count]
    texts = [f"{lag}: {percent(share)}" for lag, share in shares[:max_lags]]
    share_above = sum(share for _, share in shares[max_lags:])
    return ", ".join(texts + ([f"above: {percent(share_above)}"] if share_above else []))


def run_json(row: SweepRow, constants: Sequence[AssumedConstant]) -> dict[str, Any]:
    """Return the data that `qwen35 simulate --json` prints for one workload."""
    return _json_head(row, constants) | {"result": row.result.as_dict()}


def sweep_json(
    axes: Sequence[SweepAxis],
    rows: Sequence[SweepRow],
    skipped: Sequence[SkippedCombination],
    constants: Sequence[AssumedConstant],
) -> dict[str, Any]:
    """Return the data that `qwen35 simulate --sweep --json` prints, with one row per combination.

    The key `workload` describes the workload of the first row.
    """
    keys = [axis.key for axis in axes]
    return _json_head(rows[0], constants) | {
        "rows": [{"values": dict(zip(keys, row.values, strict=True)), "result": row.result.as_dict()} for row in rows],
        "leftOut": [
            {"values": dict(zip(keys, item.values, strict=True)), "problems": item.problems} for item in skipped
        ],
    }


def plan_json(plan: PlanResult, constants: Sequence[AssumedConstant]) -> dict[str, Any]:
    """Return the data that `qwen35 plan --json` prints.

    They contain the recommended plan, the manifest without changes, and each neighbour: a plan that differs from
    the recommended plan in one choice.
    """
    best = plan.recommended.result.effective_throughput
    neighbours = [
        {
            "change": neighbour.change,
            "withinBound": neighbour.is_allowed,
            "throughputChange": neighbour.trial.result.effective_throughput / best - 1,
        }
        | _trial(neighbour.trial)
        for neighbour in plan.neighbours
    ]
    return {
        "set": plan.changes,
        "plan": _trial(plan.recommended),
        "manifest": _trial(plan.manifest),
        "neighbours": neighbours,
        "arithmetic": {"ideal": plan.estimate.ideal, "minStaleness": plan.estimate.min_staleness},
        "maxLag": plan.max_lag,
        "simulations": plan.simulations,
        "constants": _constants(constants),
    }


def without_infinities(value: Any) -> Any:  # noqa: ANN401  (JSON)
    """Return the value with None in place of infinity and NaN, which JSON cannot represent."""
    if isinstance(value, dict):
        return {key: without_infinities(inside) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [without_infinities(inside) for inside in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _json_head(row: SweepRow, constants: Sequence[AssumedConstant]) -> dict[str, Any]:
    return {"workload": _workload_json(row.workload, len(row.runs)), "constants": _constants(constants)}


def _trial(trial: Trial) -> dict[str, Any]:
    return {"fields": trial.choice.as_dict(), "result": trial.result.as_dict()}


def _workload_json(workload: Workload, seeds: int) -> dict[str, Any]:
    """Return the bounds of staleness and the sizes of a workload."""
    window, lane = workload.settings.window, workload.lane
    return {
        "policy": str(workload.policy),
        "onMissedDeadline": str(workload.on_missed_deadline),
        "stalenessThreshold": window.staleness_threshold,
        "maxVersionLag": window.max_version_lag if workload.policy is BatchPolicy.DEADLINE_FIRST else None,
        "promptsPerBatch": workload.prompts_per_batch,
        "groupSize": workload.group_size,
        "batchesPerVersion": workload.batches_per_version,
        "replicas": len(workload.replicas),
        "slots": sum(replica.slots for replica in workload.replicas),
        "trainerUnits": workload.train_pool.units,
        "lane": lane and {"replicas": lane.replicas, "speed": lane.speed, "afterTokens": lane.after_tokens},
        "lengths": describe_lengths(workload),
        "batches": workload.batches,
        "warmUp": workload.warm_up,
        "seed": workload.seed,
        "seeds": seeds,
    }


def _constants(constants: Sequence[AssumedConstant]) -> list[dict[str, Any]]:
    return [{"name": item.name, "value": item.value, "assumed": not item.is_given} for item in constants]
